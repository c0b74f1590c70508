"""The engine is lost, another one comes: what is sent to it, and what the clients are told."""

from __future__ import annotations

import asyncio

import pytest
from client_pair import READY, A, Asked, B, Pair, ended, request
from msgspec.structs import replace
from run_loop import finish

from baton.api.generate.engine_client import EngineRefused
from baton.errors import InvariantBroken, Unavailable
from baton.protocol.codec import FRAME_BYTES_MAX, MessageTooLarge
from baton.protocol.control import (
    AbortRequest,
    InstanceStats,
    ModeReport,
    OrderAnswer,
    PauseInstance,
    RefusedRequest,
    ResumeInstance,
)
from baton.protocol.ids import Incarnation, RequestId, Slot
from baton.protocol.output import OTHER_WEIGHTS, Emit
from baton.protocol.request import FinishReason, GenerateRequest, Refused, SamplingParams
from baton.protocol.step import RowLogprobs, TokenLogprob


def pair() -> Pair:
    return Pair(successors_within=30.0)


def row(sampled: float | None = None, *prompt: float) -> RowLogprobs:
    thought = None if sampled is None else TokenLogprob(1, sampled, 1)
    return RowLogprobs(Slot(0), Incarnation(1), thought, 1, tuple(TokenLogprob(1, value, 1) for value in prompt))


async def replayed(rig: Pair) -> GenerateRequest:
    message = await rig.heard()
    assert type(message) is GenerateRequest
    return message


def test_what_is_open_is_sent_again_with_all_that_was_told():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            first = GenerateRequest(
                id=A, prompt=(1, 2, 3), n=3, sampling=SamplingParams(max_tokens=9, seed=7), timeout_seconds=60.0, priority=2
            )
            asked, fresh = await rig.begin(first), await rig.begin(request(B))
            await rig.told(Emit([(A, 1, 0, 0, [5]), (A, 1, 1, 0, [6]), (A, 1, 2, 0, [7])], []))
            await rig.told(Emit([(A, 1, 0, 1, [8]), (A, 1, 1, 1, [9])], [ended(index=1)]))
            await rig.another_engine()
            assert rig.client.front.ledgers.keys() == {A, B}
            rig.engine.send(READY)
            again, other = await replayed(rig), await replayed(rig)
            assert (again.attempt, again.indices, again.outputs) == (2, (0, 2), ((5, 8), (7,)))
            assert (again.id, again.prompt, again.n, again.priority) == (A, (1, 2, 3), 3, 2)
            assert again.sampling == first.sampling
            assert 0.0 < again.age_seconds < 60.0
            assert again.timeout_seconds == 60.0 - again.age_seconds
            assert (other.attempt, *other.wanted, other.delivered(0), other.timeout_seconds) == (2, 0, (), None)
            ends = [ended(index=0, attempt=2), ended(index=2, attempt=2), ended(B, attempt=2)]
            await rig.told(Emit([(A, 2, 0, 2, [10]), (A, 2, 2, 1, [11]), (B, 2, 0, 0, [12])], ends))
            await asyncio.gather(asked.over, fresh.over)
            by_index = {index: [d.tokens for d in asked.deltas if d.index == index] for index in range(3)}
            assert by_index == {0: [[5], [8], [10]], 1: [[6], [9]], 2: [[7], [11]]}
            assert fresh.tokens == [12]

    finish(main())


def test_a_position_is_told_once_and_only_by_the_present_attempt():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            asked = await rig.begin(request(logprobs=0))
            await rig.told(Emit([(A, 1, 0, 0, [5])], [], [(A, 0, row(-0.5))]))
            await rig.told(Emit([(A, 1, 0, 0, [5])], [], [(A, 0, row(-0.5))]))
            await rig.another_engine()
            rig.engine.send(READY)
            assert (await replayed(rig)).outputs == ((5,),)
            await rig.told(Emit([(A, 1, 0, 1, [99])], [ended(attempt=1)]), Emit([(A, 3, 0, 1, [98])], []))
            assert asked.tokens == [5]
            both = [(A, 0, row(-0.5)), (A, 0, row(-1.5))]
            await rig.told(Emit([(A, 2, 0, 0, [5]), (A, 2, 0, 1, [6])], [], both), Emit([], [ended(attempt=2)]))
            await asked.over
            assert asked.tokens == [5, 6]
            assert [entry.logprob for delta in asked.deltas for entry in delta.logprobs] == [-0.5, -1.5]
            assert sum(delta.ended is not None for delta in asked.deltas) == 1

    finish(main())


