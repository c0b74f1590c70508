"""Bytes that all requests together hold in this process.

Bodies count while they are read and prepared, whole answers until they are sent. The other limits bound one request, this one
their sum. Bytes count when they arrive, not when they are announced. Large holders may not use the last quarter, so that small
requests get through beside them.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final

from baton.api.errors import ApiError

SMALL_BYTES: Final = 64 * 1024
"""A holder of at most this many bytes may use the whole budget."""


class ByteBudget:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self.most = 0
        "Maximum of `used` so far."

    def lease(self) -> Lease:
        return Lease(self)


class Lease:
    """Bytes that one request holds. As a context manager it returns all of them."""

    __slots__ = ("_budget", "held")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.held = 0

    def take(self, count: int) -> None:
        """Takes more bytes for the request. Raises 429 if the process holds too much; bytes taken before stay taken."""
        budget = self._budget
        allowed = budget.bytes_max if self.held + count <= SMALL_BYTES else budget.bytes_max * 3 // 4
        if budget.used + count > allowed:
            raise ApiError(429, "requests and answers in flight take too much memory; try again later", code="too_many_bytes")
        self.held += count
        budget.used += count
        budget.most = max(budget.most, budget.used)

    def close(self) -> None:
        """Returns all bytes. Idempotent."""
        self._budget.used -= self.held
        self.held = 0

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()
