"""Read-only view of an instance for callers outside the machine. Every answer is a copy or a number.

The simulator (sim/) and the metrics read it; the machine itself never does.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from baton.core.engine.board import Board
from baton.core.engine.phase import AWAY, Phase
from baton.core.engine.request import Sequence
from baton.core.engine.scheduler import PlanInFlight
from baton.core.kv.circuit import CircuitState
from baton.core.kv.move import TierStats
from baton.protocol.ids import BlockId, BlockKey, HostBlockId, Incarnation, RequestId, Slot, StepNo
from baton.protocol.step import StepPlan


class Load(NamedTuple):
    """Resources in use. All fields but the free and idle blocks are zero: the instance is at rest."""

    blocks_free: int
    blocks_idle: int
    "Cached blocks that no request and no move holds."
    blocks_held: int
    slots_taken: int
    waiting: int
    running: int
    preempting: int
    loading: int
    "Blocks that a move fills, and sequences that hold blocks without running."
    drops: int
    "Drops for the next plan."
    plans: int
    "Plans in flight."
    requests: int
    queued: int
    kept: int
    "Prompts whose blocks are kept for another instance, or will be."


class SchedulerView:
    __slots__ = ("_board", "_in_flight")

    def __init__(self, board: Board, in_flight: deque[PlanInFlight]) -> None:
        self._board = board
        self._in_flight = in_flight

    def load(self) -> Load:
        board, pool = self._board, self._board.cache.pool
        return Load(
            blocks_free=pool.free,
            blocks_idle=pool.idle,
            blocks_held=pool.total - pool.free - pool.idle,
            slots_taken=board.slots.taken,
            waiting=len(board.waiting),
            running=len(board.running),
            preempting=len(board.preempting),
            loading=len(board.leased) + len(board.tiers.pinned()),
            drops=len(board.drops),
            plans=len(self._in_flight),
            requests=len(board.groups),
            queued=board.queued,
            kept=len(board.kept),
        )

    @property
    def has_work(self) -> bool:
        """Whether a sequence runs or waits in the queue, or a drop is to be sent."""
        board = self._board
        return bool(board.running or board.waiting.waiting or board.drops)

    # Requests

    @property
    def open_requests(self) -> int:
        return len(self._board.groups)

    def request_ids(self) -> list[RequestId]:
        """Ids of all requests that hold something here: open, or kept for another instance."""
        return list(dict.fromkeys([*self._board.groups, *self._board.kept]))

    def is_open(self, request: RequestId) -> bool:
        return request in self._board.groups

    def sequences(self, request: RequestId) -> list[Sequence]:
        """The sequences of an open request. The objects stay readable after their end."""
        group = self._board.groups.get(request)
        return list(group.sequences) if group is not None else []

    def slot_owner(self, slot: Slot, incarnation: Incarnation) -> Sequence | None:
        """The owner of the slot; None if that incarnation has ended."""
        return self._board.slots.occupant_of(slot, incarnation)

    def preempting(self) -> list[Sequence]:
        """Sequences without blocks whose drop is not acknowledged yet."""
        return list(self._board.preempting)

    def queue_head(self) -> Sequence | None:
        return self._board.waiting.head()

    def preempted_requests(self, most: int) -> list[RequestId]:
        """Ids of at most `most` requests with a sequence that was preempted and does not run now, in queue order."""
        away = [sequence for sequence in self._board.away if sequence.phase in AWAY]
        away.sort(key=lambda sequence: sequence.order)
        return list(dict.fromkeys(sequence.request.id for sequence in away))[:most]

    def held_blocks(self, most: int) -> tuple[tuple[int, int], ...]:
        """Blocks of sequences that give way to more urgent ones, by priority: the `most` least urgent priorities, the least
        urgent first. A shared block counts for each sequence."""
        held: dict[int, int] = {}
        for sequence in (*self._board.running, *self._board.leased):
            held[sequence.priority] = held.get(sequence.priority, 0) + len(sequence.blocks)
        return tuple(sorted(held.items(), reverse=True)[:most])

    def running(self) -> list[Sequence]:
        """Sequences on the worker, the most urgent first."""
        return list(self._board.running)

    def loading(self) -> list[Sequence]:
        """Sequences that wait for a lower tier."""
        if not self._board.loading:
            return []
        return [s for group in self._board.groups.values() for s in group.sequences if s.phase is Phase.LOADING]

    @property
    def blocks_available(self) -> int:
        """Blocks that a router may count on: free or idle, and no reservation waits for them."""
        board, pool = self._board, self._board.cache.pool
        needs = [board.need(sequence) for sequence in board.awaiting]
        return max(0, pool.free + pool.idle - sum(need.new + need.hit_idle for need in needs))

    def awaiting(self) -> list[Sequence]:
        """Sequences whose reservation waits for blocks, the most urgent first."""
        return list(self._board.awaiting)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of sequences that were never admitted."""
        return self._board.queued_tokens

    # Plans

    def plans(self) -> list[StepPlan]:
        """Plans in flight, the oldest first."""
        return [issued.plan for issued in self._in_flight]

    @property
    def oldest_step(self) -> StepNo | None:
        """Number of the oldest plan in flight."""
        return self._in_flight[0].plan.step if self._in_flight else None

    def circuits(self) -> dict[str, CircuitState]:
        """States of the circuits for reads and writes of storage."""
        tiers = self._board.tiers
        return {"read": tiers.read_circuit.state, "write": tiers.write_circuit.state}

    @property
    def tier_stats(self) -> TierStats:
        return self._board.tiers.stats

    # Blocks

    def is_shared(self, block: BlockId) -> bool:
        """Whether the block is cached or held by more than one request, so that it must not be written."""
        pool = self._board.cache.pool
        return pool.is_cached(block) or pool.request_references(block) > 1

    def is_cached(self, block: BlockId) -> bool:
        return self._board.cache.pool.is_cached(block)

    def is_held(self, block: BlockId) -> bool:
        """Whether a request or a move holds the block."""
        pool = self._board.cache.pool
        return pool.request_references(block) > 0 or pool.is_pinned(block)

    def device_index(self) -> dict[BlockKey, BlockId]:
        """Blocks in the device's prefix cache, by key."""
        return self._board.cache.index()

    def host_index(self) -> dict[BlockKey, HostBlockId]:
        """Blocks in the host tier, by key."""
        return self._board.tiers.host.index()

    def host_key(self, block: HostBlockId) -> BlockKey | None:
        """The key of a block in the host tier."""
        return self._board.tiers.host.key_of(block)

    def host_is_stored(self, key: BlockKey) -> bool:
        """Whether storage has the block too, as far as the instance knows."""
        return self._board.tiers.host.is_stored(key)

    def generations(self) -> list[int]:
        return self._board.cache.pool.generations()

    @property
    def evicted(self) -> int:
        """Number of cached blocks evicted so far."""
        return self._board.cache.evicted

    @property
    def reserve_ratio(self) -> float:
        """The share of its max_tokens that a sequence is expected to use (reserve.py)."""
        return self._board.reserve.ratio
