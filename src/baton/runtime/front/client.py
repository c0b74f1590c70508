"""The front's end of the engine's channel: requests out, tokens back to each request's sink.

core/delivery/front.py decides; this file is its shell. The queue and the heartbeats of a router are not part of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from baton.api.generate.engine_client import Delta, EngineRefused
from baton.core.delivery.front import (
    ClientRequest,
    ClientWithdrawal,
    Close,
    End,
    EngineLost,
    EngineReady,
    FailClient,
    FrontEffect,
    FrontEvent,
    FrontMachine,
    Leave,
    RefuseClient,
    Reject,
    Replay,
    SendAbort,
    SendRequest,
    Unsendable,
    WeightsChanged,
)
from baton.errors import EngineError, PeerError, Unavailable
from baton.protocol.codec import Message
from baton.protocol.control import (
    InstanceReady,
    InstanceStats,
    ModelChanged,
    ModeReport,
    OrderAnswer,
    Pong,
    RefusedRequest,
)
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest, shares_settings
from baton.runtime.front.orders import Orders
from baton.runtime.front.stream import Stream
from baton.runtime.wire.channel import Channel

logger = logging.getLogger("baton.front")


NextChannel = Callable[[], Awaitable[Channel | None]]
"""Callback that waits for the channel to another engine. None: no engine follows."""


class ChannelClient:
    """Implements api.engine_client.EngineClient."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.front = FrontMachine()
        self._ports: dict[type[Any], Callable[[Any], None]] = {
            SendRequest: self._submit,
            Replay: self._send_again,
            SendAbort: self._send_abort,
            End: lambda effect: effect.sink.deliver(effect.delta),
            FailClient: lambda effect: effect.sink.fail(effect.error),
            RefuseClient: lambda effect: effect.sink.fail(EngineRefused(effect.refused)),
        }
        self._unsent: list[GenerateRequest] = []
        "Requests of this turn of the loop. The prompts of a list arrive together, and their shared settings are sent once."
        self._orders = orders = Orders(lambda message: self._channel.send(message), self._require_engine)
        self.ping, self.pause, self.resume, self.clear_cache = orders.ping, orders.pause, orders.resume, orders.clear_cache
        self._stats = InstanceStats()
        self._mode = "serving"
        self.ready: asyncio.Future[InstanceReady] = asyncio.get_running_loop().create_future()
        self._patience: asyncio.Timeout | None = None
        "Seconds to wait for the next engine."
        self.on_identity: Callable[[bytes], None] = lambda identity: None
        "Called when other weights are served."

    async def read(self, next_channel: NextChannel | None = None, seconds: float = 0.0) -> None:
        """Read until the engine is lost, and no other is ready within `seconds`. Then all open requests fail."""
        try:
            await self._listen()
            while next_channel is not None and self.ready.done() and self.front.closed is None:
                self._on_lost("the engine was lost and is being started again: try again later")
                if not await self._read_next(next_channel, seconds):
                    return
        finally:
            self._on_gone()

    async def _listen(self) -> None:
        with contextlib.suppress(PeerError):
            await self._channel.listen(self._on_message)

    async def _read_next(self, next_channel: NextChannel, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds) as self._patience:  # stopped when the engine is ready
                channel = await next_channel()
                if channel is None:
                    return False
                self._channel = channel
                await self._listen()
        except TimeoutError:
            raise Unavailable(f"the engine was lost, and no other was ready within {seconds:g} s (start_seconds_max)") from None
        return True

    def _on_lost(self, why: str) -> None:
        """Fail orders and pings of the lost engine; requests are kept."""
        if self.front.away is None:
            logger.warning("the engine is gone; open requests that wait for another: %d", len(self.front.ledgers))
        self._channel.close()
        self._orders.fail(why)
        self._dispatch(EngineLost(why))

    def _on_ready(self, ready: InstanceReady) -> None:
        """Replay the open requests: an engine is ready. Pause it if the one before was paused."""
        first = not self.ready.done()
        if first:
            self.ready.set_result(ready)
        elif self.front.away is None or self._patience is None or self._patience.expired():
            return  # the wait for an engine has failed already
        else:
            self._patience.reschedule(None)
        self._dispatch(EngineReady(ready.identity))
        if first:
            return
        logger.warning("another engine is ready; requests that go on there: %d", len(self.front.ledgers))
        self.on_identity(ready.identity)
        if self._mode != "serving":
            self._mode = "serving"
            self._orders.pause_again()

    def _on_gone(self) -> None:
        why = "the engine is gone"
        self._dispatch(EngineLost(why))
        self._dispatch(Close(self.front.closed or Unavailable(why)))
        self._orders.fail(why)
        if not self.ready.done():
            self.ready.set_exception(Unavailable("the engine ended before it was ready"))

    # The machine

    def _dispatch(self, event: FrontEvent) -> None:
        self._carry_out(self.front.handle(event, Instant(asyncio.get_running_loop().time())))

    def _carry_out(self, effects: list[FrontEffect]) -> None:
        for effect in effects:
            self._ports[type(effect)](effect)

    def _submit(self, effect: SendRequest) -> None:
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_requests)
        self._unsent.append(effect.request)

    def _send_again(self, effect: Replay) -> None:
        try:
            self._channel.send(effect.request)
        except EngineError as error:  # with its outputs the request is too large for a frame
            self._dispatch(Unsendable(effect.request.id, error))

    def _send_abort(self, effect: SendAbort) -> None:
        self._send_requests()  # an abort never overtakes its request
        self._channel.send(effect.message)

    async def finish(self) -> None:
        await self._channel.finish()

    def end_requests(self, why: Exception) -> None:
        """End every open request with this error. Later requests get it too."""
        self._dispatch(Close(why))

    def _on_message(self, message: Message) -> None:
        """Handle a message of the engine: tokens go to their requests, answers to their orders."""
        match message:
            case Emit():
                self._on_emit(message)
            case InstanceStats():
                self._stats = message
            case RefusedRequest(request, refused):
                self._dispatch(Reject(request, refused))
            case Pong():
                self._orders.on_pong(message)
            case ModeReport(mode):
                self._mode = mode
                self._stats = replace(self._stats, mode=mode)
            case OrderAnswer():
                self._orders.on_answer(message)
            case ModelChanged(_, identity):
                self._dispatch(WeightsChanged(identity))
                self.on_identity(identity)
            case InstanceReady():
                self._on_ready(message)

    def _on_emit(self, emit: Emit) -> None:
        if effects := self.front.take(emit):
            self._carry_out(effects)

    # Called by the API

    async def generate(self, request: GenerateRequest, take: Callable[[Delta], None]) -> None:
        stream = Stream(request, take)
        self._dispatch(ClientRequest(request, stream))
        try:
            await stream.done
        finally:
            self._dispatch(Leave(request.id, stream))

    def _send_requests(self) -> None:
        unsent, self._unsent = self._unsent, []
        while unsent:
            same = list(takewhile(partial(shares_settings, first=unsent[0]), unsent))
            unsent = unsent[len(same) :]
            try:
                self._channel.offer(GenerateBatch.of(same) if len(same) > 1 else same[0])
            except EngineError as error:
                for request in same:
                    self._dispatch(Unsendable(request.id, error))

    def abort(self, request: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        self._dispatch(ClientWithdrawal(request, index, reason))

    def stats(self) -> InstanceStats:
        return self._stats

    async def sleep(self, drain_seconds: float | None) -> None:
        await self._orders.pause(drain_seconds)
        await self._orders.sleep()

    async def wake(self) -> None:
        await self._orders.wake()
        await self._orders.resume()

    async def load_weights(self, model: str, drain_seconds: float | None) -> None:
        """Load other weights. The server serves afterwards, also after an error. Raises CallerError if they cannot be loaded;
        then it serves the old ones."""
        try:
            await self.sleep(drain_seconds)
            await self._orders.wake_with(model)
        except EngineError:
            await self._serve_again()  # with the old weights
            raise
        await self._orders.resume()

    async def _serve_again(self) -> None:
        """Resume after an order that has failed."""
        if self.front.away is not None:
            self._mode = "serving"  # the next engine serves
            return
        with contextlib.suppress(Unavailable):  # the engine was lost at this moment
            await self._orders.resume()

    def _require_engine(self) -> None:
        if self.front.away is not None:
            raise Unavailable(self.front.away)
