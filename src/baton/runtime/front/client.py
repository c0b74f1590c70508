"""The front's end of the engine's channel: requests out, each one's tokens back to whoever waits for them.

An engine that is lost takes no request with it. Those that are open wait for the next engine, and are sent again with what
was told of them (a replay); new ones are turned away until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import takewhile

from msgspec.structs import replace

from baton.api.generate.engine_client import Delta, EngineRefused
from baton.errors import EngineError, PeerError, Unavailable
from baton.protocol.codec import Message
from baton.protocol.control import (
    AbortRequest,
    InstanceReady,
    InstanceStats,
    ModelChanged,
    ModeReport,
    OrderAnswer,
    Pong,
    RefusedRequest,
)
from baton.protocol.ids import RequestId
from baton.protocol.output import OTHER_WEIGHTS, Emit
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest, Refused, shares_settings
from baton.runtime.front.deltas import deliver
from baton.runtime.front.orders import Orders
from baton.runtime.front.stream import Stream
from baton.runtime.wire.channel import Channel

logger = logging.getLogger("baton.front")


NextChannel = Callable[[], Awaitable[Channel | None]]
"""Waits for the channel to another engine. None: no more come."""


class ChannelClient:
    """Satisfies api.engine_client.EngineClient."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._streams: dict[RequestId, Stream] = {}
        self._unsent: list[GenerateRequest] = []
        "Requests of this turn of the loop. The prompts of a list come together, and what they share is sent once."
        self._orders = Orders(lambda message: self._channel.send(message), self._require_engine)
        self._stats = InstanceStats()
        self._mode = "serving"
        self.ready: asyncio.Future[InstanceReady] = asyncio.get_running_loop().create_future()
        self._away: str | None = None
        "Why there is no engine now, or for good."
        self._patience: asyncio.Timeout | None = None
        "Runs while an engine is waited for."
        self._identity: bytes | None = None
        "Of the weights that the engine computes with."
        self.on_identity: Callable[[bytes], None] = lambda identity: None
        "Told when other weights are served."
        self._ended: Exception | None = None
        "Why no request is taken any more."

    async def read(self, next_channel: NextChannel | None = None, seconds: float = 0.0) -> None:
        """Until the engine is gone, and no other comes within so many seconds. Then everyone who waits is told."""
        try:
            await self._listen()
            while next_channel is not None and self.ready.done() and self._ended is None:
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
            async with asyncio.timeout(seconds) as self._patience:  # ends when it is ready
                channel = await next_channel()
                if channel is None:
                    return False
                self._channel = channel
                await self._listen()
        except TimeoutError:
            raise Unavailable(f"the engine was lost, and no other was ready within {seconds:g} s (start_seconds_max)") from None
        return True

    def _on_lost(self, why: str) -> None:
        """What only that engine could answer fails; requests are kept."""
        if self._away is None:
            logger.warning("the engine is gone; open requests that wait for another: %d", len(self._streams))
        self._away = why
        self._channel.close()
        self._orders.fail(why)
        for stream in list(self._streams.values()):
            stream.end_unwanted()

    def _on_ready(self, ready: InstanceReady) -> None:
        if not self.ready.done():
            self.ready.set_result(ready)
            self._identity = ready.identity
        if self._away is None or self._patience is None or self._patience.expired():
            return  # it is the first one, or one that comes too late
        self._patience.reschedule(None)
        self._away = None
        if self._identity not in (None, ready.identity):
            self._end_begun()
        self._identity = ready.identity
        self.on_identity(ready.identity)
        self._replay()
        if self._mode != "serving":
            self._mode = "serving"
            self._orders.pause_again()

    def _end_begun(self) -> None:
        """The model's files have changed: the next engine would go on with another answer (core/instance.py)."""
        for stream in list(self._streams.values()):
            if not stream.untouched:
                stream.lose(Unavailable(OTHER_WEIGHTS))

    def _replay(self) -> None:
        """In their old order. The engine queues them by age in any case."""
        now = asyncio.get_running_loop().time()
        waiting = [stream for stream in self._streams.values() if not stream.done.done()]
        for stream in waiting:
            try:
                self._channel.send(stream.replay(now))
            except EngineError as error:  # with its outputs it is too large for a frame
                stream.lose(error)
        logger.warning("another engine is ready; requests that go on there: %d", len(waiting))

    def _on_gone(self) -> None:
        why = "the engine is gone"
        self._away = why
        for stream in self._streams.values():
            stream.lose(Unavailable(why))
        self._orders.fail(why)
        if not self.ready.done():
            self.ready.set_exception(Unavailable("the engine ended before it was ready"))

    async def finish(self) -> None:
        await self._channel.finish()

    def end_requests(self, why: Exception) -> None:
        """Ends every open request with this error. One that comes later gets it too."""
        self._ended = why
        for stream in self._streams.values():
            stream.lose(why)

    def _on_message(self, message: Message) -> None:
        match message:
            case Emit():
                self._on_emit(message)
            case InstanceStats():
                self._stats = message
            case RefusedRequest(request, refused):
                stream = self._streams.get(request)
                if stream is not None:
                    stream.lose(_refusal(stream, refused))
            case Pong():
                self._orders.on_pong(message)
            case ModeReport(mode):
                self._mode = mode
                self._stats = replace(self._stats, mode=mode)
            case OrderAnswer():
                self._orders.on_answer(message)
            case ModelChanged(_, identity):
                self._identity = identity
                self.on_identity(identity)
            case InstanceReady():
                self._on_ready(message)

    def _on_emit(self, emit: Emit) -> None:
        deliver(emit, self._streams)

    # What the API asks for

    async def generate(self, request: GenerateRequest, take: Callable[[Delta], None]) -> None:
        if self._ended is not None:
            raise self._ended
        self._require_engine()
        if request.id in self._streams:
            raise EngineRefused(Refused("duplicate_id"))
        stream = self._streams[request.id] = Stream(request, take, asyncio.get_running_loop().time())
        try:
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._send_requests)
            self._unsent.append(request)
            await stream.done
        finally:
            del self._streams[request.id]
            if stream.open and not stream.lost:
                self.abort(request.id)

    def _send_requests(self) -> None:
        unsent, self._unsent = self._unsent, []
        while unsent:
            same = list(takewhile(partial(shares_settings, first=unsent[0]), unsent))
            unsent = unsent[len(same) :]
            try:
                self._channel.offer(GenerateBatch.of(same) if len(same) > 1 else same[0])
            except EngineError as error:
                for request in same:
                    if (stream := self._streams.get(request.id)) is not None:
                        stream.lose(error)

    def abort(self, request: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        stream = self._streams.get(request)
        if stream is not None:
            stream.unwant(index, reason)
        if self._away is not None:
            if stream is not None:
                stream.end_unwanted()
            return
        self._send_requests()  # an abort never overtakes its request
        self._channel.send(AbortRequest(request, index, reason))

    async def ping(self, timeout_seconds: float) -> None:
        await self._orders.ping(timeout_seconds)

    def stats(self) -> InstanceStats:
        return self._stats

    async def pause(self, drain_seconds: float | None) -> None:
        await self._orders.pause(drain_seconds)

    async def resume(self) -> None:
        await self._orders.resume()

    async def clear_cache(self, *, device: bool, host: bool) -> None:
        await self._orders.clear_cache(device=device, host=host)

    async def sleep(self, drain_seconds: float | None) -> None:
        await self._orders.pause(drain_seconds)
        await self._orders.sleep()

    async def wake(self) -> None:
        await self._orders.wake()
        await self._orders.resume()

    async def load_weights(self, model: str, drain_seconds: float | None) -> None:
        """Whatever becomes of it, the server serves afterwards. CallerError: they cannot be loaded; it serves the old ones."""
        try:
            await self.sleep(drain_seconds)
            await self._orders.wake_with(model)
        except EngineError:
            await self._serve_again()  # with the old weights
            raise
        await self._orders.resume()

    async def _serve_again(self) -> None:
        """What was paused for an order that has failed."""
        if self._away is not None:
            self._mode = "serving"  # so is the next engine
            return
        with contextlib.suppress(Unavailable):  # it was lost in this moment
            await self._orders.resume()

    def _require_engine(self) -> None:
        if self._away is not None:
            raise Unavailable(self._away)


def _refusal(stream: Stream, refused: Refused) -> EngineError:
    """Refused is what never began. A replay that is not taken is an answer that breaks off."""
    if stream.attempt == stream.request.attempt:
        return EngineRefused(refused)
    return Unavailable(f"the engine was lost, and the next one does not go on with the request: {refused}")
