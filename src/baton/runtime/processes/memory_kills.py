"""Detects that the kernel has just killed one of our processes for lack of memory: compares its counters with earlier ones.

A count that grew long before a child was lost is no evidence for that loss, so the sample to compare with is renewed all the
time. It is kept for one period more: the kernel counts first, and a large process takes seconds to end.

    samples    |---- before ----|---- last ----|  now: the child is found dead
               ^ `since` compares with this one, one to two periods old
"""

from __future__ import annotations

import asyncio

from baton.cgroup import KERNEL, Kernel, memory_kills

PERIOD_SECONDS = 10.0


class MemoryKillLog:
    def __init__(self, kernel: Kernel = KERNEL) -> None:
        self._kernel = kernel
        self._before = self._last = memory_kills(kernel)

    async def sample_forever(self) -> None:
        """Sample until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            self.sample()

    def sample(self) -> None:
        self._before, self._last = self._last, memory_kills(self._kernel)

    def since(self) -> tuple[int | None, int | None]:
        """Number of kills in the last period or two, in the own control group and on the machine. Each counts for one loss
        only."""
        now, before = memory_kills(self._kernel), self._before
        self._before = self._last = now
        return _grown(before.group, now.group), _grown(before.machine, now.machine)


def _grown(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else max(0, now - before)
