"""Recently refused instances, for /v1/cluster. They dial again every few seconds, so each is kept once."""

from __future__ import annotations

from typing import Final, NamedTuple

from baton.protocol.instance import RefusedView
from baton.repeats import printable

REFUSALS_MAX: Final = 32
FORGOTTEN_SECONDS: Final = 300.0
"""Seconds after which a refused instance that has not dialled again is not shown any more."""


class Refusal(NamedTuple):
    reason: str
    times: int
    at: float


class Refusals:
    """Refusals by name of the instance, or by address. The latest is last."""

    def __init__(self) -> None:
        self._refused: dict[str, Refusal] = {}

    def note(self, name: str, reason: str, now: float) -> None:
        before = self._refused.pop(name, None)
        self._refused[name] = Refusal(printable(reason), 1 if before is None else before.times + 1, now)
        if len(self._refused) > REFUSALS_MAX:
            del self._refused[next(iter(self._refused))]

    def forget(self, name: str) -> None:
        """Forget the refusal: the instance has joined."""
        self._refused.pop(name, None)

    def view(self, now: float) -> tuple[RefusedView, ...]:
        shown = {name: one for name, one in self._refused.items() if now - one.at < FORGOTTEN_SECONDS}
        self._refused = shown
        return tuple(RefusedView(printable(name), one.reason, one.times, round(now - one.at, 1)) for name, one in shown.items())
