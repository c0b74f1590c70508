"""The front's end of the engine's channel, with a test in the engine's place."""

from __future__ import annotations

import asyncio

import pytest
from client_pair import A, Asked, B, Pair, ended, request
from run_loop import finish

from baton.api.generate.engine_client import Delta, EngineRefused
from baton.errors import Unavailable
from baton.protocol.codec import FRAME_BYTES_MAX, MessageTooLarge, encode
from baton.protocol.control import (
    AbortRequest,
    InstanceReady,
    InstanceStats,
    ModeReport,
    OrderAnswer,
    PauseInstance,
    Ping,
    Pong,
    RefusedRequest,
    ResumeInstance,
)
from baton.protocol.ids import Incarnation, RequestId, Slot
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest, Refused, SamplingParams
from baton.protocol.step import RowLogprobs, TokenLogprob


def test_each_delta_is_told_as_it_comes_until_the_end():
    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request())
            await pair.told(Emit([(A, 1, 0, 0, [5])], []))
            assert asked.deltas == [Delta(0, [5])]
            await pair.told(*(Emit([(A, 1, 0, token - 5, [token])], []) for token in (6, 7, 8)))
            assert asked.tokens == [5, 6, 7, 8]
            assert not asked.over.done()
            await pair.told(Emit([(A, 1, 0, 4, [9])], [ended()]))
            await asked.over
            assert asked.deltas[-1] == Delta(0, [9], ended=ended())

    finish(main())


def test_the_last_token_comes_with_the_end_and_nothing_after_it():
    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request(n=2))
            await pair.told(
                Emit([(A, 1, 0, 0, [5]), (A, 1, 1, 0, [6])], [ended()]), Emit([(A, 1, 1, 1, [7])], [ended(index=1)])
            )
            await asked.over
            assert [(delta.index, delta.tokens, delta.ended) for delta in asked.deltas] == [
                (0, [5], ended()),
                (1, [6], None),
                (1, [7], ended(index=1)),
            ]

    finish(main())


def test_two_tokens_of_a_sequence_in_one_message_keep_their_order():
    """Results that came out of order are absorbed together."""

    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request())
            await pair.told(
                Emit([(A, 1, 0, 0, [5]), (A, 1, 0, 1, [6])], []), Emit([(A, 1, 0, 2, [7]), (A, 1, 0, 3, [8])], [ended()])
            )
            await asked.over
            assert asked.tokens == [5, 6, 7, 8]
            assert asked.deltas[-1] == Delta(0, [7, 8], ended=ended())

    finish(main())


def test_leaving_early_aborts_and_what_still_comes_is_for_nobody():
    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request())
            await pair.told(Emit([(A, 1, 0, 0, [5])], []))
            asked.over.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked.over
            assert await pair.heard() == AbortRequest(A)
            await pair.told(Emit([(A, 1, 0, 1, [6])], []), Emit([], [ended(reason=FinishReason.ABORT)]))
            assert asked.tokens == [5]

    finish(main())


def test_an_error_of_the_taker_ends_its_request_and_no_other(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with Pair() as pair:
            monkeypatch.setattr(Asked, "take", lambda self, delta: 1 / 0)
            broken = await pair.begin(request())
            monkeypatch.undo()
            whole = await pair.begin(request(B))
            pair.engine.send(Emit([(A, 1, 0, 0, [5]), (B, 1, 0, 0, [6])], []))
            assert await pair.heard() == AbortRequest(A)
            with pytest.raises(ZeroDivisionError):
                await broken.over
            await pair.told(Emit([(A, 1, 0, 1, [5]), (B, 1, 0, 1, [7])], [ended(B)]))
            await whole.over
            assert whole.tokens == [6, 7]

    finish(main())


def test_what_comes_after_the_error_that_ended_a_request_is_told_to_nobody():
    """In the same turn of the loop: whoever asked has not been woken yet. An answer has one end."""

    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request())
            pair.client.end_requests(Unavailable("the server ends"))
            pair.client._on_message(Emit([(A, 1, 0, 0, [5])], []))
            pair.client._on_message(Emit([(A, 1, 0, 1, [6])], [ended()]))
            with pytest.raises(Unavailable, match="the server ends"):
                await asked.over
            assert asked.deltas == []

    finish(main())


def test_a_complete_stream_is_not_aborted():
    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request())
            await pair.told(Emit([(A, 1, 0, 0, [5])], [ended()]))
            await asked.over
            await pair.told()  # the next thing the engine hears is a ping, not an abort

    finish(main())


