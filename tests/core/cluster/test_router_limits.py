"""What is turned away, what waits, in what order, and for how long."""

from __future__ import annotations

import pytest

from baton.config import RouterConfig
from baton.core.cluster.alarms import Alarms
from baton.core.cluster.events import RouterTick, StopAdmission
from baton.core.cluster.handoff_table import RequestState
from baton.core.cluster.routed_request import RoutedRequest
from baton.protocol.control import InstanceStats
from baton.protocol.handoff import Adopted, Offer, Prefill, Reserve, Reserved
from baton.protocol.ids import Instant, RequestId
from baton.protocol.instance import Heartbeat
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, Refused, SamplingParams

from .harness import NO_ROOM, Room, Scripted, hello, request
from .test_losses import assigned, at_phase


def reason(room, id="r"):
    return room.turned_away[id].reason


# Turned away


def test_queue_full_in_sequences():
    room = Room(config=RouterConfig(queue_requests_max=4))
    room.arrive(request("a", n=3))
    room.arrive(request("b", n=2))
    assert room.turned_away == {"b": Refused("queue_full", 5, 4)}
    room.arrive(request("c"))
    assert room.router.queued == 4
    room.arrive(request("d", n=5))
    assert reason(room, "d") == "never_queued"


def test_queue_full_in_tokens():
    room = Room(config=RouterConfig(queue_tokens_max=100))
    room.arrive(request("a", tokens=60))
    room.arrive(request("b", tokens=60))
    assert room.turned_away == {"b": Refused("queue_tokens_full", 120, 100)}
    room.arrive(request("c", tokens=101))
    assert reason(room, "c") == "never_queued"


def test_retry_after_is_what_others_waited_lately():
    room = Room(config=RouterConfig(queue_requests_max=1, no_instance_seconds=60.0))
    room.arrive(request("a"))
    (away,) = room.arrive(request("b"))
    assert away.retry_seconds == 1.0
    room.wait(40)
    room.join(Scripted(hello("m")))
    assert 1.0 < room.router.coordinator.retry_seconds(Refused("queue_full")) <= 60.0


def test_open_requests_are_bounded():
    room = Room(config=RouterConfig(requests_open_max=2))
    for name in "abc":
        room.arrive(request(name))
    assert room.turned_away == {"c": Refused("queue_full", 3, 2)}


def test_duplicate():
    room = Room("mixed")
    room.arrive(request())
    room.arrive(request())
    assert reason(room) == "duplicate_id"
    room.turned_away.clear()
    room.run()
    room.assert_right()


def test_closed_door_lets_those_inside_finish():
    room = Room("mixed")
    room.arrive(request("inside"))
    room.dispatch(StopAdmission())
    room.arrive(request("outside"))
    assert reason(room, "outside") == "draining"
    room.run()
    room.assert_right("inside")


@pytest.mark.parametrize(("mode", "word"), [("paused", "paused"), ("draining", "draining")])
def test_all_are_paused(mode, word):
    room = Room("mixed", "mixed")
    for instance in room.instances:
        room.say(instance, InstanceStats(mode=mode))
    room.arrive(request())
    assert reason(room) == word


def test_those_in_line_wait_for_the_end_of_a_pause():
    room = Room("mixed", slots=1, config=RouterConfig(waiting_prompts_max=0))
    (only,) = room.instances
    room.arrive(request("a"))
    room.arrive(request("b"))
    room.say(only, InstanceStats(mode="draining"))
    for _ in range(6):
        room.step()
    room.say(only, InstanceStats(mode="paused"))
    room.wait(60)
    assert not room.turned_away
    room.say(only, InstanceStats(mode="serving"))
    room.run()
    room.assert_right("b")


def test_never_fits_any():
    room = Room("mixed", blocks=10)
    room.arrive(request(tokens=40, max_tokens=2))
    assert room.turned_away == {"r": Refused("never_fits", 11, 10)}


