"""An instance whose worker stands still while it beats on: its requests wait as long as a lapse, then go on elsewhere."""

from __future__ import annotations

import pytest

from baton.config import RouterConfig
from baton.core.cluster.events import RouterTick
from baton.core.cluster.handoff_table import RequestState
from baton.protocol.handoff import Forget
from baton.protocol.instance import Heartbeat
from baton.protocol.request import FinishReason

from .harness import Room, Scripted, hello, request
from .test_losses import STATES, assigned, at_phase, go_on


def stall(instance, *, stalled=True):
    instance.beat = lambda: Heartbeat(
        "no progress", 0.0, instance.hello.ready.blocks, instance.hello.ready.slots, stalled=stalled
    )
    instance.step = lambda: None


def mend(instance):
    del instance.beat, instance.step


def whole(*roles, config=None, **more):
    """A request that somebody answers, and who that is."""
    room = Room(*roles, config=config)
    room.arrive(request(max_tokens=20, **more))
    room.step(3)
    (decoder,) = [instance for instance in room.instances if instance.assigned]
    return room, decoder


def test_its_requests_are_moved_when_that_has_lasted_as_long_as_a_lapse():
    room, decoder = whole("mixed", "mixed")
    stall(decoder)
    room.wait(2.0)
    assert room.routed.decoder.session == decoder.session, "a step may take its time"
    room.wait(0.5)
    assert Forget("r", 1) in decoder.heard
    assert room.routed.attempt == 2
    assert room.routed.decoder.session != decoder.session
    room.run()
    room.assert_right()
    assert room.router.stats.moved == 1
    assert decoder.session not in room.hung_up, "it lives, and may be well again"


def test_a_worker_that_goes_on_in_time_keeps_its_requests():
    room, decoder = whole("mixed", "mixed")
    for _ in range(3):
        stall(decoder)
        room.wait(1.75)
        mend(decoder)
        room.wait(0.25)
    room.run()
    room.assert_right()
    assert room.router.stats.moved == 0
    assert room.router.stats.retries == 0


def test_a_worker_that_is_replaced_by_its_instance_keeps_its_requests():
    """Whoever killed it is found out there, and not on one instance after the other."""
    room, decoder = whole("mixed", "mixed")
    stall(decoder, stalled=False)
    room.wait(10)
    assert room.routed.decoder.session == decoder.session
    mend(decoder)
    room.run()
    room.assert_right()


def test_where_nobody_else_works_they_wait_until_somebody_does():
    room, decoder = whole("mixed")
    stall(decoder)
    room.wait(9)
    assert room.routed.decoder.session == decoder.session
    late = room.join(Scripted(hello("late")))
    room.wait(0.5)
    assert room.routed.decoder.session == late.session
    room.run()
    room.assert_right()


def test_one_that_others_cannot_hold_waits():
    room, decoder = whole("mixed")
    room.join(Scripted(hello("small", blocks=8)))
    stall(decoder)
    room.wait(9)
    assert room.routed.decoder.session == decoder.session
    mend(decoder)
    room.run()
    room.assert_right()


def test_when_all_stand_still_nobody_is_moved_and_no_deadline_is_left_behind():
    room, decoder = whole("mixed", "mixed")
    for instance in room.instances:
        stall(instance)
    room.wait(5)
    assert room.routed.decoder.session == decoder.session
    room.dispatch(RouterTick())
    deadline = room.router.next_deadline()
    assert deadline is not None
    assert deadline > room.now
    (other,) = [instance for instance in room.instances if instance is not decoder]
    mend(other)
    room.wait(0.5)
    assert room.routed.decoder.session == other.session


def test_each_move_is_a_loss_of_the_request():
    room, decoder = whole("mixed", "mixed", config=RouterConfig(migrations_max=1))
    stall(decoder)
    room.wait(3)
    mend(decoder)
    (second,) = [instance for instance in room.instances if instance.assigned]
    assert second is not decoder
    room.step()
    room.kill(second)
    assert room.broken_off == {"r": "worker_gone"}
    room.at_rest()


@pytest.mark.parametrize("moves", [0, 1])
def test_a_request_that_a_move_would_end_stays_and_is_answered(moves):
    """Its instance lives, and replaces the worker. Simulated clusters: seed 20200."""
    room, decoder = whole("mixed", "mixed", "mixed", config=RouterConfig(migrations_max=moves))
    for _ in range(moves):
        stall(decoder)
        room.wait(3)
        mend(decoder)
        (decoder,) = [instance for instance in room.instances if instance.assigned]
        room.step()
    stall(decoder)
    room.wait(30)
    assert room.routed.decoder.session == decoder.session
    assert not room.broken_off
    mend(decoder)
    room.run()
    room.assert_right()
    assert room.router.stats.moved == moves


def test_a_reservation_is_moved_though_no_loss_is_left_because_it_counts_as_none():
    config = RouterConfig(handoff_tokens_min=8, migrations_max=0, reserve_seconds_max=20.0)
    room = at_phase("H1", config=config, max_tokens=6)
    _, decode = assigned(room)
    stall(decode)
    for instance in room.instances:
        instance.hold = ()
    room.wait(2.5)
    assert room.router.stats.moved == 1
    assert room.routed.decoder.session != decode.session
    go_on(room)
    room.assert_right()


def test_what_may_have_stopped_two_workers_does_not_come_to_a_third():
    """And whoever was beside it is not broken off for it: its instance finds out which one it was."""
    room, decoder = whole("mixed", "mixed", "mixed")
    stall(decoder)
    room.wait(3)
    (second,) = [instance for instance in room.instances if instance.assigned]
    assert second is not decoder
    stall(second)  # before it has computed a token
    room.wait(30)
    assert room.routed.decoder.session == second.session
    assert room.router.stats.moved == 1
    mend(second)
    room.step()
    stall(second)  # that was another reason
    room.wait(3)
    (third,) = [instance for instance in room.instances if instance.assigned]
    assert third is not second
    room.run()
    room.assert_right()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_in_every_phase_of_a_hand_off(phase, who, n):
    room = at_phase(phase, n=n, max_tokens=6)
    prefill, decode = assigned(room)
    victim = prefill if who == "prefill" else decode
    if victim is None:
        return
    stall(victim)
    for instance in room.instances:
        if instance is not victim:
            instance.hold = ()
    go_on(room)
    room.assert_right()


def test_a_prompt_that_is_computed_is_released_by_a_worker_that_stands_still():
    room = at_phase("H5", max_tokens=6)
    prefill, _ = assigned(room)
    assert room.routed.state is RequestState.HANDING
    stall(prefill)
    room.wait(4)
    assert room.routed.attempt == 1
    go_on(room)
    room.assert_right()
    assert room.router.stats.moved == 0


def test_who_is_withdrawn_meanwhile_ends_once():
    room, decoder = whole("mixed", "mixed")
    stall(decoder)
    decoder.record_alive = lambda message: decoder.heard.append(message)
    room.wait(1.5)
    room.withdraw()
    room.wait(3)
    assert room.ends["r", 0].reason is FinishReason.ABORT
    assert room.router.idle
