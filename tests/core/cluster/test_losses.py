"""Each loss that a router can see: same output, or one clean error. The number in a test's
name is the row."""

from __future__ import annotations

import pytest

from baton.config import RouterConfig
from baton.core.cluster.events import InstanceLeft, InstanceMessage
from baton.core.cluster.handoff_table import RequestState
from baton.protocol.control import InstanceStats, RefusedRequest
from baton.protocol.handoff import Adopted, Forget, Offer, Release, Released, Reserved
from baton.protocol.output import Emit
from baton.protocol.repetition import RepetitionStop
from baton.protocol.request import FinishReason, Refused, SamplingParams

from .harness import NO_ROOM, Room, Scripted, hello, request, token

ROLES = ("prefill", "prefill", "decode", "decode")


def assigned(room):
    """(the prefill instance, the decode instance) that have something of it."""
    by_session = {instance.session: instance for instance in room.instances}
    routed = room.routed
    prefill = None if routed.prefill is None else by_session[routed.prefill.session]
    return prefill, by_session[routed.decoder.session]


def at_phase(phase, roles=ROLES, config=None, **more):
    """A room in which the one request is in a phase of the hand-off."""
    room = Room(*roles, config=config)
    for instance in room.instances:
        instance.hold = {"H1": (Reserved,), "H5": (Release,), "H6": (Released,), "H7": (Adopted,)}.get(phase, ())
    room.arrive(request(**more))
    room.settle()
    steps = {"H1": 0, "H2": 0, "H2b": 1, "H3": 2, "H5": 2, "H6": 2, "H7": 2, "H8": 4}[phase]
    if phase == "H3":
        room.step()
        prefill, _ = assigned(room)
        prefill.step()
        room.say(prefill, prefill.out.popleft())  # the token, and not yet the last offer
    else:
        room.step(steps)
    return room


STATES = {
    "H1": RequestState.RESERVING,
    "H2": RequestState.PREFILLING,
    "H2b": RequestState.PREFILLING,
    "H3": RequestState.PREFILLING,
    "H5": RequestState.HANDING,
    "H6": RequestState.HANDING,
    "H7": RequestState.HANDING,
    "H8": RequestState.SERVING,
}


def go_on(room):
    for instance in room.instances:
        instance.hold = ()
    room.wait(1)
    room.run()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
@pytest.mark.parametrize("death", ["kill", "silence"])
def test_rows_1_to_9_12_16_either_side_dies_in_each_phase(phase, who, death, n):
    room = at_phase(phase, n=n, max_tokens=6)
    assert room.routed.state is STATES[phase]
    attempt = room.routed.attempt
    prefill, decode = assigned(room)
    victims = [each for each in {"prefill": [prefill], "decode": [decode], "both": [prefill, decode]}[who] if each]
    if death == "kill":
        for victim in victims:
            room.kill(victim)
    else:
        for instance in room.instances:
            if instance not in victims:
                instance.hold = ()
        room.wait(2.5, silent=victims)
        assert all(victim.session in room.hung_up for victim in victims)
    go_on(room)
    room.assert_right()
    if who == "decode" and phase in ("H2", "H2b", "H3", "H5", "H6"):
        assert Forget("r", attempt) in prefill.heard, "who survives is told to forget"
    if who == "prefill" and phase in ("H1", "H2", "H2b", "H3"):
        assert Forget("r", attempt) in decode.heard


@pytest.mark.parametrize("phase", ["H5", "H6"])
def test_row_4_prefill_lost_after_the_last_offer_costs_no_new_attempt(phase):
    room = at_phase(phase)
    prefill, decode = assigned(room)
    room.kill(prefill)
    assert isinstance(decode.heard[-1], Released)
    assert not decode.heard[-1].kept
    go_on(room)
    room.assert_right()
    assert room.router.stats.retries == 0


def test_row_5_prefill_lost_after_its_release_changes_nothing():
    room = at_phase("H7")
    prefill = room.instances[0] if room.instances[0].heard else room.instances[1]
    heard = [list(instance.heard) for instance in room.instances]
    room.kill(prefill)
    assert [list(instance.heard) for instance in room.instances] == heard
    assert room.routed.state is RequestState.HANDING
    _, decode = assigned(room)
    room.say(decode, Adopted(room.routed.id, room.routed.attempt, 40))
    room.run()
    room.assert_right()
    assert room.router.stats.retries == 0


def test_row_9_decode_lost_after_some_tokens_is_replayed_with_all_of_them():
    room = at_phase("H8", n=2, max_tokens=8)
    _, decode = assigned(room)
    told = {index: list(room.told["r", index]) for index in (0, 1)}
    assert len(told[0]) >= 2
    room.kill(decode)
    go_on(room)
    replays = [
        message.request
        for each in room.instances
        for message in each.heard
        if hasattr(message, "lease_seconds") and message.request.attempt == 2
    ]
    assert [list(output) for output in replays[0].outputs] == [told[0], told[1]]
    room.assert_right()