def test_a_token_that_was_left_out_is_an_error_and_not_a_wrong_answer():
    async def main() -> None:
        async with pair() as rig:
            asked = await rig.begin(request())
            rig.engine.send(Emit([(A, 1, 0, 1, [6])], []))
            with pytest.raises(InvariantBroken):
                await asked.over
            assert await rig.heard() == AbortRequest(A)
            assert asked.tokens == []

    finish(main())


def test_prompt_logprobs_that_were_told_are_not_asked_for_again():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            told, untold = await rig.begin(request(prompt_logprobs=0)), await rig.begin(request(B, prompt_logprobs=0))
            await rig.told(Emit([(A, 1, 0, 0, [5])], [], [(A, 0, row(None, -1.0, -2.0)), (B, 0, row(None, -1.0))]))
            await rig.another_engine()
            rig.engine.send(READY)
            assert [(await replayed(rig)).sampling.prompt_logprobs for _ in range(2)] == [None, 0]
            ends = [ended(attempt=2), ended(B, attempt=2)]
            await rig.told(Emit([(A, 2, 0, 1, [6]), (B, 2, 0, 0, [7])], ends, [(B, 0, row(None, -1.0, -2.0))]))
            await asyncio.gather(told.over, untold.over)
            for asked in (told, untold):
                columns = [delta.prompt_logprobs for delta in asked.deltas if delta.prompt_logprobs is not None]
                assert [[entry and entry.logprob for entry in column] for column in columns] == [[None, -1.0, -2.0]]

    finish(main())


@pytest.mark.parametrize("when", ["before the loss", "without an engine"])
def test_what_was_aborted_meanwhile_ends_here_and_is_not_replayed(when: str):
    """A stop string in one sequence, an abort of a whole request; the engine never answered."""

    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            asked, aborted = await rig.begin(request(n=2)), await rig.begin(request(B, n=2))
            await rig.told(Emit([(A, 1, 0, 0, [5]), (A, 1, 1, 0, [6]), (A, 1, 1, 1, [7]), (B, 1, 0, 0, [8])], []))

            def abort() -> None:
                rig.client.abort(A, 1, FinishReason.STOP)
                rig.client.abort(A, 1)  # said again, in other words: the first counts
                rig.client.abort(B)

            if when == "before the loss":
                abort()
            await rig.another_engine()
            if when == "without an engine":
                abort()
            await aborted.over
            assert [d.ended.reason for d in aborted.deltas if d.ended] == [FinishReason.ABORT, FinishReason.ABORT]
            end = asked.deltas[-1].ended
            assert (end.index, end.reason, end.prompt_tokens, end.output_tokens) == (1, FinishReason.STOP, 3, 2)
            rig.engine.send(READY)
            again = await replayed(rig)
            assert (again.id, again.indices, again.outputs) == (A, (0,), ((5,),))
            await rig.told(Emit([], [ended(attempt=2)]))
            await asked.over

    finish(main())


def test_a_client_that_left_while_there_was_no_engine_is_not_replayed():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            asked = await rig.begin(request())
            await rig.another_engine()
            asked.over.cancel()
            await asyncio.wait([asked.over])
            await rig.told_ready()

    finish(main())


def test_without_an_engine_nothing_new_is_taken_and_then_it_is():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            await rig.another_engine()
            for late in (Asked(rig.client, request()).over, rig.client.ping(1), rig.client.resume(), rig.client.pause(None)):
                with pytest.raises(Unavailable, match="try again later"):
                    await late
            await rig.told_ready()
            asked = await rig.begin(request())
            await rig.told(Emit([(A, 1, 0, 0, [5])], [ended()]))
            await asked.over

    finish(main())


