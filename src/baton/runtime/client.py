"""The front's end of the engine's channel: requests out, each one's tokens back to whoever waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count, takewhile

from msgspec.structs import replace

from baton.api.engine_client import Delta, EngineRefused
from baton.errors import EngineError, PeerError, Unavailable
from baton.protocol.codec import Message
from baton.protocol.control import (
    AbortRequest,
    InstanceReady,
    InstanceStats,
    ModeReport,
    PauseInstance,
    Ping,
    Pong,
    RefusedRequest,
    ResumeInstance,
)
from baton.protocol.ids import RequestId
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest, Refused, shares_settings
from baton.protocol.step import RowLogprobs, TokenLogprob
from baton.runtime.channel import Channel


class _Stream:
    """One request on its way: who is told its deltas, and what is still owed."""

    __slots__ = ("_take", "done", "lost", "open", "prompt")

    def __init__(self, request: GenerateRequest, take: Callable[[Delta], None]) -> None:
        self._take = take
        self.open = request.n
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        "All has ended, or nothing more is told: refused, the engine gone, or an error of whoever takes the deltas."
        self.lost = False
        "The engine does not have the request (any more): there is nothing to abort."
        self.prompt: list[TokenLogprob | None] | None = None
        "Told once, with sequence 0; the first token has nothing before it."
        if request.sampling.prompt_logprobs is not None:
            self.prompt = [None] * len(request.prompt)

    def tell(self, delta: Delta) -> None:
        if self.done.done():
            return
        if self.prompt is not None and delta.index == 0:
            delta.prompt_logprobs, self.prompt = self.prompt, None
        try:
            self._take(delta)
        except Exception as error:
            self.done.set_exception(error)
            return
        if delta.ended is not None:
            self.open -= 1
            if not self.open:
                self.done.set_result(None)

    def lose(self, why: Exception) -> None:
        self.lost = True
        if not self.done.done():
            self.done.set_exception(why)

    def add_prompt_logprobs(self, row: RowLogprobs) -> None:
        """A prompt that was computed twice comes twice: places are written, not appended."""
        if self.prompt is not None:
            for place, entry in enumerate(row.prompt, row.prompt_from):
                if place < len(self.prompt):
                    self.prompt[place] = entry


class ChannelClient:
    """Satisfies api.engine_client.EngineClient."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._streams: dict[RequestId, _Stream] = {}
        self._unsent: list[GenerateRequest] = []
        "Requests of this turn of the loop. The prompts of a list come together, and what they share is sent once."
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._numbers = count(1)
        self._stats = InstanceStats()
        self._mode = "serving"
        self._listeners: dict[int, list[str]] = {}
        "The modes since somebody asked for one."
        self._mode_changed = asyncio.Event()
        self.ready: asyncio.Future[InstanceReady] = asyncio.get_running_loop().create_future()
        self._gone = False
        self._ended: Exception | None = None
        "Why no request is taken any more."

    async def read(self) -> None:
        """Until the engine is gone. Then everyone who waits is told."""
        try:
            await self._channel.listen(self._on_message)
        except PeerError:
            pass
        finally:
            self._on_gone()

    def _on_gone(self) -> None:
        self._gone = True
        self._mode_changed.set()
        for stream in self._streams.values():
            stream.lose(Unavailable("the engine is gone"))
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(Unavailable("the engine is gone"))
        if not self.ready.done():
            self.ready.set_exception(Unavailable("the engine ended before it was ready"))

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
                    stream.lose(EngineRefused(refused))
            case Pong(number):
                ping = self._pings.pop(number, None)
                if ping is not None and not ping.done():
                    ping.set_result(None)
            case ModeReport(mode):
                self._mode = mode
                for seen in self._listeners.values():
                    seen.append(mode)
                self._stats = replace(self._stats, mode=mode)
                self._mode_changed.set()
            case InstanceReady():
                if not self.ready.done():
                    self.ready.set_result(message)

    def _on_emit(self, emit: Emit) -> None:
        """Most have tokens and nothing else, one for each of many sequences. Hot: kept flat."""
        streams = self._streams
        if emit.ended or emit.logprobs:
            self._on_gathered(emit)
            return
        for request, _, index, _, token in emit.tokens:
            stream = streams.get(request)
            if stream is not None:
                stream.tell(Delta(index, [token]))

    def _on_gathered(self, emit: Emit) -> None:
        """The last token goes with its end, a token with what the model thought of it: one delta a sequence."""
        deltas: dict[tuple[RequestId, int], Delta] = {}

        def delta(request: RequestId, index: int) -> Delta:
            if (request, index) not in deltas:
                deltas[request, index] = Delta(index, [], [])
            return deltas[request, index]

        for request, index, row in emit.logprobs:
            stream = self._streams.get(request)
            if stream is not None and index == 0:
                stream.add_prompt_logprobs(row)
            if row.sampled is not None:
                delta(request, index).logprobs.append(row.sampled)
        for request, _, index, _, token in emit.tokens:
            delta(request, index).tokens.append(token)
        for ended in emit.ended:
            delta(ended.request, ended.index).ended = ended
        for (request, _), told in deltas.items():
            if (stream := self._streams.get(request)) is not None:
                stream.tell(told)

    # What the API asks for

    async def generate(self, request: GenerateRequest, take: Callable[[Delta], None]) -> None:
        if self._gone:
            raise Unavailable("the engine is gone")
        if self._ended is not None:
            raise self._ended
        if request.id in self._streams:
            raise EngineRefused(Refused("duplicate_id"))
        stream = self._streams[request.id] = _Stream(request, take)
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
        self._send_requests()  # an abort never overtakes its request
        self._channel.send(AbortRequest(request, index, reason))

    async def ping(self, timeout_seconds: float) -> None:
        if self._gone:
            raise Unavailable("the engine is gone")
        number = next(self._numbers)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pings[number] = answer
        self._channel.send(Ping(number))
        try:
            await asyncio.wait_for(answer, timeout_seconds)
        except TimeoutError:
            raise Unavailable(f"the step loop did not answer within {timeout_seconds:g} s") from None
        finally:
            self._pings.pop(number, None)

    def stats(self) -> InstanceStats:
        return self._stats

    async def pause(self, drain_seconds: float | None) -> None:
        await self._change(PauseInstance(drain_seconds), "paused", undone_by="serving")

    async def resume(self) -> None:
        await self._change(ResumeInstance(), "serving", undone_by="paused")

    async def _change(self, order: PauseInstance | ResumeInstance, mode: str, undone_by: str) -> None:
        """Waits as long as it takes (the caller knows how long it may), but not for what cannot come any more."""
        if self._gone:
            raise Unavailable("the engine is gone")
        number, seen = next(self._numbers), [self._mode] if self._mode == mode else []
        self._listeners[number] = seen
        self._channel.send(order)
        try:
            while mode not in seen:
                if self._gone:
                    raise Unavailable("the engine is gone")
                if undone_by in seen:
                    raise Unavailable(f"the engine was told otherwise before it was {mode}")
                self._mode_changed.clear()
                await self._mode_changed.wait()
        finally:
            del self._listeners[number]