def test_never_fits_the_context_of_any():
    room = Room("mixed", context_tokens=40)
    room.arrive(request(tokens=40, max_tokens=2))
    assert room.turned_away == {"r": Refused("never_fits", 11, 10)}


def test_goes_where_it_fits():
    room = Room("mixed", blocks=10)
    large = room.join(Scripted(hello("large", blocks=50)))
    for number in range(3):
        room.arrive(request(f"r{number}", tokens=60))
    assert len(large.assigned) == 3
    room.run()


def test_those_that_came_before_the_first_instance_are_turned_away_if_they_never_fit():
    room = Room()
    room.arrive(request(tokens=400))
    room.join(Scripted(hello("small", blocks=10)))
    assert reason(room) == "never_fits"
    room.at_rest()


def test_instances_that_say_never_are_not_asked_again_and_the_last_one_decides():
    room = Room("mixed", "mixed")
    refused = Refused("never_planned", 9, 8)
    for instance in room.instances:
        instance.refuse = refused
    room.arrive(request())
    room.settle()
    assert room.turned_away == {"r": refused}
    assert [len(instance.heard) for instance in room.instances] == [1, 1]
    room.at_rest()


def test_no_instance_at_all():
    room = Room()
    room.arrive(request())
    room.wait(9.5)
    assert not room.turned_away
    room.wait(1)
    assert reason(room) == "worker_gone"
    room.at_rest()


def test_nobody_works_although_some_are_there():
    room = Room("mixed")
    (only,) = room.instances
    only.beat = lambda: Heartbeat(fault="broken")
    room.wait(0.25)
    room.arrive(request())
    room.wait(10.5)
    assert reason(room) == "worker_gone"


def test_no_room_for_ever_ends_too():
    room = Room("mixed", slots=1, config=RouterConfig(queue_seconds_max=20.0, waiting_prompts_max=0))
    room.arrive(request("a", max_tokens=200, tokens=10))
    room.arrive(request("b"))
    room.wait(21)
    assert room.turned_away == {"b": Refused("queued_too_long", 20, 20)}
    assert str(room.turned_away["b"]) == "the request waited 20 s for an instance with room (limit 20 s)"


# Deadlines


def test_timeout_in_line():
    room = Room()
    room.arrive(request(timeout_seconds=3.0))
    room.wait(3.25)
    assert room.ends["r", 0].reason is FinishReason.TIMEOUT
    assert room.ends["r", 0].output_tokens == 0
    room.at_rest()


@pytest.mark.parametrize("phase", ["H1", "H2", "H2b", "H5", "H6", "H8"])
def test_timeout_in_each_phase(phase):
    room = at_phase(phase, n=2, max_tokens=60, timeout_seconds=4.0)
    room.wait(1.5)
    assert not room.ends
    room.wait(3)
    assert {ended.reason for ended in room.ends.values()} == {FinishReason.TIMEOUT}
    assert len(room.ends) == 2
    room.at_rest()


def test_an_instance_may_say_first_that_time_is_over():
    room = Room("mixed")
    (only,) = room.instances
    room.arrive(request(timeout_seconds=4.0))
    leg = only.assigned["r"]
    only.out.append(Emit([], [only._end(leg, 0, FinishReason.TIMEOUT)]))
    room.settle()
    assert room.ends["r", 0].reason is FinishReason.TIMEOUT
    room.at_rest()


def test_a_timeout_that_an_instance_calls_an_abort_is_told_as_a_timeout():
    """Instances know no other word for a withdrawal (runtime/engine/callers.py). Found by the rehearsal."""
    routed = RoutedRequest(request(timeout_seconds=4.0), (0, 0.0, 1), Instant(0.0))
    routed.withdrawn[0] = FinishReason.TIMEOUT
    told = routed.end_as_reported(Ended(RequestId("r"), 0, FinishReason.ABORT, len(routed.request.prompt), 0, 0, 0))
    assert told.reason is FinishReason.TIMEOUT