def test_a_request_of_the_very_moment_of_the_loss_is_sent_to_the_next_engine():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            rig.engine.close()
            asked = Asked(rig.client, request())
            await rig.another_engine()
            rig.engine.send(READY)
            assert (await replayed(rig)).outputs == ()
            await rig.told(Emit([(A, 2, 0, 0, [5])], [ended(attempt=2)]))
            await asked.over
            assert asked.tokens == [5]

    finish(main())


def test_engines_that_are_lost_one_after_the_other():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            asked = await rig.begin(request())
            for attempt in (2, 3, 4):
                await rig.another_engine()
                await rig.another_engine()  # the one before was never ready
                rig.engine.send(READY)
                again = await replayed(rig)
                assert (again.attempt, again.delivered(0)) == (attempt, tuple(range(attempt - 2)))
                await rig.told(Emit([(A, attempt, 0, attempt - 2, [attempt - 2])], []))
            await rig.told(Emit([], [ended(attempt=4)]))
            await asked.over
            assert asked.tokens == [0, 1, 2]

    finish(main())


def test_time_that_is_over_is_told_by_the_next_engine():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            asked = await rig.begin(GenerateRequest(id=A, prompt=(1,), timeout_seconds=1e-6))
            await rig.another_engine()
            rig.engine.send(READY)
            assert 0.0 < (await replayed(rig)).timeout_seconds <= 0.001
            await rig.told(Emit([], [ended(reason=FinishReason.TIMEOUT, attempt=2)]))
            await asked.over

    finish(main())


def test_a_replay_that_is_refused_is_an_answer_that_breaks_off():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            asked = await rig.begin(request())
            await rig.told(Emit([(A, 1, 0, 0, [5])], []))
            await rig.another_engine()
            rig.engine.send(READY)
            await replayed(rig)
            await rig.told(RefusedRequest(A, Refused("never_fits", 9, 8)))
            with pytest.raises(Unavailable, match="can need 9 KV blocks"):
                await asked.over
            fresh = await rig.begin(request(B))
            await rig.told(RefusedRequest(B, Refused("queue_full", 9, 8)))
            with pytest.raises(EngineRefused):
                await fresh.over

    finish(main())


def test_what_has_begun_ends_where_the_next_engine_has_other_weights():
    """Also what has ended in part, without a token in what is open. What has no token begins anew there."""
    half = RequestId("half")

    async def main() -> None:
        async with pair() as rig:
            served: list[bytes] = []
            rig.client.on_identity = served.append
            await rig.told(replace(READY, identity=b"one"))
            begun, ended_in_part, fresh = [await rig.begin(one) for one in (request(), request(half, n=2), request(B))]
            await rig.told(Emit([(A, 1, 0, 0, [5]), (half, 1, 0, 0, [6])], [ended(half, 0)]))
            await rig.another_engine()
            rig.engine.send(replace(READY, identity=b"two"))
            for asked in (begun, ended_in_part):
                with pytest.raises(Unavailable, match=OTHER_WEIGHTS):
                    await asked.over
            again = await replayed(rig)
            assert (again.id, again.attempt, again.outputs) == (B, 2, ())
            await rig.told(Emit([(B, 2, 0, 0, [7])], [ended(B, attempt=2)]))
            await fresh.over
            assert (begun.tokens, fresh.tokens, served) == ([5], [7], [b"two"])

    finish(main())


def test_one_whose_replay_is_too_large_for_a_frame_fails_alone():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            rig.engine.close()
            large = Asked(rig.client, GenerateRequest(id=A, prompt=(1,), salt=bytes(FRAME_BYTES_MAX - 200)))
            small = Asked(rig.client, request(B))
            await rig.another_engine()
            rig.client.front.ledgers[A].open[0].extend(range(1000))  # what it was told has made it too large
            rig.engine.send(READY)
            with pytest.raises(MessageTooLarge):
                await large.over
            assert (await replayed(rig)).id == B
            await rig.told(Emit([(B, 2, 0, 0, [5])], [ended(B, attempt=2)]))
            await small.over

    finish(main())


