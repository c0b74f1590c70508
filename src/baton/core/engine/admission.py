"""Limits that can keep the head of the queue from being admitted. Admission asks a list, cheap limits first; a feature adds an
entry, not a branch.

A limit returns None, or the reason, which is also the metric label. A limit sees a `Room`: that of the step being
planned, or the room left if certain victims were gone (preemption.py). Running sequences are not limited here.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.engine.board import Board
from baton.core.engine.request import Sequence
from baton.core.engine.stats import HeldBack
from baton.protocol.request import SamplingParams, sampling_bytes


class Room:
    """The resources that a step has left for new sequences."""

    __slots__ = ("_asked", "_reserves", "available", "new_bytes", "new_bytes_max", "prefill_left", "settings", "slots_free")

    def __init__(self, prefill_left: int, slots_free: int, available: int, new_bytes_max: int) -> None:
        self.prefill_left = prefill_left
        "Prompt tokens left in the step."
        self.slots_free = slots_free
        self.available = available
        "Available blocks."
        self.new_bytes_max = new_bytes_max
        self.new_bytes = 0
        "Bytes on the wire of the sequences admitted so far."
        self.settings: dict[SamplingParams, int] = {}
        "Distinct sampling settings of the new sequences, each with its row in the plan."
        self._reserves: dict[int, int] = {}
        self._asked: tuple[Sequence, int] | None = None
        "The last sequence passed to `bytes_for`, and its size: admission asks twice about the head."

    def reserve(self, board: Board, priority: int) -> int:
        """Blocks to leave for growth: summed up once per step and class, then kept up to date by `admitted`."""
        if priority not in self._reserves:
            self._reserves[priority] = board.reserved(priority)
        return self._reserves[priority]

    def expect(self, priority: int, reserve: int) -> None:
        """Set the reserve of a hypothetical board (preemption.py)."""
        self._reserves[priority] = reserve

    def refresh(self, board: Board) -> None:
        """Read the available blocks again, and forget the reserves: leases have changed."""
        self.available = board.cache.available
        self._reserves.clear()

    def admitted(self, board: Board, sequence: Sequence, *, leased: bool) -> int:
        """Subtract an admitted sequence and return the row of its settings in the plan. `leased`: it held its blocks before, so
        its growth was counted."""
        self.new_bytes += self._asked[1] if self._asked and self._asked[0] is sequence else self.bytes_for(sequence)
        row = self.settings.setdefault(sequence.group.settings, len(self.settings))
        self.slots_free = board.slots.free
        self.available = board.cache.available
        for priority in self._reserves:
            if sequence.priority <= priority and not leased:
                self._reserves[priority] += board.reserve.blocks(sequence)
        return row

    def bytes_for(self, sequence: Sequence) -> int:
        settings = sequence.group.settings
        size = new_bytes(len(sequence.tokens), None if settings in self.settings else settings)
        self._asked = sequence, size
        return size


Limit = Callable[[Sequence, Room, Board], HeldBack | None]


def token_budget(head: Sequence, room: Room, board: Board) -> HeldBack | None:
    """Checks that the step has room for at least one prompt token."""
    return None if room.prefill_left > 0 else "budget"


def slots(head: Sequence, room: Room, board: Board) -> HeldBack | None:
    """Checks that a slot is free. A slot whose drop is not acknowledged is still taken."""
    return None if room.slots_free > 0 else "slots"


def order(head: Sequence, room: Room, board: Board) -> HeldBack | None:
    """Checks that no preempted, more urgent sequence is still on its way back to the queue: none overtakes it."""
    if board.preempting and any(sequence.order < head.order for sequence in board.preempting):
        return "order"
    return None


def plan_bytes(head: Sequence, room: Room, board: Board) -> HeldBack | None:
    """Checks that the new sequences of a step fit into a plan. One is always admitted."""
    over = room.new_bytes + room.bytes_for(head) - room.new_bytes_max
    return "plan" if over > 0 and room.new_bytes else None


def blocks(head: Sequence, room: Room, board: Board) -> HeldBack | None:
    """Checks that all needed blocks are available at once, besides the reserve for the growth of all holders, and those that an
    earlier reservation waits for."""
    if head.blocks:
        return None  # the sequence has a lease on all blocks that it needs
    need = board.need(head)
    missing = need.new + need.hit_idle + room.reserve(board, head.priority) - room.available
    if board.awaiting:
        missing += board.claimed(head)
    return "blocks" if missing > 0 else None


LIMITS: tuple[Limit, ...] = (token_budget, slots, order, plan_bytes, blocks)


def shortage(head: Sequence, room: Room, board: Board) -> HeldBack | None:
    """The first shortage that a limit reports."""
    for limit in LIMITS:
        short = limit(head, room, board)
        if short is not None:
            return short
    return None


def new_bytes(tokens: int, sampling: SamplingParams | None) -> int:
    """Upper bound of the bytes of a new sequence in a plan. A block is never smaller than a token."""
    return 64 + 10 * tokens + (sampling_bytes(sampling) if sampling is not None else 0)
