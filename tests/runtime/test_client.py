"""The front's end of the engine's channel, with a test in the engine's place."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from run_loop import finish

from baton.api.engine_client import Delta, EngineRefused
from baton.errors import Unavailable
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
from baton.protocol.ids import Incarnation, RequestId, Slot
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, GenerateRequest, Refused, SamplingParams
from baton.protocol.step import RowLogprobs, TokenLogprob
from baton.runtime.channel import Channel
from baton.runtime.client import ChannelClient

A, B = RequestId("a"), RequestId("b")


def request(name: RequestId = A, n: int = 1, **sampling) -> GenerateRequest:
    return GenerateRequest(id=name, prompt=(1, 2, 3), n=n, sampling=SamplingParams(max_tokens=9, **sampling))


def ended(name: RequestId = A, index: int = 0, reason: FinishReason = FinishReason.LENGTH) -> Ended:
    return Ended(name, index, reason, 3, 0, 2, 0)


class Pair:
    async def __aenter__(self) -> Pair:
        ours, theirs = socket.socketpair()
        self.channel, self.engine = await Channel.open(ours), await Channel.open(theirs)
        self.client = ChannelClient(self.channel)
        self.reading = asyncio.create_task(self.client.read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.close()
        await asyncio.wait_for(self.reading, 10)
        self.channel.close()
        if self.client.ready.done() and not self.client.ready.cancelled():
            self.client.ready.exception()
        assert self.client._streams == {}
        assert self.client._pings == {}
        assert self.client._listeners == {}
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert len(others) <= 1, others  # the one of `finish`

    async def heard(self) -> Message:
        message = await self.engine.receive()
        assert message is not None
        return message

    async def told(self, *messages: Message) -> None:
        """When this returns the client has taken all of them in."""
        for message in messages:
            self.engine.send(message)
        ping = asyncio.create_task(self.client.ping(10))
        number = await self.heard()
        assert type(number) is Ping
        self.engine.send(Pong(number.number))
        await ping

    async def begin(self, wanted: GenerateRequest) -> tuple[AsyncIterator[Delta], asyncio.Task[Delta]]:
        stream = self.client.generate(wanted)
        first = asyncio.ensure_future(anext(stream))
        assert await self.heard() == wanted
        return stream, first


def test_deltas_that_nobody_took_become_one():
    async def main() -> None:
        async with Pair() as pair:
            stream, first = await pair.begin(request())
            await pair.told(Emit([(A, 0, 5)], []))
            assert (await first).tokens == [5]
            await pair.told(*(Emit([(A, 0, token)], []) for token in (6, 7, 8)), Emit([(A, 0, 9)], [ended()]))
            assert await anext(stream) == Delta(index=0, tokens=[6, 7, 8, 9], ended=ended())
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    finish(main())


def test_the_last_token_comes_with_the_end_and_nothing_after_it():
    async def main() -> None:
        async with Pair() as pair:
            stream, first = await pair.begin(request(n=2))
            await pair.told(Emit([(A, 0, 5), (A, 1, 6)], [ended()]), Emit([(A, 1, 7)], [ended(index=1)]))
            deltas = [await first] + [delta async for delta in stream]
            assert [(delta.index, delta.tokens, delta.ended) for delta in deltas] == [
                (0, [5], ended()),
                (1, [6, 7], ended(index=1)),
            ]

    finish(main())


def test_leaving_early_aborts_and_what_still_comes_is_for_nobody():
    async def main() -> None:
        async with Pair() as pair:
            stream, first = await pair.begin(request())
            await pair.told(Emit([(A, 0, 5)], []))
            await first
            await stream.aclose()
            assert await pair.heard() == AbortRequest(A)
            await pair.told(Emit([(A, 0, 6)], []), Emit([], [ended(reason=FinishReason.ABORT)]))

    finish(main())


def test_a_cancelled_wait_aborts():
    async def main() -> None:
        async with Pair() as pair:
            _, first = await pair.begin(request())
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert await pair.heard() == AbortRequest(A)

    finish(main())


def test_a_complete_stream_is_not_aborted():
    async def main() -> None:
        async with Pair() as pair:
            stream, first = await pair.begin(request())
            await pair.told(Emit([(A, 0, 5)], [ended()]))
            await first
            await stream.aclose()
            await pair.told()  # the next thing the engine hears is a ping, not an abort

    finish(main())


def test_refused():
    async def main() -> None:
        async with Pair() as pair:
            _, first = await pair.begin(request())
            await pair.told(RefusedRequest(A, Refused("never_fits", 9, 8)))
            with pytest.raises(EngineRefused, match="can need 9 KV blocks and the pool has 8"):
                await first
            await pair.told()  # no abort for what was never taken

    finish(main())


def test_an_id_is_used_once_at_a_time():
    async def main() -> None:
        async with Pair() as pair:
            stream, first = await pair.begin(request())
            with pytest.raises(EngineRefused) as refusal:
                await anext(pair.client.generate(request()))
            assert refusal.value.refused.reason == "duplicate_id"
            await pair.told(Emit([(A, 0, 5)], [ended()]))
            assert (await first).tokens == [5]
            await stream.aclose()

    finish(main())


def test_everybody_is_told_when_the_engine_goes():
    async def main() -> None:
        async with Pair() as pair:
            _, first = await pair.begin(request())
            half, begun = await pair.begin(request(B))
            await pair.told(Emit([(B, 0, 5)], []))
            await begun
            ping = asyncio.create_task(pair.client.ping(30))
            pause = asyncio.create_task(pair.client.pause(None))
            assert type(await pair.heard()) is Ping
            assert await pair.heard() == PauseInstance(None)
            pair.engine.close()
            for waiting in (first, ping, pause, pair.client.ready):
                with pytest.raises(Unavailable):
                    await waiting
            with pytest.raises(Unavailable):
                await anext(half)
            for late in (anext(pair.client.generate(request())), pair.client.ping(1), pair.client.resume()):
                with pytest.raises(Unavailable):
                    await late

    finish(main())


def test_an_answer_that_was_complete_when_the_engine_went_stays_one():
    async def main() -> None:
        async with Pair() as pair:
            stream, first = await pair.begin(request())
            await pair.told(Emit([(A, 0, 5)], []))
            await first
            pair.engine.send(Emit([(A, 0, 6)], [ended()]))
            pair.engine.close()
            await asyncio.wait_for(pair.reading, 10)
            assert [delta.tokens async for delta in stream] == [[6]]

    finish(main())


def test_garbage_from_the_engine_is_its_end():
    async def main() -> None:
        async with Pair() as pair:
            _, first = await pair.begin(request())
            pair.engine._frames.transport.write(b"\x00" * 100)
            with pytest.raises(Unavailable):
                await first

    finish(main())


def test_a_bug_in_reading_is_seen_and_everybody_is_told(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        pair = await Pair().__aenter__()
        _, first = await pair.begin(request())
        monkeypatch.setattr(pair.client, "_on_emit", lambda emit: 1 / 0)
        pair.engine.send(Emit([], []))
        with pytest.raises(Unavailable):
            await first
        with pytest.raises(ZeroDivisionError):
            await pair.reading
        pair.client.ready.exception()
        pair.engine.close()
        pair.channel.close()
        await asyncio.sleep(0)

    finish(main())


def test_a_ping_goes_round_or_times_out():
    async def main() -> None:
        async with Pair() as pair:
            await pair.told()
            with pytest.raises(Unavailable, match=r"within 0\.05 s"):
                await pair.client.ping(0.05)
            late = await pair.heard()
            await pair.told(Pong(late.number))  # too late: for nobody

    finish(main())


def test_ready_is_told_once_also_to_nobody():
    async def main() -> None:
        async with Pair() as pair:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pair.client.ready, 0.01)
            await pair.told(InstanceReady(1, 2, 3, 4, 5))

    finish(main())


def test_pause_and_resume_show_in_the_numbers_at_once():
    async def main() -> None:
        async with Pair() as pair:
            await pair.told(InstanceStats(blocks_total=7))
            pausing = asyncio.create_task(pair.client.pause(1.0))
            assert await pair.heard() == PauseInstance(1.0)
            pair.engine.send(ModeReport("draining"))
            pair.engine.send(ModeReport("paused"))
            await pausing
            assert (pair.client.stats().mode, pair.client.stats().blocks_total) == ("paused", 7)
            await pair.client.pause(None)  # it is paused already
            assert await pair.heard() == PauseInstance(None)
            resuming = asyncio.create_task(pair.client.resume())
            assert await pair.heard() == ResumeInstance()
            pair.engine.send(ModeReport("serving"))
            await resuming
            assert pair.client.stats().mode == "serving"

    finish(main())


def test_a_pause_that_somebody_undoes_is_not_waited_for():
    async def main() -> None:
        async with Pair() as pair:
            pausing = asyncio.create_task(pair.client.pause(None))
            assert await pair.heard() == PauseInstance(None)
            pair.engine.send(ModeReport("draining"))
            pair.engine.send(ModeReport("serving"))
            with pytest.raises(Unavailable, match="told otherwise"):
                await pausing

    finish(main())


def test_prompt_logprobs_come_once_however_often_they_were_computed():
    def row(first: int, *values: float) -> RowLogprobs:
        return RowLogprobs(Slot(0), Incarnation(1), None, first, tuple(TokenLogprob(1, value, 1) for value in values))

    async def main() -> None:
        async with Pair() as pair:
            stream, first = await pair.begin(request(prompt_logprobs=0))
            # The first chunk is computed twice (a preemption), and reported twice.
            await pair.told(Emit([], [], [(A, 0, row(1, -1.0))]), Emit([], [], [(A, 0, row(1, -1.0, -2.0))]))
            await pair.told(Emit([(A, 0, 5)], []))
            deltas = [await first]
            await pair.told(Emit([(A, 0, 6)], [ended()]))
            deltas += [delta async for delta in stream]
            told = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
            assert [[entry and entry.logprob for entry in column] for column in told] == [[None, -1.0, -2.0]]
            assert [token for delta in deltas for token in delta.tokens] == [5, 6]

    finish(main())
