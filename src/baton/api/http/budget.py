"""Bytes that all requests together hold in this process.

Counted are bodies while they are read and prepared, and whole answers until they are sent. The other limits hold for one
request, this one for their sum. Bytes count as they come, not as they are announced: a client that promises much holds nothing.
Large holders may not use the last quarter, so that small requests get through beside them.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

from baton.api.errors import ApiError

SMALL_BYTES: Final = 64 * 1024
"""A holder of no more than this may use all of the budget."""


class ByteBudget:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self.most = 0
        "The highest that `used` has been."

    def lease(self) -> Lease:
        return Lease(self)


class Lease:
    """What one request holds. Used as a context: whatever ends it gives all of it back."""

    __slots__ = ("_budget", "held")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.held = 0

    def take(self, count: int) -> None:
        """Raises 429 where the process holds too much already; what was taken before stays taken."""
        budget = self._budget
        allowed = budget.bytes_max if self.held + count <= SMALL_BYTES else budget.bytes_max * 3 // 4
        if budget.used + count > allowed:
            raise ApiError(429, "requests and answers in flight take too much memory; try again later", code="too_many_bytes")
        self.held += count
        budget.used += count
        budget.most = max(budget.most, budget.used)

    def close(self) -> None:
        """Twice is harmless."""
        self._budget.used -= self.held
        self.held = 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()