def test_refused():
    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request())
            await pair.told(RefusedRequest(A, Refused("never_fits", 9, 8)))
            with pytest.raises(EngineRefused, match="can need 9 KV blocks and the pool has 8"):
                await asked.over
            await pair.told()  # no abort for what was never taken

    finish(main())


def test_an_id_is_used_once_at_a_time():
    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request())
            with pytest.raises(EngineRefused) as refusal:
                await Asked(pair.client, request()).over
            assert refusal.value.refused.reason == "duplicate_id"
            await pair.told(Emit([(A, 1, 0, 0, [5])], [ended()]))
            await asked.over
            assert asked.tokens == [5]

    finish(main())


def test_everybody_is_told_when_the_engine_goes():
    async def main() -> None:
        async with Pair() as pair:
            first, half = await pair.begin(request()), await pair.begin(request(B))
            await pair.told(Emit([(B, 1, 0, 0, [5])], []))
            ping = asyncio.create_task(pair.client.ping(30))
            pause = asyncio.create_task(pair.client.pause(None))
            assert type(await pair.heard()) is Ping
            assert type(await pair.heard()) is PauseInstance
            pair.engine.close()
            for waiting in (first.over, half.over, ping, pause, pair.client.ready):
                with pytest.raises(Unavailable):
                    await waiting
            for late in (Asked(pair.client, request()).over, pair.client.ping(1), pair.client.resume()):
                with pytest.raises(Unavailable):
                    await late

    finish(main())


def test_an_answer_that_was_complete_when_the_engine_went_stays_one():
    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request())
            await pair.told(Emit([(A, 1, 0, 0, [5])], []))
            pair.engine.send(Emit([(A, 1, 0, 1, [6])], [ended()]))
            pair.engine.close()
            await asyncio.wait_for(pair.reading, 10)
            await asked.over
            assert asked.tokens == [5, 6]

    finish(main())


def test_garbage_from_the_engine_is_its_end():
    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request())
            pair.engine._frames.transport.write(b"\x00" * 100)
            with pytest.raises(Unavailable):
                await asked.over

    finish(main())