def test_row_9_a_replay_keeps_its_age_and_loses_its_time():
    room = Room("mixed", "mixed")
    room.arrive(request(max_tokens=30, timeout_seconds=50.0))
    room.wait(5)
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    room.kill(decoder)
    room.wait(1)
    (other,) = [instance for instance in room.instances if instance.assigned]
    (leg,) = other.assigned.values()
    assert leg.request.age_seconds == pytest.approx(5, abs=1)
    assert leg.request.timeout_seconds == pytest.approx(45, abs=1)


@pytest.mark.parametrize("stop", [False, True])
def test_row_10_the_end_alone_was_lost(stop):
    """All tokens were told. No instance is needed to know how it ended."""
    prompt = tuple(range(1, 41))
    ids = (token(prompt, 0, 2),) if stop else ()
    room = Room("mixed")
    (only,) = room.instances
    room.arrive(request(prompt=prompt, sampling=SamplingParams(max_tokens=3, stop_token_ids=ids)))
    room.step(2)
    only.step()
    (emit,) = only.out
    only.out.clear()
    room.say(only, Emit(emit.tokens, []))
    room.kill(only)
    assert room.ends["r", 0].reason is (FinishReason.STOP if stop else FinishReason.LENGTH)
    assert room.ends["r", 0].output_tokens == 3
    room.at_rest()


def test_row_10_the_end_of_a_repetition_alone_was_lost():
    """The router decides it from the tokens, as an instance does."""
    room = Room("mixed")
    (only,) = room.instances
    rule = RepetitionStop(pattern_max=2, count_min=2, tokens_min=0)
    room.arrive(request(sampling=SamplingParams(max_tokens=30, repetition_stop=rule)))
    room.settle()
    room.say(only, Emit([("r", 1, 0, 0, [7, 4, 9, 4, 9])], []))
    room.kill(only)
    assert room.ends["r", 0].reason is FinishReason.REPETITION
    assert room.ends["r", 0].output_tokens == 5
    room.at_rest()


def test_row_12_nobody_is_left_and_nothing_was_told():
    room = at_phase("H2", roles=("prefill", "decode"))
    for instance in list(room.instances):
        room.kill(instance)
    room.wait(11)
    assert room.turned_away["r"].reason == "worker_gone"
    room.at_rest()


def test_row_12_nobody_is_left_and_something_was_told():
    room = at_phase("H8", roles=("prefill", "decode"), max_tokens=20)
    for instance in list(room.instances):
        room.kill(instance)
    room.wait(9)
    assert not room.broken_off
    room.wait(2)
    assert room.broken_off == {"r": "worker_gone"}
    room.at_rest()


def test_row_12_somebody_comes_in_time():
    room = at_phase("H8", roles=("prefill", "decode"), max_tokens=20)
    for instance in list(room.instances):
        room.kill(instance)
    room.wait(9)
    room.join(Scripted(hello("late", "decode")))
    room.run()
    room.assert_right()


def test_row_13_an_instance_that_dies_again_and_again_fails_what_it_had_at_last_and_nothing_else():
    room = Room("mixed", config=RouterConfig(migrations_max=3))
    (crashing,) = room.instances
    room.arrive(request("unlucky", max_tokens=50))
    for _ in range(4):
        room.wait(9)
        room.step()
        assert not room.broken_off
        room.kill(crashing)
        crashing = room.restart(crashing)
    assert room.broken_off == {"unlucky": "worker_gone"}
    room.arrive(request("other"))
    room.wait(9)
    room.run()
    room.assert_right("other")


def test_row_14_poison_is_passed_on_and_never_tried_elsewhere():
    room = Room("mixed", "mixed")
    room.arrive(request())
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    decoder.fail("r", "poison")
    room.settle()
    assert room.ends["r", 0].error == "poison"
    assert not any(instance.assigned for instance in room.instances)
    room.at_rest()


def test_ends_that_say_so_are_retried_elsewhere():
    room = Room("mixed", "mixed")
    room.arrive(request(n=3))
    room.step()
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    decoder.fail("r", "worker_gone")
    room.settle()
    assert not decoder.assigned, "not at once at the same one"
    room.run()
    room.assert_right()


def test_an_abort_that_nobody_asked_for_is_retried_elsewhere():
    """A drain that took too long ends what is left."""
    room = Room("mixed", "mixed")
    room.arrive(request())
    room.step()
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    leg = decoder.assigned["r"]
    decoder.out.append(Emit([], [decoder._end(leg, 0, FinishReason.ABORT)]))
    room.settle()
    room.run()
    room.assert_right()


def test_row_16_a_frozen_instance_wakes_and_nothing_it_says_counts():
    room = at_phase("H8", max_tokens=12)
    _, frozen = assigned(room)
    session = frozen.session
    room.wait(2.5, silent=[frozen])
    assert session in room.hung_up
    for _ in range(3):
        frozen.step()
    for message in frozen.out:
        assert room.dispatch(InstanceMessage(session, message)) == []
    room.run()
    room.assert_right()


