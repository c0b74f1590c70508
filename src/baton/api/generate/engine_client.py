"""The front's interface to an engine. runtime/front/client.py implements it over a process channel; tests script it.

Contract of an implementation:

* `generate` calls `take` with deltas of each of the n sequences; the last one has `ended`. The last token comes with `ended`,
  in the same delta; a token that stopped the sequence is among `tokens`.
* Nothing follows the `ended` of a sequence; after n of them `generate` returns.
* `take` is called on the loop for each token: no task is woken per token. It never waits. What it raises is raised by
  `generate`, and `take` is not called again.
* Leaving early (an error of `take`, a cancelled `generate`) aborts the request.
* `abort` of an unknown or ended request does nothing.
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
    """The engine refuses the request. Raised before the first delta."""

    def __init__(self, refused: Refused, retry_seconds: float | None = None) -> None:
        """`retry_seconds`: when a retry may succeed, if known."""
        super().__init__(str(refused))
        self.refused = refused
        self.retry_seconds = retry_seconds


class EngineClient(Protocol):
    async def generate(self, request: GenerateRequest, take: Callable[[Delta], None]) -> None:
        """Runs a request. Raises EngineRefused before the first delta, and another EngineError if the engine is lost later."""
        ...

    def abort(self, request: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends one sequence or all. Reason STOP: the front has found a stop string."""
        ...

    async def ping(self, timeout_seconds: float) -> None:
        """Checks the engine. Raises Unavailable, with the cause, unless it answers and its worker makes progress."""
        ...

    def stats(self) -> EngineStats: ...

    async def pause(self, drain_seconds: float | None) -> None:
        """Accepts no new requests, finishes the running ones (within that time; None: without limit), then pauses."""
        ...

    async def resume(self) -> None: ...

    async def clear_cache(self, *, device: bool, host: bool) -> None: ...

    async def sleep(self, drain_seconds: float | None) -> None:
        """Pauses, then releases weights and cache."""
        ...

    async def wake(self) -> None:
        """Loads the weights again and accepts requests."""
        ...

    async def load_weights(self, model: str, drain_seconds: float | None) -> None:
        """Pauses, loads other weights, resumes. Raises CallerError if they cannot be loaded; then the old ones are served
        again."""
        ...
