"""The number of blocks that admission leaves for the growth of running sequences.

Too few, and every admission is paid for by a preemption; too many, and the pool stays empty. A request's `max_tokens` is no
measure: most end long before. So the reserve is learned: `ratio` is the share of its declared length that a sequence uses,
measured on ended sequences. A preemption for growth shows that it was too low.

    declared    |--- prompt ---|----------------- max_tokens ------------------|
    expected    |--- prompt ---|-- ratio * max_tokens --|
    blocks      |-------- capacity --------|
    reserved                               |-----------|
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.config import SchedulerConfig
from baton.core.engine.request import Sequence


class GrowthReserve:
    __slots__ = ("_block_size", "_clip", "_learning", "ratio")

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        self.ratio = config.reserve_start
        self._learning = config.reserve_learning
        self._clip = config.reserve_clip_tokens
        self._block_size = block_size

    def sequence_ended(self, sequence: Sequence) -> None:
        """Move the ratio a little towards the share that the ended sequence used."""
        declared = sequence.declared_tokens
        self.ratio += (min(1.0, sequence.outputs / declared) - self.ratio) * self._learning

    def growth_preempted(self) -> None:
        """Move the ratio half-way to 1: a running sequence had to preempt another to grow, so the ratio was too low."""
        if self._learning:
            self.ratio += (1.0 - self.ratio) / 2

    def blocks(self, sequence: Sequence) -> int:
        """Blocks that the sequence is expected to need beyond those it has."""
        expected = sequence.prompt_tokens + int(self.ratio * sequence.declared_tokens)
        room = min(expected, sequence.stop_position, sequence.capacity + self._clip) - sequence.capacity
        return -(-room // self._block_size) if room > 0 else 0

    def blocks_of(self, holders: Iterable[Sequence], priority: int) -> int:
        """Blocks to reserve for holders at least as urgent as `priority`. The others can be preempted for it."""
        return sum(self.blocks(sequence) for sequence in holders if sequence.priority <= priority)
