"""How much room admission leaves for the growth of what already runs.

Too little and every admission is paid for by a preemption; too much and the pool stays empty. The reserve is a share of the
growth that is still possible. It decays while nothing is preempted and jumps half-way back to all of it at each preemption.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from baton.config import SchedulerConfig
from baton.core.engine.request import Sequence


class GrowthReserve:
    __slots__ = ("_block_size", "_clip", "_decay", "_floor", "share")

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        self.share = config.reserve_start
        self._floor = config.reserve_floor
        self._decay = config.reserve_decay
        self._clip = config.reserve_clip_tokens
        self._block_size = block_size

    def decay(self) -> None:
        """A step was planned."""
        self.share -= (self.share - self._floor) * self._decay

    def recover(self) -> None:
        """A sequence was preempted: we were too bold."""
        self.share += (1.0 - self.share) / 2

    def growth(self, sequence: Sequence) -> int:
        """Tokens that it may still need room for, beyond the blocks it has."""
        return max(0, min(sequence.stop_position - sequence.capacity, self._clip))

    def blocks(self, running: Iterable[Sequence], priority: int) -> int:
        """Blocks to leave for those at least as urgent as `priority`. The others can be preempted for it."""
        tokens = sum(self.growth(sequence) for sequence in running if sequence.priority <= priority)
        return ceil(self.share * tokens / self._block_size)