def test_a_bug_in_reading_is_seen_and_everybody_is_told(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        pair = await Pair().__aenter__()
        asked = await pair.begin(request())
        monkeypatch.setattr(pair.client, "_on_emit", lambda emit: 1 / 0)
        pair.engine.send(Emit([], []))
        with pytest.raises(Unavailable):
            await asked.over
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
            order = await pair.heard()
            assert order == PauseInstance(order.number, 1.0)
            await pair.told(ModeReport("draining"), ModeReport("paused"))
            assert not pausing.done(), "a state is no answer"
            await pair.told(OrderAnswer(order.number, "done"))
            await pausing
            assert (pair.client.stats().mode, pair.client.stats().blocks_total) == ("paused", 7)
            resuming = asyncio.create_task(pair.client.resume())
            order = await pair.heard()
            assert order == ResumeInstance(order.number)
            await pair.told(ModeReport("serving"), OrderAnswer(order.number, "done"))
            await resuming
            assert pair.client.stats().mode == "serving"

    finish(main())


@pytest.mark.parametrize(("outcome", "why"), [("overtaken", "resumed before it was paused"), ("refused", "too many pauses")])
def test_a_pause_that_is_not_done_says_why(outcome, why):
    async def main() -> None:
        async with Pair() as pair:
            pausing = asyncio.create_task(pair.client.pause(None))
            order = await pair.heard()
            await pair.told(ModeReport("draining"), ModeReport("paused"), OrderAnswer(order.number, outcome))
            with pytest.raises(Unavailable, match=why):
                await pausing

    finish(main())


def test_everybody_gets_the_answer_to_the_own_order():
    """Two who pause and one who resumes, all at once: modes alone do not say whose order came to what."""

    async def main() -> None:
        async with Pair() as pair:
            tasks = [
                asyncio.create_task(order) for order in (pair.client.pause(None), pair.client.resume(), pair.client.pause(5.0))
            ]
            first, second, third = [await pair.heard() for _ in range(3)]
            assert len({first.number, second.number, third.number}) == 3
            await pair.told(OrderAnswer(999, "done"), OrderAnswer(third.number, "done"), OrderAnswer(third.number, "refused"))
            await tasks[2]
            assert not tasks[0].done()
            assert not tasks[1].done()
            await pair.told(OrderAnswer(first.number, "overtaken"), OrderAnswer(second.number, "done"))
            await tasks[1]
            with pytest.raises(Unavailable):
                await tasks[0]

    finish(main())


def test_prompt_logprobs_come_once_however_often_they_were_computed():
    def row(first: int, *values: float) -> RowLogprobs:
        return RowLogprobs(Slot(0), Incarnation(1), None, first, tuple(TokenLogprob(1, value, 1) for value in values))

    async def main() -> None:
        async with Pair() as pair:
            asked = await pair.begin(request(prompt_logprobs=0))
            # The first chunk is computed twice (a preemption), and reported twice.
            await pair.told(Emit([], [], [(A, 0, row(1, -1.0))]), Emit([], [], [(A, 0, row(1, -1.0, -2.0))]))
            await pair.told(Emit([(A, 1, 0, 0, [5])], []), Emit([(A, 1, 0, 1, [6])], [ended()]))
            await asked.over
            told = [delta.prompt_logprobs for delta in asked.deltas if delta.prompt_logprobs is not None]
            assert [[entry and entry.logprob for entry in column] for column in told] == [[None, -1.0, -2.0]]
            assert asked.tokens == [5, 6]

    finish(main())


def test_what_the_prompts_of_a_list_share_travels_once():
    """Bad words were sent once a prompt: 1 MB of them x 64 prompts ended the server."""
    words = tuple((place, place + 1) for place in range(2000))
    wanted = [
        GenerateRequest(
            id=RequestId(f"p{place}"), prompt=(1, place), sampling=SamplingParams(max_tokens=1 + place, bad_words=words)
        )
        for place in range(64)
    ]

    async def main() -> None:
        async with Pair() as pair:
            asked = [Asked(pair.client, each) for each in wanted]
            message = await pair.heard()
            assert type(message) is GenerateBatch
            assert message.requests() == wanted
            assert len(encode(message)) < 2 * len(encode(wanted[0]))
            assert all(each.sampling.bad_words is message.first.sampling.bad_words for each in message.requests())
            await pair.told(Emit([], [ended(each.id) for each in wanted]))
            await asyncio.gather(*(one.over for one in asked))

    finish(main())


def test_requests_with_other_settings_travel_alone_and_in_order():
    async def main() -> None:
        async with Pair() as pair:
            asked = [Asked(pair.client, request(name, seed=seed)) for seed, name in enumerate((A, B))]
            assert [await pair.heard(), await pair.heard()] == [request(A, seed=0), request(B, seed=1)]
            await pair.told(Emit([], [ended(A), ended(B)]))
            await asyncio.gather(*(one.over for one in asked))

    finish(main())


def test_a_request_too_large_for_a_frame_fails_alone():
    async def main() -> None:
        async with Pair() as pair:
            large = GenerateRequest(id=B, prompt=(1,), salt=bytes(FRAME_BYTES_MAX))
            asked, refused = await pair.begin(request()), Asked(pair.client, large)
            with pytest.raises(MessageTooLarge):
                await refused.over
            await pair.told(Emit([(A, 1, 0, 0, [9])], [ended()]))
            await asked.over
            assert asked.tokens == [9]

    finish(main())


def test_a_request_is_refused_while_the_engine_is_far_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.runtime.wire.channel.OFFER_BYTES_MAX", 1 << 20)

    async def main() -> None:
        async with Pair() as pair:
            pair.engine._frames.transport.pause_reading()
            many = [
                Asked(pair.client, GenerateRequest(id=RequestId(f"p{place}"), prompt=(1,), priority=place, salt=bytes(1 << 18)))
                for place in range(20)
            ]
            await asyncio.wait([one.over for one in many], timeout=0.2)
            failed = [one.over for one in many if one.over.done()]
            assert 0 < len(failed) < len(many)
            assert all(isinstance(over.exception(), Unavailable) for over in failed)
            assert not pair.channel._frames.transport.is_closing()
            pair.engine._frames.transport.resume_reading()
            pair.engine.send(Emit([], [ended(RequestId(f"p{place}")) for place in range(20)]))
            await asyncio.gather(*(one.over for one in many if one.over not in failed))

    finish(main())


def test_an_abort_does_not_overtake_its_request():
    async def main() -> None:
        async with Pair() as pair:
            asked = Asked(pair.client, request())
            await asyncio.sleep(0)  # it runs up to where it waits
            pair.client.abort(A)  # in the same turn of the loop, at whose end requests are sent
            assert await pair.heard() == request()
            assert type(await pair.heard()) is AbortRequest
            asked.over.cancel()
            assert type(await pair.heard()) is AbortRequest

    finish(main())
