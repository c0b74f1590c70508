"""Tokens on their way to clients: the same object where all is right, sifted where it is not (invariants 21 and 44)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.core.cluster.events import Deliver
from baton.protocol.control import Ping
from baton.protocol.handoff import Adopted, Offer, Prefill, Release, Released, Reserved
from baton.protocol.ids import PoolIncarnation, RequestId
from baton.protocol.output import Begun, Emit, Ended, each_token
from baton.protocol.request import FinishReason, SamplingParams
from baton.protocol.step import RowLogprobs, TokenLogprob

from .harness import Room, request, token
from .test_losses import assigned, at_phase

RID = RequestId("r")


def row(position, value, *, attempt=1, index=0, id=RID):
    return (id, attempt, index, position, [value])


def serving(n=1, max_tokens=9, **more):
    room = Room("mixed", "mixed")
    room.arrive(request(n=n, max_tokens=max_tokens, **more))
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    return room, decoder


def test_fresh_tokens_are_passed_on_as_the_same_object():
    room, decoder = serving(n=2)
    emit = Emit([row(0, 5), row(0, 6, index=1), row(1, 7)], [])
    (effect,) = room.say(decoder, emit)
    assert effect.emit is emit


def test_ends_and_thoughts_that_are_right_are_passed_on_as_the_same_object():
    room, decoder = serving(max_tokens=1)
    thought = RowLogprobs(0, 0, TokenLogprob(5, -0.5, 1))
    emit = Emit([row(0, 5)], [Ended(RID, 0, FinishReason.LENGTH, 40, 3, 1, 0)], [(RID, 0, thought)])
    (effect,) = room.say(decoder, emit)
    assert effect.emit is emit


@pytest.mark.parametrize(
    "stale",
    [row(0, 5), row(1, 9, attempt=2), row(1, 9, index=3), row(0, 5, id=RequestId("other"))],
    ids=["repeated", "other attempt", "no such sequence", "no such request"],
)
def test_rows_20_to_23_what_is_not_the_next_token_is_dropped_and_the_rest_is_told(stale):
    room, decoder = serving()
    room.say(decoder, Emit([row(0, 5)], []))
    (effect,) = room.say(decoder, Emit([stale, row(1, 6), stale], []))
    assert effect == Deliver(Emit([row(1, 6)], []))
    assert room.router.stats.stale_rows == 2
    assert room.say(decoder, Emit([stale], [])) == []


def test_row_19_a_lost_token_means_another_attempt():
    room, decoder = serving()
    room.say(decoder, Emit([row(0, 5)], []))
    room.say(decoder, Emit([row(2, 7), row(3, 8)], []))
    assert room.routed.attempt == 2
    assert room.told["r", 0] == [5]
    (other,) = [instance for instance in room.instances if instance.assigned]
    assert other is not decoder
    assert other.assigned["r"].request.outputs == ((5,),)


def test_row_19_an_end_whose_tokens_never_came_is_no_end():
    room, decoder = serving()
    room.say(decoder, Emit([row(0, 5)], [Ended(RID, 0, FinishReason.STOP, 40, 0, 3, 0)]))
    assert not room.ends
    assert room.routed.attempt == 2


def test_row_20_a_second_end_is_dropped():
    room, decoder = serving(n=2)
    ended = Ended(RID, 0, FinishReason.STOP, 40, 0, 0, 0)
    room.say(decoder, Emit([], [ended, ended]))
    assert room.say(decoder, Emit([], [ended])) == []
    assert list(room.ends) == [("r", 0)]


@pytest.mark.parametrize("phase", ["H1", "H2", "H2b", "H3", "H5", "H6", "H7", "H8"])
def test_rows_20_to_22_every_message_at_the_wrong_time_changes_nothing(phase):
    """Repeated, early, from the wrong side, of another attempt, of nobody."""
    room = at_phase(phase, max_tokens=6)
    routed = room.routed
    prefill, decode = assigned(room)
    before = (routed.state, routed.attempt)
    for attempt in (routed.attempt - 1, routed.attempt + 1):
        for id in (RID, RequestId("nobody")):
            for instance in room.instances:
                for message in (
                    Reserved(id, attempt, 0),
                    Offer(id, attempt, PoolIncarnation(1), 0, (), 40, last=True),
                    Release(id, attempt),
                    Released(id, attempt, True),
                    Adopted(id, attempt, 40),
                ):
                    assert room.say(instance, message) == []
    others = [instance for instance in room.instances if instance not in (prefill, decode)]
    for instance in others:
        for message in (Reserved(RID, routed.attempt, 0), Adopted(RID, routed.attempt, 40), Release(RID, routed.attempt)):
            assert room.say(instance, message) == []
    if prefill is not None:
        for message in (Reserved(RID, routed.attempt, 0), Adopted(RID, routed.attempt, 40), Release(RID, routed.attempt)):
            assert room.say(prefill, message) == []
    for message in (Offer(RID, routed.attempt, PoolIncarnation(1), 0, (), 40, last=True), Released(RID, routed.attempt, True)):
        assert room.say(decode, message) == []
    assert (routed.state, routed.attempt) == before
    for instance in room.instances:
        instance.hold = ()
    room.wait(11)
    room.run()
    room.assert_right()


@pytest.mark.parametrize("phase", ["H2", "H2b", "H8"])
def test_row_20_repeated_answers_change_nothing(phase):
    room = at_phase(phase, max_tokens=6)
    routed = room.routed
    prefill, decode = assigned(room)
    state = routed.state
    assert room.say(decode, Reserved(RID, routed.attempt, 0)) == []
    if phase == "H8":
        for message in (Adopted(RID, routed.attempt, 40), Release(RID, routed.attempt)):
            assert room.say(decode, message) == []
    else:
        assert room.say(decode, Release(RID, routed.attempt)) == []
        assert room.say(prefill, Released(RID, routed.attempt, True)) == []
    assert routed.state is state
    assert room.router.stats.late_facts >= 1
    room.run()
    room.assert_right()


def test_decode_that_cannot_copy_computes_itself_and_prefill_is_told():
    room = at_phase("H2", max_tokens=6)
    prefill, decode = assigned(room)
    decode.assigned["r"].kind = "adopted"
    room.say(decode, Adopted(RID, 1, 0))
    assert not prefill.assigned
    room.run()
    room.assert_right()


def test_unless_it_was_to_tell_what_the_model_thought_of_the_prompt():
    room = at_phase("H2", sampling=SamplingParams(max_tokens=6, prompt_logprobs=1))
    _, decode = assigned(room)
    room.say(decode, Adopted(RID, 1, 0))
    assert room.routed.attempt == 2
    room.run()
    room.assert_right()


# What the model thought


def thought(value, prompt=()):
    sampled = None if value is None else TokenLogprob(value, -0.5, 1)
    return (RID, 0, RowLogprobs(0, 0, sampled, 1, tuple(TokenLogprob(each, -1.0, 1) for each in prompt)))


def test_a_thought_goes_with_its_token():
    room, decoder = serving()
    room.say(decoder, Emit([row(0, 5)], [], [thought(5)]))
    (effect,) = room.say(decoder, Emit([row(0, 5), row(1, 6)], [], [thought(5), thought(6)]))
    assert effect.emit.logprobs == [thought(6)]
    assert effect.emit.tokens == [row(1, 6)]


def test_the_prompt_is_told_until_its_first_token_and_not_after():
    sampling = SamplingParams(max_tokens=9, prompt_logprobs=1)
    room, decoder = serving(sampling=sampling)
    (first,) = room.say(decoder, Emit([], [], [thought(None, (1, 2))]))
    assert first.emit.logprobs
    (second,) = room.say(decoder, Emit([row(0, 5)], [], [thought(5, (3,))]))
    assert second.emit.logprobs == [thought(5, (3,))]
    assert room.say(decoder, Emit([], [], [thought(None, (1, 2))])) == []
    room.kill(decoder)
    room.settle()
    (other,) = [instance for instance in room.instances if instance.assigned]
    assert other.assigned["r"].request.sampling.prompt_logprobs is None


def test_a_prompt_that_was_not_told_in_full_is_asked_for_again():
    room, decoder = serving(sampling=SamplingParams(max_tokens=9, prompt_logprobs=1))
    room.say(decoder, Emit([], [], [thought(None, (1, 2))]))
    room.kill(decoder)
    (other,) = [instance for instance in room.instances if instance.assigned]
    assert other.assigned["r"].request.sampling.prompt_logprobs == 1


# Usage


def test_usage_of_a_hand_off_is_that_of_its_prefill():
    room = at_phase("H8", max_tokens=6, n=2)
    room.run()
    assert room.ends["r", 0].cached_tokens == 8
    assert room.ends["r", 1].cached_tokens == 0, "as its own instance says"


def test_what_a_replay_finds_cached_is_never_more_than_the_prompt():
    room, decoder = serving()
    room.say(decoder, Emit([row(0, 5)], []))
    room.kill(decoder)
    (other,) = [instance for instance in room.instances if instance.assigned]
    room.say(other, Emit([row(1, 6, attempt=2)], [Ended(RID, 0, FinishReason.STOP, 40, 41, 2, 0, attempt=2)]))
    assert room.ends["r", 0].cached_tokens == 39


@pytest.mark.parametrize("siblings", [False, True])
def test_first_token_ends_the_leader(siblings):
    """Its siblings go on, on another attempt."""

    prompt = tuple(range(1, 41))
    stop = token(prompt, 0, 0)
    room = Room("prefill", "decode")
    room.arrive(request(n=3 if siblings else 1, prompt=prompt, sampling=SamplingParams(max_tokens=4, stop_token_ids=(stop,))))
    room.run()
    assert room.ends["r", 0].reason is FinishReason.STOP
    assert room.told["r", 0] == [stop]
    if siblings:
        assert [len(room.told["r", index]) for index in (1, 2)] == [4, 4]
    assert room.router.stats.broken == 0


def test_who_breaks_a_leg_is_not_tried_again_at_once():
    room, decoder = serving()
    room.say(decoder, Emit([row(3, 7)], []))
    assert decoder.hello.name in room.routed.avoided


def test_what_no_instance_should_say_is_not_heard():
    room, decoder = serving()
    assert room.say(decoder, Prefill(request(), 1.0)) == []
    assert room.say(decoder, Ping(1)) == []
    assert room.router.stats.late_facts == 2


ANSWER = list(range(100, 112))


@settings(max_examples=settings.default.max_examples * 3 // 2, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4), max_size=6),
    st.booleans(),
)
def test_rows_with_several_tokens_are_passed_on_as_rows_with_one_each(plan, with_logprobs):
    """(sequence, how far before its next position the row begins, how many tokens): each position is delivered once."""

    def told(*, split):
        room, decoder = serving(n=2, max_tokens=50)
        at = [0, 0]
        for rows in plan:
            sent = []
            for index, back, count in rows:
                first = max(0, at[index] - back)
                tokens = ANSWER[first : first + count]
                if tokens:
                    at[index] = max(at[index], first + len(tokens))
                    sent.append((RID, 1, index, first, tokens))
            single = list(each_token(sent))
            thoughts = [(RID, row[2], RowLogprobs(0, 0, TokenLogprob(row[4], -float(row[3]), 1))) for row in single]
            rows_sent = [(*row[:4], row[4] if row[3] % 2 else [row[4]]) for row in single] if split else sent
            room.say(decoder, Emit(rows_sent, [], thoughts if with_logprobs else []))
        assert [room.told.get((RID, index), []) for index in (0, 1)] == [ANSWER[:end] for end in at]
        return [(index, row.sampled) for _, index, row in room.prompts]

    assert told(split=False) == told(split=True)


def test_what_was_cached_is_passed_on_with_the_first_token_only():
    room, decoder = serving()
    begun = Begun(RID, 1, 0, 16, 8, 0)
    (effect,) = room.say(decoder, Emit([row(0, 5)], [], begun=[begun]))
    assert effect.emit.begun == [begun]
    assert room.say(decoder, Emit([row(0, 5)], [], begun=[begun])) == []
    (effect,) = room.say(decoder, Emit([row(0, 5), row(1, 6)], [], begun=[begun]))
    assert effect == Deliver(Emit([row(1, 6)], []))


@pytest.mark.parametrize("beside", [False, True])
def test_tokens_of_an_instance_that_has_no_part_in_the_request_are_not_taken(beside):
    """With the right attempt and position, alone or beside tokens of its own requests."""
    room = Room("mixed", "mixed")
    room.arrive(request("r"))
    room.arrive(request("own", tokens=41))
    (stranger,) = [instance for instance in room.instances if "r" not in instance.assigned]
    rows = [("r", 1, 0, 0, [666])]
    room.say(stranger, Emit([("own", 1, 0, 0, [5]), *rows] if beside else rows, []))
    assert ("r", 0) not in room.told
    assert room.told.get(("own", 0)) == ([5] if beside else None)
    assert room.router.stats.stale_rows == 1