def test_row_17_a_restarted_instance_is_another_one():
    room = at_phase("H8", roles=("prefill", "decode"), max_tokens=12)
    _, decode = assigned(room)
    session = decode.session
    decode.step()
    late = list(decode.out)
    room.kill(decode)
    room.restart(decode)
    for message in late:
        room.dispatch(InstanceMessage(session, message))
    room.run()
    room.assert_right()


def test_migrations_are_counted_and_refusals_are_not():
    room = Room("prefill", "decode", "decode", config=RouterConfig(handoff_tokens_min=8, migrations_max=0))
    for instance in room.instances[1:]:
        instance.refuse = NO_ROOM
    room.arrive(request())
    room.settle()
    room.wait(5)
    assert not room.broken_off
    for instance in room.instances:
        instance.refuse = None
    room.run()
    room.assert_right()


def test_first_offer_decides_usage():
    """A second prefill finds what the first has computed: that was not cached when the request came."""
    room = at_phase("H8", max_tokens=6)
    _, decode = assigned(room)
    assert room.routed.usage == (8, 0, 0)
    room.routed.usage = (4, 1, 1)
    room.kill(decode)
    go_on(room)
    room.assert_right()
    ended = room.ends["r", 0]
    assert (ended.cached_tokens, ended.host_tokens, ended.storage_tokens) == (4, 1, 1)
    assert ended.output_tokens == 6


def test_an_offer_before_its_token_breaks_the_leg():
    room = at_phase("H2b")
    prefill, _ = assigned(room)
    prefill.step()
    _, offer = prefill.out
    assert isinstance(offer, Offer)
    prefill.out.clear()
    room.say(prefill, offer)
    assert room.router.stats.broken == 1
    go_on(room)
    room.assert_right()


# What is counted


@pytest.mark.parametrize(
    ("phase", "who", "outcome"),
    [("H2", "prefill", "prefill_lost"), ("H5", "decode", "decode_lost"), ("H8", "decode", "adopted")],
)
def test_hand_offs_are_counted_by_what_became_of_them(phase, who, outcome):
    room = at_phase(phase, max_tokens=6)
    prefill, decode = assigned(room)
    room.kill(prefill if who == "prefill" else decode)
    assert room.router.stats.handoff_ends[outcome] == 1
    assert sum(room.router.stats.handoff_ends.values()) == 1
    assert room.router.stats.losses["session_over"] == 1


def test_refusals_and_ends_of_hand_offs_are_counted_too():
    room = at_phase("H1", max_tokens=6)
    _, decode = assigned(room)
    decode.hold = ()
    decode.assigned.clear()
    room.say(decode, RefusedRequest("r", NO_ROOM, room.routed.attempt))
    assert room.router.stats.handoff_ends["refused"] == 1
    room.withdraw()
    assert sum(room.router.stats.handoff_ends.values()) <= 2
    room = at_phase("H2", max_tokens=6)
    room.withdraw()
    assert room.router.stats.handoff_ends["closed"] == 1


def test_losses_are_counted_by_how():
    room = Room("mixed", "mixed", "mixed", "mixed")
    first, second, third, fourth = room.instances
    room.kill(first)
    room.wait(3, silent=[second])
    room.say(third, InstanceStats(mode="draining"))
    room.kill(third)
    room.join(Scripted(fourth.hello))
    again = room.join(Scripted(hello("again")))
    room.dispatch(InstanceLeft(again.session, "other weights", reloaded=True))
    counted = {how: count for how, count in room.router.stats.losses.items() if count}
    assert counted == {"session_over": 1, "silent": 1, "left": 1, "joined_again": 1}
    assert room.router.stats.instances_lost == 4


# The only instance that is large enough


def large_and_small():
    room = Room(config=RouterConfig(migrations_max=3))
    large = room.join(Scripted(hello("large", blocks=60)))
    room.join(Scripted(hello("small", blocks=10)))
    room.arrive(request("running", tokens=80, max_tokens=60))
    room.step(3)
    assert large.assigned
    return room, large


def test_a_restart_of_the_only_large_instance_breaks_nothing_off():
    room, large = large_and_small()
    room.kill(large)
    room.arrive(request("newcomer", prompt=(7,) * 100))
    room.arrive(request("short", tokens=8))
    assert not room.broken_off
    assert not room.turned_away
    room.wait(0.6)
    room.restart(large)
    room.run(120)
    for name in ("running", "newcomer", "short"):
        room.assert_right(name)
    assert not room.broken_off
    assert not room.turned_away


def test_a_large_instance_that_does_not_come_back_is_not_waited_for_for_ever():
    room, large = large_and_small()
    room.kill(large)
    room.arrive(request("newcomer", prompt=(7,) * 100))
    room.wait(9)
    assert not room.broken_off
    assert not room.turned_away
    room.wait(2)
    assert room.broken_off == {"running": "worker_gone"}
    assert room.turned_away == {"newcomer": Refused("worker_gone")}
    room.arrive(request("later", prompt=(7,) * 100))
    assert room.turned_away["later"].reason == "never_fits"
