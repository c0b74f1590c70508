"""An instance that was told to stop drains: nothing new goes there, what ends in time is not moved, the rest goes on elsewhere
and nobody counts that as a loss."""

from __future__ import annotations

import pytest

from baton.config import RouterConfig
from baton.protocol.control import InstanceStats
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateRequest

from .harness import Room, Scripted, hello, request
from .test_losses import STATES, assigned, at_phase, go_on


def drain(room, instance):
    room.say(instance, InstanceStats(mode="draining"))


def end_all(room, instance):
    """Its time is over: it ends what it has, as core/instance.py does."""
    for leg in [leg for leg in instance.assigned.values() if leg.kind != "kept"]:
        room.say(instance, Emit([], [instance._end(leg, index, FinishReason.ABORT) for index in list(leg.outputs)]))


def test_it_gets_nothing_new_and_what_ends_in_time_stays():
    room = Room("mixed", "mixed")
    room.arrive(request("first", max_tokens=8))
    room.step()
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    (other,) = [instance for instance in room.instances if instance is not decoder]
    drain(room, decoder)
    for number in range(4):
        room.arrive(request(f"later{number}", prompt=(number,) * 20))
    assert len(other.assigned) == 4
    room.run()
    for name in ("first", "later0", "later1", "later2", "later3"):
        room.assert_right(name)
    assert [message.id for message in decoder.heard if isinstance(message, GenerateRequest)] == ["first"]
    assert room.router.stats.retries == 0


@pytest.mark.parametrize("n", [1, 3])
def test_what_does_not_end_in_time_goes_on_elsewhere_and_is_no_loss(n):
    room = Room("mixed", "mixed", config=RouterConfig(migrations_max=0))
    room.arrive(request(max_tokens=12, n=n))
    room.step(3)
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    drain(room, decoder)
    room.step(2)
    end_all(room, decoder)
    room.kill(decoder)
    room.run()
    room.assert_right()
    assert room.router.stats.left == 1
    assert room.router.stats.broken == 0


def test_one_after_the_other_is_restarted_and_a_long_answer_outlives_them_all():
    room = Room("mixed", "mixed", config=RouterConfig(migrations_max=1))
    room.arrive(request(max_tokens=40))
    for _ in range(6):
        room.step(3)
        (decoder,) = [instance for instance in room.live.values() if instance.assigned]
        drain(room, decoder)
        end_all(room, decoder)
        room.kill(decoder)
        room.wait(0.5)
        room.restart(decoder)
        room.wait(1)
    room.run(100)
    room.assert_right()


def leaving_at(phase, who):
    """A hand-off one of whose instances has been told to stop. None: it has nothing to do with it at that time."""
    room = at_phase(phase, max_tokens=6)
    prefill, decode = assigned(room)
    leaving = prefill if who == "prefill" else decode
    if leaving is not None:
        drain(room, leaving)
    for instance in room.instances:
        instance.hold = ()
    return room, leaving


@pytest.mark.parametrize("phase", ["H2", "H2b", "H3", "H8"])
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_hand_off_that_was_begun_finishes(phase, who):
    room, _ = leaving_at(phase, who)
    go_on(room)
    room.assert_right()
    assert room.router.stats.retries == 0


@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_a_hand_off_that_does_not_finish_in_time_is_begun_anew(phase, who):
    room, leaving = leaving_at(phase, who)
    if leaving is not None:
        end_all(room, leaving)
        assert (room.routed.losses, room.router.stats.broken) == (0, 0)
        room.kill(leaving)
    go_on(room)
    room.assert_right()


def test_an_abort_that_nobody_asked_for_is_a_fault_of_one_that_serves():
    room = Room("mixed", "mixed", config=RouterConfig(migrations_max=0))
    room.arrive(request(max_tokens=12))
    room.step(3)
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    end_all(room, decoder)
    assert room.broken_off == {"r": "worker_gone"}


def test_where_nobody_else_is_left_it_waits_for_somebody():
    room = Room("mixed")
    (only,) = room.instances
    room.arrive(request(max_tokens=12))
    room.step(3)
    drain(room, only)
    end_all(room, only)
    room.kill(only)
    room.wait(5)
    assert not room.broken_off
    room.join(Scripted(hello("late")))
    room.run()
    room.assert_right()
