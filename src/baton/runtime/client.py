"""The front's end of the engine's channel: requests out, each one's tokens back to whoever waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count

from msgspec.structs import replace

from baton.api.engine_client import Delta, EngineRefused
from baton.errors import ProtocolError, Unavailable
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
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, GenerateRequest, Refused
from baton.protocol.step import RowLogprobs, TokenLogprob
from baton.runtime.channel import Channel


class _Stream:
    """One request's deltas that nobody has taken yet. Bounded by what the request may produce."""

    __slots__ = ("deltas", "failure", "open", "prompt", "wake")

    def __init__(self, request: GenerateRequest) -> None:
        self.deltas: dict[int, Delta] = {}
        self.open = request.n
        self.wake = asyncio.Event()
        self.failure: Exception | None = None
        self.prompt: list[TokenLogprob | None] | None = None
        "Told once, with sequence 0; the first token has nothing before it."
        if request.sampling.prompt_logprobs is not None:
            self.prompt = [None] * len(request.prompt)

    def delta(self, index: int) -> Delta:
        if index not in self.deltas:
            self.deltas[index] = Delta(index=index, tokens=[], logprobs=[], prompt_logprobs=None, ended=None)
        return self.deltas[index]

    def take(self) -> list[Delta]:
        deltas, self.deltas = list(self.deltas.values()), {}
        self.wake.clear()
        return deltas

    def add_logprobs(self, index: int, row: RowLogprobs) -> None:
        """A prompt that was computed twice comes twice: places are written, not appended."""
        if row.sampled is not None:
            self.delta(index).logprobs.append(row.sampled)
        if self.prompt is not None and index == 0:
            for place, entry in enumerate(row.prompt, row.prompt_from):
                if place < len(self.prompt):
                    self.prompt[place] = entry

    def end(self, ended: Ended) -> None:
        self.delta(ended.index).ended = ended
        self.open -= 1


class ChannelClient:
    """Satisfies api.engine_client.EngineClient."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._streams: dict[RequestId, _Stream] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._numbers = count(1)
        self._stats = InstanceStats()
        self._mode = "serving"
        self._listeners: dict[int, list[str]] = {}
        "The modes since somebody asked for one."
        self._mode_changed = asyncio.Event()
        self.ready: asyncio.Future[InstanceReady] = asyncio.get_running_loop().create_future()
        self._gone = False

    async def read(self) -> None:
        """Until the engine is gone. Then everyone who waits is told."""
        try:
            await self._channel.listen(self._on_message)
        except ProtocolError:
            pass
        finally:
            self._on_gone()

    def _on_gone(self) -> None:
        self._gone = True
        self._mode_changed.set()
        for stream in self._streams.values():
            stream.failure = Unavailable("the engine is gone")
            stream.wake.set()
        for ping in self._pings.values():
            if not ping.done():
                ping.set_exception(Unavailable("the engine is gone"))
        if not self.ready.done():
            self.ready.set_exception(Unavailable("the engine ended before it was ready"))

    def _on_message(self, message: Message) -> None:
        match message:
            case Emit():
                self._on_emit(message)
            case InstanceStats():
                self._stats = message
            case RefusedRequest(request, refused):
                stream = self._streams.get(request)
                if stream is not None:
                    stream.failure = EngineRefused(refused)
                    stream.wake.set()
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
        streams = self._streams
        for request, index, row in emit.logprobs:
            if (stream := streams.get(request)) is not None:
                stream.add_logprobs(index, row)
                stream.wake.set()
        for request, index, token in emit.tokens:
            if (stream := streams.get(request)) is not None:
                stream.delta(index).tokens.append(token)
                stream.wake.set()
        for ended in emit.ended:
            if (stream := streams.get(ended.request)) is not None:
                stream.end(ended)
                stream.wake.set()

    # What the API asks for

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Delta]:
        if self._gone:
            raise Unavailable("the engine is gone")
        if request.id in self._streams:
            raise EngineRefused(Refused("duplicate_id"))
        stream = self._streams[request.id] = _Stream(request)
        try:
            self._channel.send(request)
            while stream.open or stream.deltas:
                await stream.wake.wait()
                for delta in stream.take():
                    if delta.index == 0 and (delta.tokens or delta.ended):
                        delta.prompt_logprobs, stream.prompt = stream.prompt, None
                    yield delta
                if stream.open and stream.failure is not None:
                    raise stream.failure
        finally:
            del self._streams[request.id]
            if stream.open and stream.failure is None:
                self.abort(request.id)

    def abort(self, request: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
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