@pytest.mark.parametrize(
    ("phase", "hold", "seconds"),
    [("H1", (Reserved,), 2.5), ("H2", (Offer, Emit), 6.5), ("H5", (Adopted,), 4.5), ("H8", (Emit,), 10.5)],
)
def test_every_state_lapses_and_another_attempt_is_made(phase, hold, seconds):
    config = RouterConfig(
        handoff_tokens_min=8, prefill_seconds_max=6.0, handing_seconds_max=4.0, silence_seconds_max=5.0, lease_seconds=20.0
    )
    room = at_phase(phase, config=config, max_tokens=6)
    silent = [each for each in assigned(room) if each is not None]
    for instance in silent:
        instance.hold = (*hold, *instance.hold)
    room.wait(seconds)
    assert room.router.stats.broken == 1
    for instance in room.instances:
        instance.hold = ()
    room.run()
    room.assert_right()


def test_a_long_answer_is_no_silence():
    room = Room("mixed", config=RouterConfig(silence_seconds_max=5.0))
    room.arrive(request(max_tokens=20))
    for _ in range(20):
        room.step()
        room.wait(2)
    assert room.router.stats.broken == 0
    room.assert_right()


def test_tokens_that_make_up_for_an_ended_sequence_are_no_silence():
    """Found by a review: the sum over open sequences was compared, and the end of one hid the tokens of the other."""
    room = Room("mixed", config=RouterConfig(silence_seconds_max=5.0))
    room.arrive(request(max_tokens=40, n=2))
    room.step(5)
    room.wait(6)
    mark = room.routed.delivered_tokens
    room.withdraw(index=1, reason=FinishReason.STOP)
    room.step()
    while room.routed.delivered_tokens < mark:
        room.step()
    assert (len(room.routed.open), room.routed.delivered_tokens) == (1, mark)
    room.wait(5)
    assert room.router.stats.broken == 0
    room.run()
    assert {index: end.reason for (_, index), end in room.ends.items()} == {0: FinishReason.LENGTH, 1: FinishReason.STOP}
    assert len(room.told["r", 0]) == 40


def test_a_long_prefill_renews_the_lease_at_decode():
    room = at_phase("H2")
    _, decode = assigned(room)
    room.wait(21)
    expects = [message for message in decode.heard if isinstance(message, Reserve)]
    assert len(expects) == 1 + 4
    assert {(expect.request.attempt, expect.lease_seconds) for expect in expects} == {(1, 10.0)}
    room.run()
    room.assert_right()


def test_a_tick_too_early_changes_nothing():
    room = at_phase("H2")
    assert room.dispatch(RouterTick()) == []


# Refusals of instances


def test_refused_reservation_tries_the_next_decode_instance():
    room = Room("prefill", "decode", "decode")
    _, first, second = room.instances
    first.refuse = second.refuse = NO_ROOM
    room.arrive(request())
    room.settle()
    assert len(first.heard) == len(second.heard) == 1, "each once, until it says more of its room"
    assert room.routed.state is RequestState.QUEUED
    second.refuse = None
    room.wait(0.25)
    room.run()
    room.assert_right()
    assert not any(isinstance(message, Prefill) for message in room.instances[0].heard[1:]), "computed once"


def test_a_prompt_is_never_computed_for_nobody():
    room = Room("prefill", "decode")
    prefill, decode = room.instances
    decode.refuse = NO_ROOM
    room.arrive(request())
    room.wait(3)
    assert prefill.heard == []
    assert len(decode.heard) <= 14, "once a beat"


@pytest.mark.parametrize("word", ["draining", "paused", "worker_gone"])
def test_one_that_takes_nothing_now_is_left_alone_for_a_while(word):
    room = Room("mixed", "mixed")
    first, _ = room.instances
    first.refuse = Refused(word)
    for number in range(4):
        room.arrive(request(f"r{number}", prompt=(number,) * 20))
        room.settle()
    assert len(first.heard) == 1
    room.run()
    for number in range(4):
        room.assert_right(f"r{number}")


