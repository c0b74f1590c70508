"""7: blocks reserved for a prompt that is computed elsewhere were available, beside earlier promises.

    available before   |-- new blocks of the reservation --|-- growth of holders --|-- earlier requests --|

Growth counts for all holders of blocks: on the worker, and those that will be there without being admitted by blocks: reserved,
copied, adopted, or loaded from the host. They are found by their blocks, request by request, not in the instance's list.

Earlier requests are the head of the queue and preempted sequences, if they are more urgent. They need at least one block each,
because the last token of a prompt is computed into a private one; all of their blocks if nothing is cached and no sibling has
them (seed 516: siblings share also then).

Blocks of less urgent sequences that made room in the same event count as available: those that no other sequence holds.
"""

from __future__ import annotations

from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence
from baton.core.engine.view import SchedulerView
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, RequestId


class RoomWatch:
    """Checks one reservation: created before the instance is asked to reserve, checked after."""

    def __init__(
        self, view: SchedulerView, request: RequestId, order: tuple[int, float], block_size: int, *, cached: bool
    ) -> None:
        """`order`: priority and arrival, by the instance's clock. `cached`: cached blocks may be found."""
        self._view = view
        self._request = request
        self._known = view.is_open(request)
        load = view.load()
        self._available = load.blocks_free + load.blocks_idle
        self._generations = view.generations()
        ratio = view.reserve_ratio
        growth = 0
        self._holders = dict[BlockId, list[Sequence]]()
        "Sequences that hold a block."
        sequences = [sequence for known in view.request_ids() for sequence in view.sequences(known)]
        for sequence in sequences:
            if not sequence.blocks:
                continue
            for block in sequence.blocks:
                self._holders.setdefault(block, []).append(sequence)
            expected = min(sequence.prompt_tokens + int(ratio * sequence.declared_tokens), sequence.stop_position)
            if sequence.priority <= order[0] and expected > sequence.capacity:
                growth += -(-(expected - sequence.capacity) // block_size)
        self._growth = growth
        self._priority = order[0]
        first = view.queue_head()
        earlier = [*view.preempting(), *([first] if first is not None and not first.blocks else [])]
        self._earlier = 0
        for sequence in earlier:
            if sequence.order[:2] < order:
                alone = not cached and sequence.request.n == 1 and sequence.kept is None
                self._earlier += -(-len(sequence.tokens) // block_size) if alone else 1

    def observe(self) -> None:
        if self._known:
            return  # only a lease renewal
        kept = [s for s in self._view.sequences(self._request) if s.phase is Phase.LOADING]
        if not kept or not kept[0].blocks:
            return
        now = self._view.generations()
        new = sum(now[block] != self._generations[block] for block in kept[0].blocks)
        wanted = new + self._growth + self._earlier
        available = self._available + self._given()
        if wanted > available:
            raise InvariantBroken(
                f"{self._request} has {new} blocks, {self._growth} are for growth and {self._earlier} come first: "
                f"{available} were available",
                invariant=7,
            )

    def _given(self) -> int:
        """Blocks of less urgent sequences that have lost theirs."""
        return sum(
            all(each.priority > self._priority and not each.blocks for each in holders) for holders in self._holders.values()
        )
