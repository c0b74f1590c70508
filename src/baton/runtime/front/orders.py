"""Orders and pings to one engine. Each has a number, and its caller waits for the answer to that number, never for a state:
another caller may cause that state, or undo it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any, Final

from baton.errors import CallerError, Unavailable
from baton.protocol.codec import Message
from baton.protocol.control import (
    ClearCache,
    OrderAnswer,
    PauseInstance,
    Ping,
    Pong,
    ResumeInstance,
    SleepInstance,
    WakeInstance,
)

ANSWER_SECONDS: Final = 30.0
"""Seconds for the answer to an order, beyond the time that the order itself allows."""
SLEEP_SECONDS: Final = 60.0
LOAD_SECONDS: Final = 1800.0
"""Seconds for loading weights: the engine ends a worker after start_seconds_max, which is less by default."""
DRAIN_SECONDS: Final = 3600.0
"""Seconds for a pause whose drain has no limit."""


class OrderLate(Unavailable):
    """The engine has not answered an order in time. It may still execute the order."""


Order = PauseInstance | ResumeInstance | SleepInstance | WakeInstance | ClearCache


class Orders:
    def __init__(self, send: Callable[[Message], None], require: Callable[[], None] = lambda: None) -> None:
        """`require` raises if no engine is connected."""
        self._send = send
        self._require = require
        self._numbers = count(1)
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._answers: dict[int, asyncio.Future[OrderAnswer]] = {}
        self._drain_seconds: float | None = None
        "Drain time of the last pause."
        self._held = False
        "PauseInstance.held of the last pause."

    @property
    def waiting(self) -> int:
        """Number of unanswered orders and pings."""
        return len(self._pings) + len(self._answers)

    def on_pong(self, pong: Pong) -> None:
        ping = self._pings.pop(pong.number, None)
        if ping is not None and not ping.done():
            ping.set_exception(Unavailable(pong.fault)) if pong.fault else ping.set_result(None)

    def on_answer(self, answer: OrderAnswer) -> None:
        order = self._answers.pop(answer.number, None)
        if order is not None and not order.done():
            order.set_result(answer)

    def fail(self, why: str) -> None:
        """Fail all unanswered orders and pings: the engine is lost."""
        waiting: list[asyncio.Future[Any]] = [*self._pings.values(), *self._answers.values()]
        for asked in waiting:
            if not asked.done():
                asked.set_exception(Unavailable(why))
        self._answers.clear()

    async def ping(self, timeout_seconds: float) -> None:
        self._require()
        number = next(self._numbers)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pings[number] = answer
        self._send(Ping(number))
        try:
            await asyncio.wait_for(answer, timeout_seconds)
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {timeout_seconds:g} s") from None
        finally:
            self._pings.pop(number, None)

    async def pause(self, drain_seconds: float | None, *, held: bool = False) -> None:
        """`held`: PauseInstance.held."""
        number = next(self._numbers)
        seconds = ANSWER_SECONDS + (DRAIN_SECONDS if drain_seconds is None else drain_seconds)
        answer = self._send_order(PauseInstance(number, drain_seconds, held), number, seconds)
        self._drain_seconds, self._held = drain_seconds, held
        match (await answer).outcome:
            case "overtaken":
                raise Unavailable("the engine was resumed before it was paused")
            case "refused":
                raise Unavailable("too many pauses are waited for already: one is enough")

    def pause_again(self, *, held: bool | None = None) -> None:
        """Pause an engine that follows a paused one. The answer is not awaited. `held`: None for that of the last pause."""
        self._send(PauseInstance(next(self._numbers), self._drain_seconds, self._held if held is None else held))

    async def resume(self) -> None:
        number = next(self._numbers)
        _require_done(await self._send_order(ResumeInstance(number), number, ANSWER_SECONDS))

    async def clear_cache(self, *, device: bool, host: bool) -> None:
        number = next(self._numbers)
        _require_done(await self._send_order(ClearCache(number, device, host), number, ANSWER_SECONDS))

    async def sleep(self) -> None:
        """Put a paused engine to sleep."""
        number = next(self._numbers)
        _require_done(await self._send_order(SleepInstance(number), number, SLEEP_SECONDS))

    async def wake(self) -> None:
        """Wake the engine. It stays paused."""
        number = next(self._numbers)
        _require_done(await self._send_order(WakeInstance(number), number, LOAD_SECONDS))

    async def wake_with(self, model: str) -> None:
        """Wake the engine with other weights. Raises CallerError if they cannot be loaded; then it has the old ones again."""
        number = next(self._numbers)
        answer = await self._send_order(WakeInstance(number, model), number, LOAD_SECONDS)
        if answer.outcome != "done":
            raise CallerError(answer.detail)

    def _send_order(self, order: Order, number: int, seconds: float) -> Awaitable[OrderAnswer]:
        """Send the order. The returned awaitable raises OrderLate if the answer is late."""
        self._require()
        answer: asyncio.Future[OrderAnswer] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # the caller may have disconnected
        self._answers[number] = answer
        self._send(order)
        return self._answer(answer, order, number, seconds)

    async def _answer(self, answer: asyncio.Future[OrderAnswer], order: Order, number: int, seconds: float) -> OrderAnswer:
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise OrderLate(f"the engine did not answer a {type(order).__name__} within {seconds:g} s") from None
        finally:
            self._answers.pop(number, None)


def _require_done(answer: OrderAnswer) -> None:
    if answer.outcome != "done":
        raise Unavailable(answer.detail or f"the order was {answer.outcome}")
