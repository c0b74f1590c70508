"""The front's end of the engine's channel: requests out, each one's tokens back to whoever waits for them.

An engine that is lost takes no request with it. Those that are open wait for the next engine, and are sent again with what
was told of them (a replay); new ones are turned away until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count, takewhile
from typing import Any

from msgspec.structs import replace

from baton.api.engine_client import Delta, EngineRefused
from baton.errors import CallerError, EngineError, PeerError, Unavailable
from baton.protocol.codec import Message
from baton.protocol.control import (
    AbortRequest,
    ClearCache,
    InstanceReady,
    InstanceStats,
    ModelChanged,
    ModeReport,
    OrderAnswer,
    PauseInstance,
    Ping,
    Pong,
    RefusedRequest,
    ResumeInstance,
    SleepInstance,
    WakeInstance,
)
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest, Refused, shares_settings
from baton.protocol.step import TokenLogprob
from baton.runtime.channel import Channel
from baton.runtime.stream import Stream

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
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._numbers = count(1)
        self._stats = InstanceStats()
        self._mode = "serving"
        self._orders: dict[int, asyncio.Future[OrderAnswer]] = {}
        "Given and not answered."
        self.ready: asyncio.Future[InstanceReady] = asyncio.get_running_loop().create_future()
        self._away: str | None = None
        "Why there is no engine now, or for good."
        self._patience: asyncio.Timeout | None = None
        "Runs while an engine is waited for."
        self._pause: PauseInstance | None = None
        "The last one ordered: an engine that follows a paused one pauses too."
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
        self._fail_asked(why)
        for stream in list(self._streams.values()):
            stream.end_unwanted()

    def _fail_asked(self, why: str) -> None:
        """Nobody answers pings and orders of an engine that is gone."""
        waiting: list[asyncio.Future[Any]] = [*self._pings.values(), *self._orders.values()]
        for asked in waiting:
            if not asked.done():
                asked.set_exception(Unavailable(why))
        self._orders.clear()

    def _on_ready(self, ready: InstanceReady) -> None:
        if not self.ready.done():
            self.ready.set_result(ready)
        if self._away is None or self._patience is None or self._patience.expired():
            return  # it is the first one, or one that comes too late
        self._patience.reschedule(None)
        self._away = None
        self.on_identity(ready.identity)
        self._replay()
        if self._mode != "serving":
            self._mode = "serving"
            seconds = None if self._pause is None else self._pause.drain_seconds_max
            self._channel.send(PauseInstance(next(self._numbers), seconds))  # nobody waits for its answer

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
        self._fail_asked(why)
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
            case Pong(number, fault):
                ping = self._pings.pop(number, None)
                if ping is not None and not ping.done():
                    ping.set_exception(Unavailable(fault)) if fault else ping.set_result(None)
            case ModeReport(mode):
                self._mode = mode
                self._stats = replace(self._stats, mode=mode)
            case OrderAnswer(number):
                order = self._orders.pop(number, None)
                if order is not None and not order.done():
                    order.set_result(message)
            case ModelChanged(_, identity):
                self.on_identity(identity)
            case InstanceReady():
                self._on_ready(message)

    def _on_emit(self, emit: Emit) -> None:
        """Most have tokens and nothing else, one for each of many sequences: no call per token but those two."""
        streams = self._streams
        if emit.ended or emit.logprobs:
            self._on_gathered(emit)
            return
        for request, attempt, index, position, token in emit.tokens:
            stream = streams.get(request)
            if stream is None:
                continue
            told = stream.open.get(index)
            if told is not None and position == len(told) and attempt == stream.attempt:  # as in `takes`, without the call
                told.append(token)
                stream.tell(Delta(index, [token]))
            else:
                stream.takes(attempt, index, position, token)

    def _on_gathered(self, emit: Emit) -> None:
        """The last token goes with its end, a token with what the model thought of it: one delta a sequence."""
        deltas: dict[tuple[RequestId, int], Delta] = {}
        thoughts: dict[tuple[RequestId, int], deque[TokenLogprob]] = {}

        def delta(request: RequestId, index: int) -> Delta:
            if (request, index) not in deltas:
                deltas[request, index] = Delta(index, [], [])
            return deltas[request, index]

        for request, index, row in emit.logprobs:
            stream = self._streams.get(request)
            if stream is not None and index == 0:
                stream.add_prompt_logprobs(row)
            if row.sampled is not None:
                thoughts.setdefault((request, index), deque()).append(row.sampled)
        for request, attempt, index, position, token in emit.tokens:
            of_token = thoughts.get((request, index))
            thought = of_token.popleft() if of_token else None
            stream = self._streams.get(request)
            if stream is not None and stream.takes(attempt, index, position, token):
                told = delta(request, index)
                told.tokens.append(token)
                if thought is not None:
                    told.logprobs.append(thought)
        for ended in emit.ended:
            stream = self._streams.get(ended.request)
            if stream is not None and stream.ends(ended):
                delta(ended.request, ended.index).ended = ended
        for (request, _), told in deltas.items():
            if (stream := self._streams.get(request)) is not None:
                stream.tell(told)

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
        self._require_engine()
        number = next(self._numbers)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pings[number] = answer
        self._channel.send(Ping(number))
        try:
            await asyncio.wait_for(answer, timeout_seconds)
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {timeout_seconds:g} s") from None
        finally:
            self._pings.pop(number, None)

    def stats(self) -> InstanceStats:
        return self._stats

    async def pause(self, drain_seconds: float | None) -> None:
        """Waits as long as it takes: the caller knows how long it may."""
        number = next(self._numbers)
        pause = PauseInstance(number, drain_seconds)
        answer = self._order(pause, number)
        self._pause = pause
        match (await answer).outcome:
            case "overtaken":
                raise Unavailable("the engine was resumed before it was paused")
            case "refused":
                raise Unavailable("too many pauses are waited for already: one is enough")

    async def resume(self) -> None:
        number = next(self._numbers)
        _require_done(await self._order(ResumeInstance(number), number))

    async def clear_cache(self, *, device: bool, host: bool) -> None:
        number = next(self._numbers)
        _require_done(await self._order(ClearCache(number, device, host), number))

    async def sleep(self, drain_seconds: float | None) -> None:
        await self.pause(drain_seconds)
        number = next(self._numbers)
        _require_done(await self._order(SleepInstance(number), number))

    async def wake(self) -> None:
        number = next(self._numbers)
        _require_done(await self._order(WakeInstance(number), number))
        await self.resume()

    async def load_weights(self, model: str, drain_seconds: float | None) -> None:
        await self.sleep(drain_seconds)
        number = next(self._numbers)
        answer = await self._order(WakeInstance(number, model), number)
        await self.resume()  # with the old weights, where the new ones cannot be loaded
        if answer.outcome != "done":
            raise CallerError(answer.detail)

    def _order(
        self, order: PauseInstance | ResumeInstance | SleepInstance | WakeInstance | ClearCache, number: int
    ) -> Awaitable[OrderAnswer]:
        """Sends it; gives its answer."""
        self._require_engine()
        answer: asyncio.Future[OrderAnswer] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())  # whoever asked may have left
        self._orders[number] = answer
        self._channel.send(order)
        return answer

    def _require_engine(self) -> None:
        if self._away is not None:
            raise Unavailable(self._away)


def _require_done(answer: OrderAnswer) -> None:
    if answer.outcome != "done":
        raise Unavailable(answer.detail or f"the order was {answer.outcome}")


def _refusal(stream: Stream, refused: Refused) -> EngineError:
    """Refused is what never began. A replay that is not taken is an answer that breaks off."""
    if stream.attempt == stream.request.attempt:
        return EngineRefused(refused)
    return Unavailable(f"the engine was lost, and the next one does not go on with the request: {refused}")
