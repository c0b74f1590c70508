"""All that the front knows of an engine. runtime/front/client.py implements it over a process channel; tests script it.

What an implementation promises:

* `generate` tells `take`, for each of the n sequences, deltas and at last one with `ended`. The last token comes with `ended`,
  in the same delta; a token that stopped the sequence is among `tokens`.
* Nothing follows the `ended` of a sequence; after n of them `generate` returns.
* `take` is called on the loop, as a token comes: no task is woken for a token. It never waits. What it raises is raised by
  `generate`, and nothing is told after it.
* Leaving early (an error of `take`, a cancelled `generate`) aborts the request.
* `abort` of something unknown or ended does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.errors import EngineError
from baton.protocol.control import InstanceStats as EngineStats
from baton.protocol.ids import RequestId
from baton.protocol.output import Begun, Delta, Ended
from baton.protocol.request import FinishReason, GenerateRequest, Refused
from baton.protocol.step import TokenLogprob

__all__ = ["Begun", "Delta", "Ended", "EngineClient", "EngineRefused", "EngineStats", "TokenLogprob"]


class EngineRefused(EngineError):
    """The engine does not take the request. Raised before the first delta."""

    def __init__(self, refused: Refused, retry_seconds: float | None = None) -> None:
        """`retry_seconds`: when it may be worth trying again, where that is known."""
        super().__init__(str(refused))
        self.refused = refused
        self.retry_seconds = retry_seconds


class EngineClient(Protocol):
    async def generate(self, request: GenerateRequest, take: Callable[[Delta], None]) -> None:
        """Raises EngineRefused before the first delta, and another EngineError where the engine is lost on the way."""
        ...

    def abort(self, request: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """End one sequence or all. Reason STOP: the front has seen a stop string."""
        ...

    async def ping(self, timeout_seconds: float) -> None:
        """The engine answers, and its worker gets on with what is due. Raises Unavailable, with what is wrong."""
        ...

    def stats(self) -> EngineStats: ...

    async def pause(self, drain_seconds: float | None) -> None:
        """Take nothing new, finish what runs (for at most that long; None: as long as it takes), then stand still."""
        ...

    async def resume(self) -> None: ...

    async def clear_cache(self, *, device: bool, host: bool) -> None: ...

    async def sleep(self, drain_seconds: float | None) -> None:
        """Pause, then release weights and cache together."""
        ...

    async def wake(self) -> None:
        """Load the weights again, and take requests."""
        ...

    async def load_weights(self, model: str, drain_seconds: float | None) -> None:
        """Pause, load other weights, go on. CallerError: they cannot be loaded, and the old ones are served again."""
        ...