def test_refused_by_the_only_one_waits_and_is_tried_again():
    room = Room("mixed")
    (only,) = room.instances
    only.refuse = Refused("duplicate_id")
    room.arrive(request())
    room.settle()
    assert len(only.heard) == 1
    room.wait(0.25)
    assert len(only.heard) == 1, "not at once"
    only.refuse = None
    room.run()
    room.assert_right()


def test_prefill_refuses_and_decode_is_told():
    room = Room("prefill", "prefill", "decode")
    first, second, _ = room.instances
    first.refuse = second.refuse = Refused("draining")
    room.arrive(request())
    room.settle()
    first.refuse = second.refuse = None
    room.wait(1)
    room.run()
    room.assert_right()


# Order


def test_order_is_priority_then_arrival_and_a_replay_keeps_its_place():
    room = Room("mixed", slots=1, config=RouterConfig(waiting_prompts_max=0))
    (only,) = room.instances
    room.arrive(request("running"))
    for name, priority in (("late", 5), ("normal", 0), ("second", 0), ("urgent", -5)):
        room.arrive(request(name, priority=priority))
    room.kill(only)
    fresh = room.restart(only)
    order = []
    for _ in range(100):
        room.wait(0.3)
        order += [id for id in fresh.assigned if id not in order]
        room.step()
        if room.router.idle:
            break
    assert order == ["urgent", "running", "normal", "second", "late"]


def test_order_by_arrival_alone():
    room = Room(config=RouterConfig(order="arrival"))
    for name, priority in (("a", 5), ("b", -5)):
        room.arrive(request(name, priority=priority))
    assert min(room.router.coordinator.queue.routed_requests(), key=lambda routed: routed.order).id == "a"


def test_nobody_overtakes_one_that_waits_for_room():
    room = Room("mixed", blocks=20, config=RouterConfig(waiting_prompts_max=0))
    (only,) = room.instances
    only.beat = lambda: Heartbeat(blocks_available=8 if only.assigned else 20, slots_free=7)
    room.arrive(request("running", tokens=40))
    room.wait(0.25)
    room.arrive(request("large", prompt=(7,) * 60))
    for number in range(3):
        room.arrive(request(f"small{number}", tokens=4))
    assert list(only.assigned) == ["running"]
    room.step(5)
    assert next(iter(only.assigned)) == "large"
    room.run()


def test_who_waits_for_a_prefill_instance_does_not_hold_up_who_needs_none():
    room = Room("prefill", "decode", blocks=400)
    _, decode = room.instances
    for number in range(5):
        room.arrive(request(f"long{number}", prompt=(number,) * 40))
    room.arrive(request("short", tokens=4))
    assert "short" in decode.assigned
    room.run()


def test_a_prefill_instance_has_at_most_one_waiting_prompt():
    room = Room("prefill", "decode", blocks=400)
    prefill, _ = room.instances
    for number in range(8):
        room.arrive(request(f"r{number}", prompt=(number,) * 40))
    for _ in range(40):
        room.settle()
        (member, _) = room.router.membership.instances.values()
        assert member.prompts <= 2
        assert sum(leg.kind == "prefill" for leg in prefill.assigned.values()) <= 2
        if room.router.idle:
            break
        room.step()
        room.wait(0.25)
    room.at_rest()
    assert room.router.stats.handoffs == 8


def test_an_instance_is_sent_what_it_can_begin_and_one_more():
    room = Room("mixed", slots=3)
    (only,) = room.instances
    for number in range(8):
        room.arrive(request(f"r{number}", tokens=8))
    assert len(only.assigned) == 4
    room.wait(2)
    assert len(only.assigned) == 4
    room.run()
    for number in range(8):
        room.assert_right(f"r{number}")