def test_the_engine_after_a_paused_one_is_paused_too():
    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            pausing = asyncio.create_task(rig.client.pause(3.0))
            assert (await rig.heard()).drain_seconds_max == 3.0
            await rig.told(ModeReport("draining"))
            await rig.another_engine()
            with pytest.raises(Unavailable):
                await pausing
            rig.engine.send(READY)
            again = await rig.heard()
            assert (type(again), again.drain_seconds_max) == (PauseInstance, 3.0)
            await rig.told(InstanceStats(), ModeReport("paused"))
            assert rig.client.stats().mode == "paused"

    finish(main())


def test_the_engine_after_one_that_was_lost_while_it_loaded_other_weights_serves():
    """Found by an audit: it was paused, and stayed so, though the order had failed."""

    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            loading = asyncio.create_task(rig.client.load_weights("/new", None))
            for reported in ("paused", "asleep"):
                order = await rig.heard()
                await rig.told(ModeReport(reported), OrderAnswer(order.number, "done"))
            assert (await rig.heard()).model == "/new"
            await rig.another_engine()
            with pytest.raises(Unavailable):
                await loading
            await rig.told_ready()  # and nothing was sent to it
            asked = await rig.begin(request())
            await rig.told(Emit([(A, 1, 0, 0, [5])], [ended()]))
            await asked.over

    finish(main())


def test_weights_that_cannot_be_loaded_now_leave_nothing_paused():
    """A worker that is just being started cannot be put to sleep."""

    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            loading = asyncio.create_task(rig.client.load_weights("/new", None))
            pausing = await rig.heard()
            await rig.told(ModeReport("paused"), OrderAnswer(pausing.number, "done"))
            sleeping = await rig.heard()
            await rig.told(OrderAnswer(sleeping.number, "refused", "wait for a worker that is being started"))
            resuming = await rig.heard()
            assert type(resuming) is ResumeInstance
            await rig.told(ModeReport("serving"), OrderAnswer(resuming.number, "done"))
            with pytest.raises(Unavailable, match="that is being started"):
                await loading

    finish(main())


def test_no_other_engine_is_waited_for_once_the_requests_were_ended():
    """The front closes the channel itself when it ends: that is no loss."""

    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            rig.client.end_requests(Unavailable("the server ends"))
            await rig.client.finish()
            await asyncio.wait_for(rig.reading, 10)

    finish(main())


def test_no_other_engine_in_time():
    async def main() -> None:
        rig = await Pair(successors_within=0.05).__aenter__()
        await rig.told(READY)
        asked = await rig.begin(request())
        await rig.another_engine()  # and it never gets ready
        with pytest.raises(Unavailable, match="the engine is gone"):
            await asked.over
        with pytest.raises(Unavailable, match=r"within 0\.05 s"):
            await rig.reading
        rig.engine.close()
        rig.channel.close()
        await asyncio.sleep(0)

    finish(main())


def test_an_engine_that_is_ready_may_take_its_time_afterwards():
    async def main() -> None:
        async with Pair(successors_within=0.2) as rig:
            await rig.told(READY)
            await rig.another_engine()
            await rig.told_ready()
            await asyncio.sleep(0.3)
            await rig.told()

    finish(main())


def test_ids_of_clients_stay_theirs():
    """A replay keeps the request's id: an abort by that id reaches it."""

    async def main() -> None:
        async with pair() as rig:
            await rig.told(READY)
            asked = await rig.begin(request(RequestId("mine")))
            await rig.another_engine()
            rig.engine.send(READY)
            assert (await replayed(rig)).id == "mine"
            rig.client.abort(RequestId("mine"))
            assert await rig.heard() == AbortRequest(RequestId("mine"))
            await rig.told(Emit([], [ended(RequestId("mine"), reason=FinishReason.ABORT, attempt=2)]))
            await asked.over

    finish(main())
