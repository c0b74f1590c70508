"""Who is chosen: sort keys over candidates, hand over or stay, and what an instance is believed to have."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from baton.config import RouterConfig
from baton.core.cluster.events import RouterTick
from baton.errors import InvalidConfig
from baton.protocol.handoff import Prefill, Reserve
from baton.protocol.instance import Heartbeat
from baton.protocol.request import GenerateRequest, SamplingParams

from .harness import Room, Scripted, hello, request


def whole(instance):
    return [message.id for message in instance.heard if isinstance(message, GenerateRequest)]


def expected(instance):
    return [message.request.id for message in instance.heard if isinstance(message, Reserve)]


def prefilled(instance):
    return [message.request.id for message in instance.heard if isinstance(message, Prefill)]


# Policies


def test_prefix_goes_where_it_is_cached_and_new_ones_where_nothing_waits():
    room = Room("mixed", "mixed", "mixed", blocks=400)
    for number in range(3):
        room.arrive(request(f"a{number}", prompt=(number,) * 80, max_tokens=1))
        room.run()
    for number in range(3):
        room.arrive(request(f"b{number}", prompt=(*(number,) * 80, 5), max_tokens=1))
        room.run()
    decoders = [whole(instance) for instance in room.instances]
    assert sorted(decoders) == [["a0", "b0"], ["a1", "b1"], ["a2", "b2"]]


def test_prefix_does_not_pile_up_on_one():
    """What waits there weighs as much as what is cached."""
    room = Room("mixed", "mixed", blocks=4000, slots=64)
    for number in range(20):
        room.arrive(request(f"r{number}", prompt=(*range(100), number)))
    counts = [len(instance.assigned) for instance in room.instances]
    assert min(counts) > 0


def test_what_was_answered_is_part_of_the_next_prompt():
    room = Room("mixed", "mixed", blocks=400)
    first = request("first", tokens=40, max_tokens=40)
    room.arrive(first)
    room.run()
    (decoder,) = [instance for instance in room.instances if instance.heard]
    follow = (*first.prompt, *room.told["first", 0], 1, 2, 3)
    (member,) = [member for member in room.router.membership.instances.values() if member.session == decoder.session]
    room.arrive(request("second", prompt=follow))
    assert "second" in decoder.assigned
    assert room.router.membership.index.depth(member.number, room.routed.marks) == 16, "of 19 blocks, the last mark"
    room.run()


def test_tenants_share_nothing():
    room = Room("mixed", blocks=400)
    room.arrive(request("a", salt=b"one"))
    room.arrive(request("b", salt=b"two"))
    first, second = room.router.coordinator.routed_requests.values()
    assert set(first.keys).isdisjoint(second.keys)
    assert len(first.keys) == 10
    room.run()


def test_load_is_in_tokens():
    room = Room("mixed", "mixed", config=RouterConfig(policy="load"), blocks=4000, slots=64)
    first, second = room.instances
    room.arrive(request("long", prompt=(1,) * 400))
    for number in range(4):
        room.arrive(request(f"short{number}", prompt=(number,) * 40))
    assert {len(first.assigned), len(second.assigned)} == {1, 4}


# Hand over or stay


def test_short_prompts_stay_on_decode_and_long_ones_are_handed_over():
    room = Room("prefill", "decode")
    prefill, decode = room.instances
    room.arrive(request("short", tokens=7))
    room.arrive(request("long", prompt=(9,) * 8))
    room.run()
    assert (whole(decode), expected(decode), prefilled(prefill)) == (["short"], ["long"], ["long"])


def test_what_is_cached_on_decode_stays_there():
    room = Room("prefill", "decode", blocks=400)
    _, decode = room.instances
    room.arrive(request("a", tokens=64))
    room.run()
    room.arrive(request("b", prompt=(*range(1, 65), 3, 4, 5)))
    room.run()
    assert (whole(decode), expected(decode)) == (["b"], ["a"])


def test_stays_where_computing_is_cheaper_than_the_measured_hand_off():
    room = Room("prefill", "decode", blocks=400)
    _, decode = room.instances
    room.say(decode, Heartbeat(token_seconds=0.0001, blocks_available=400, slots_free=8))
    room.arrive(request("cheap", prompt=(1,) * 100))
    room.say(decode, Heartbeat(token_seconds=0.01, blocks_available=400, slots_free=8))
    room.arrive(request("dear", prompt=(2,) * 100))
    assert (whole(decode), expected(decode)) == (["cheap"], ["dear"])
    room.run()


def test_the_cost_of_a_hand_off_is_learned():
    room = Room("prefill", "decode", blocks=400)
    before = room.router.handoff_seconds
    for number in range(5):
        room.arrive(request(f"r{number}", prompt=(number,) * 40))
        room.run()
    assert room.router.handoff_seconds < before, "no time passed"


def test_one_token_is_all_prefill_is_for():
    room = Room("prefill", "decode")
    prefill, decode = room.instances
    room.arrive(request("one", max_tokens=1))
    room.arrive(request("several", max_tokens=1, n=3))
    room.arrive(request("two", max_tokens=2))
    room.run()
    assert whole(prefill) == ["one", "several"]
    assert expected(decode) == ["two"]


def test_one_token_left_after_a_loss():
    room = Room("prefill", "decode", "decode")
    room.arrive(request(max_tokens=4))
    while len(room.told.get(("r", 0), [])) < 3:
        room.step()
    (decoder,) = [instance for instance in room.instances if any(leg.kind == "adopted" for leg in instance.assigned.values())]
    room.kill(decoder)
    room.run()
    room.assert_right()
    assert whole(room.instances[0]) == ["r"]


def test_decode_is_asked_only_for_what_it_lacks_the_prompt_logprobs_of():
    room = Room("prefill", "decode")
    prefill, decode = room.instances
    room.arrive(request(sampling=SamplingParams(max_tokens=4, prompt_logprobs=2, min_tokens=3, seed=9)))
    room.settle()
    (expect,) = [message.request for message in decode.heard]
    (prompt,) = [message.request for message in prefill.heard]
    assert expect.sampling.prompt_logprobs is None
    assert prompt.sampling.prompt_logprobs == 2
    assert (prompt.sampling.max_tokens, prompt.sampling.min_tokens, prompt.sampling.seed) == (1, 3, 9)
    assert prompt.indices == (0,)


# A role is a preference


def test_degrades_and_recovers():
    room = Room("prefill", "decode")
    prefill, decode = room.instances
    room.kill(prefill)
    room.arrive(request("a"))
    room.run()
    assert whole(decode) == ["a"]
    prefill = room.restart(prefill)
    room.kill(decode)
    room.arrive(request("b"))
    room.run()
    assert whole(prefill) == ["b"]
    decode = room.restart(decode)
    room.arrive(request("c"))
    room.run()
    assert expected(decode) == ["c"]


def test_prefill_that_nobody_can_read_from_is_not_part_of_a_pair():

    room = Room("decode")
    (decode,) = room.instances
    closed = room.join(Scripted(replace(hello("closed", "prefill"), peers=())))
    room.arrive(request())
    room.run()
    assert whole(decode) == ["r"]
    assert not closed.heard


def test_mixed_takes_over_when_prefill_instances_are_busy():
    room = Room("prefill", "decode", "mixed", blocks=400)
    for number in range(6):
        room.arrive(request(f"r{number}", prompt=(number,) * 40))
    assert room.instances[2].assigned
    room.run()
    for number in range(6):
        room.assert_right(f"r{number}")


# What is remembered


def test_a_new_life_of_an_instance_has_nothing_cached():
    room = Room("mixed", "mixed")
    room.arrive(request("a"))
    room.run()
    (decoder,) = [instance for instance in room.instances if instance.heard]
    room.kill(decoder)
    room.restart(decoder)
    assert room.router.membership.index.count(room.router.membership.names[decoder.hello.name].number) == 0


# Settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"suspect_seconds": 2.0},
        {"beat_seconds": 1.0},
        {"beat_seconds": 0.1, "suspect_seconds": 0.2},
        {"beat_seconds": 0.001},
        {"policy": "best"},
        {"queue_requests_max": 0},
        {"lease_seconds": 0.0},
    ],
)
def test_settings_that_make_no_sense(wrong):
    with pytest.raises(InvalidConfig):
        RouterConfig(**wrong)


def test_a_small_prefill_instance_computes_prompts_of_long_answers():
    """It need not hold the answer."""
    room = Room("decode", blocks=100)
    small = room.join(Scripted(hello("small", "prefill", blocks=12)))
    room.arrive(request("fits", tokens=40, max_tokens=40))
    room.run()
    assert prefilled(small) == ["fits"]
    room.arrive(request("long", prompt=(7,) * 60))
    room.run()
    assert prefilled(small) == ["fits"]
    room.assert_right("long")


# Preemption


def lost_after(preempted, *, seconds=0.0, policy="prefix"):
    """A request whose home, where its prompt is cached, has lost it. Both instances may have it again: who does?"""
    room = Room("mixed", "mixed", config=RouterConfig(policy=policy, again_seconds=0.01, preempted_seconds=3.0), blocks=400)
    room.arrive(request(tokens=80, max_tokens=30))
    room.step(2)
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    (other,) = [instance for instance in room.instances if instance is not decoder]
    room.say(decoder, replace(decoder.beat(), preempted=("r", "unknown") if preempted else ()))
    room.wait(seconds)
    other.beat = lambda: Heartbeat(fault="not now")
    room.say(other, other.beat())
    decoder.fail("r")
    room.settle()
    assert room.routed.decoder is None or room.routed.decoder.session == decoder.session
    del other.beat
    room.now += 0.02
    room.say(other, other.beat())
    return room, decoder, other


@pytest.mark.parametrize("policy", ["prefix", "load"])
def test_whoever_preempted_a_request_is_its_last_choice(policy):
    room, _, other = lost_after(preempted=True, policy=policy)
    assert room.routed.decoder.session == other.session
    room.run()
    room.assert_right()


def test_otherwise_it_goes_where_it_is_cached():
    room, decoder, _ = lost_after(preempted=False)
    assert room.routed.decoder.session == decoder.session


def test_a_preemption_is_forgotten_after_a_while():
    room, decoder, _ = lost_after(preempted=True, seconds=4.0)
    assert room.routed.decoder.session == decoder.session


def test_whoever_preempted_it_gets_it_again_where_nobody_else_can_have_it():
    room = Room("mixed", config=RouterConfig(again_seconds=0.01))
    (only,) = room.instances
    room.arrive(request())
    room.step()
    room.say(only, replace(only.beat(), preempted=("r",)))
    only.fail("r")
    room.settle()
    room.now += 0.02
    room.dispatch(RouterTick())
    assert room.routed.decoder.session == only.session
    room.run()
    room.assert_right()