def test_who_is_more_urgent_need_not_wait_behind_who_waits_there():
    room = Room("mixed", slots=1)
    (only,) = room.instances
    room.arrive(request("runs"))
    room.arrive(request("waits"))
    room.arrive(request("queued"))
    room.arrive(request("urgent", priority=-1))
    assert list(only.assigned) == ["runs", "waits", "urgent"]
    room.run()


def test_an_answer_that_was_unread_while_the_router_stood_still_is_in_time():
    room = at_phase("H1")
    _, decode = assigned(room)
    room.now += 60
    for instance in room.instances:
        room.say(instance, instance.beat())
    room.say(decode, Reserved("r", 1, 0))
    room.dispatch(RouterTick())
    assert room.routed.state is RequestState.PREFILLING
    assert room.router.stats.broken == 0


def test_an_alarm_that_was_put_off_does_not_end_the_later_one():
    """A stale entry of the heap is for nobody."""
    room = Room("mixed", config=RouterConfig(silence_seconds_max=20.0))
    room.arrive(request(timeout_seconds=5.0, max_tokens=30))
    room.withdraw(index=7)
    room.step()
    room.wait(4)
    assert not room.ends
    room.wait(1.25)
    assert room.ends["r", 0].reason is FinishReason.TIMEOUT
    room.at_rest()


def test_answers_to_renewals_are_no_progress_of_the_prefill():
    config = RouterConfig(handoff_tokens_min=8, lease_seconds=2.0, prefill_seconds_max=6.0)
    room = at_phase("H2", config=config)
    prefill, _ = assigned(room)
    room.wait(6.5)
    assert room.router.stats.broken == 1
    assert prefill.hello.name in room.routed.avoided
    room.run()
    room.assert_right()


def test_a_replay_begins_to_wait_anew():
    config = RouterConfig(queue_seconds_max=20.0, no_instance_seconds=60.0)
    room = Room("mixed", config=config)
    (only,) = room.instances
    room.arrive(request(max_tokens=9))
    room.step()
    room.wait(30)
    room.kill(only)
    room.wait(15)
    assert not room.broken_off
    room.restart(only)
    room.run()
    room.assert_right()


def test_who_was_told_an_end_is_not_turned_away():
    """No token, but one sequence has ended: that is an answer, and it breaks off."""
    room = Room()
    room.arrive(request(n=2))
    room.withdraw(index=1)
    room.wait(10.5)
    assert not room.turned_away
    assert room.broken_off == {"r": "worker_gone"}
    room.at_rest()


def test_an_alarm_that_was_put_off_is_due_when_it_was_put_off_to():
    alarms, routed = Alarms(), RoutedRequest(request(), (0, 0.0, 0), 0.0)
    alarms.set(routed, 5.0)
    alarms.set(routed, 10.0)
    assert alarms.due(6.0) == []
    assert alarms.next_deadline() == 10.0
    assert alarms.due(10.0) == [routed]
    assert alarms.armed == 0


def test_a_sequence_that_ends_is_no_silence_of_the_others():
    """The tokens of the sequences that are open are as many as before: one has ended, the other has got as many more."""
    room = Room("mixed", config=RouterConfig(silence_seconds_max=20.0), blocks=400)
    (only,) = room.instances
    sampling = SamplingParams(max_tokens=200, stop_token_ids=())
    room.arrive(request(n=2, sampling=sampling))
    room.step(10)
    room.wait(21)  # looked at: 10 + 10 tokens
    leg = only.assigned["r"]
    only._say(Emit([], [only._end(leg, 1, FinishReason.ABORT)]))
    room.router.coordinator.routed_requests["r"].withdrawn[1] = FinishReason.ABORT
    room.settle()
    room.step(10)
    room.wait(21)  # looked at: 20 tokens
    assert room.router.stats.broken == 0
