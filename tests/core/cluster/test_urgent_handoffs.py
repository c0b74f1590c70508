"""An urgent hand-off does not wait behind less urgent work: it is sent where the decode instance can preempt for it."""

from __future__ import annotations

from baton.core.cluster.handoff_table import RequestState
from baton.protocol.handoff import Prefill, Reserve, Reserved
from baton.protocol.ids import RequestId
from baton.protocol.instance import Heartbeat

from .harness import NO_ROOM, Room, request


def sent(instance):
    return [message.request.id for message in instance.heard if isinstance(message, Reserve)]


def prefilled(instance):
    return [message.request.id for message in instance.heard if isinstance(message, Prefill)]


def ask(room, name, tokens=40, priority=0, first=0):
    """40 tokens need 11 blocks. Prompts share no prefix."""
    room.arrive(request(name, prompt=tuple(range(first, first + tokens)), priority=priority, max_tokens=8))
    room.settle()


def cluster():
    """A decode instance of 16 blocks that answers a request of 11 blocks."""
    room = Room("prefill", "decode", blocks=16)
    ask(room, "low", priority=5, first=100)
    room.step(4)
    assert room.router.coordinator.routed_requests[RequestId("low")].state is RequestState.SERVING
    return room


def test_an_urgent_hand_off_is_sent_where_less_urgent_work_can_be_preempted():
    room = cluster()
    prefill, decode = room.instances
    ask(room, "urgent", priority=-5)
    assert (sent(decode), prefilled(prefill)) == (["low", "urgent"], ["low", "urgent"])
    assert [message.wait_seconds > 0 for message in decode.heard if isinstance(message, Reserve)] == [True, True]
    room.run()
    room.assert_right("low")
    room.assert_right("urgent")


def test_an_equal_hand_off_waits_in_the_queue():
    room = cluster()
    ask(room, "equal", priority=5)
    assert sent(room.instances[1]) == ["low"]
    room.run()
    room.assert_right("equal")


def test_it_waits_in_the_queue_where_less_urgent_requests_hold_too_little():
    room = Room("prefill", "decode", blocks=16)
    _, decode = room.instances
    ask(room, "low", 20, 5, first=100)
    ask(room, "first", 20, -5, first=200)
    room.step(4)
    ask(room, "urgent", priority=-5)
    assert sent(decode) == ["low", "first"], "11 blocks are needed; 4 are free, and 6 are those of `low`"
    room.run()
    room.assert_right("urgent")


def test_less_urgent_work_of_another_router_can_be_preempted():
    """It was not counted: the urgent request waited until the other router left room."""
    room = Room("prefill", "decode", blocks=16)
    _, decode = room.instances
    full = Heartbeat(blocks_available=0, slots_free=4, held=((5, 10), (0, 6)))
    room.say(decode, full)
    ask(room, "most", priority=0)
    assert sent(decode) == [], "11 blocks are needed, and 10 are less urgent"
    ask(room, "urgent", priority=-5, first=100)
    assert sent(decode) == ["urgent"]
    room.run()
    for name in ("most", "urgent"):
        room.assert_right(name)


def test_a_heartbeat_with_less_urgent_work_than_before_is_tried_at_once():
    room = Room("prefill", "decode", blocks=16)
    _, decode = room.instances
    room.say(decode, Heartbeat(blocks_available=0, slots_free=4, held=((-5, 16),)))
    ask(room, "urgent", priority=-5)
    assert sent(decode) == []
    room.say(decode, Heartbeat(blocks_available=0, slots_free=4, held=((5, 16),)))
    assert sent(decode) == ["urgent"]
    room.run()
    room.assert_right("urgent")


def test_nothing_is_preempted_while_another_instance_has_room():
    room = Room("prefill", "decode", "decode", blocks=16)
    ask(room, "low", priority=5, first=100)
    room.step(4)
    (taken,) = [instance for instance in room.instances if sent(instance)]
    (free,) = [instance for instance in room.instances[1:] if instance is not taken]
    room.say(taken, Heartbeat(blocks_available=5, slots_free=7))
    room.say(free, Heartbeat(blocks_available=11, slots_free=7, waiting_tokens=10_000))
    ask(room, "urgent", priority=-5)
    assert (sent(taken), sent(free)) == (["low"], ["urgent"])
    room.run()


def test_where_another_instance_could_take_it_the_first_answers_at_once():
    room = Room("prefill", "decode", "decode", blocks=16)
    for number, name in enumerate(("a", "b")):
        ask(room, name, priority=5, first=100 * number + 100)
    room.step(4)
    ask(room, "urgent", priority=-5)
    waits = [
        m.wait_seconds for each in room.instances for m in each.heard if isinstance(m, Reserve) and m.request.id == "urgent"
    ]
    assert waits == [0.0]
    room.run()
    room.assert_right("urgent")


def test_refused_it_is_tried_again_after_a_heartbeat():
    room = cluster()
    _, decode = room.instances
    decode.refuse = NO_ROOM
    ask(room, "urgent", priority=-5)
    assert sent(decode) == ["low", "urgent"]
    assert room.router.coordinator.routed_requests[RequestId("urgent")].state is RequestState.QUEUED
    decode.refuse = None
    room.say(decode, Heartbeat(blocks_available=5, slots_free=7))
    room.settle()
    assert sent(decode) == ["low", "urgent", "urgent"]
    room.run()
    room.assert_right("urgent")


def test_one_at_a_time_waits_there_for_room():
    room = cluster()
    _, decode = room.instances
    member = room.router.membership.instances[decode.session]
    decode.hold = (Reserved,)
    ask(room, "a", 20, -5)
    ask(room, "b", 20, -5, first=50)
    assert sent(decode) == ["low", "a"]
    assert list(member.over_capacity) == ["a"]
    room.say(decode, Reserved(RequestId("a"), 1, 0))
    assert sent(decode) == ["low", "a", "b"]
    decode.hold = ()
    room.say(decode, Reserved(RequestId("b"), 1, 0))
    room.run()
    for name in ("low", "a", "b"):
        room.assert_right(name)


def test_a_reservation_that_has_its_room_waits_no_more():
    room = cluster()
    _, decode = room.instances
    member = room.router.membership.instances[decode.session]
    decode.hold = (Reserved,)
    ask(room, "urgent", priority=-5)
    assert list(member.over_capacity) == ["urgent"]
    decode.hold = ()
    room.say(decode, Reserved(RequestId("urgent"), 1, 0))
    assert not member.over_capacity
    room.run()


def test_a_request_that_has_left_is_not_counted_as_preemptible():
    room = cluster()
    member = room.router.membership.instances[room.instances[1].session]
    assert (member.placed.less_urgent(4), member.placed.less_urgent(5)) == (11, 0)
    assert room.router.membership.roster.placed.less_urgent(4) == 11
    room.run()
    assert member.placed.less_urgent(-9) == room.router.membership.roster.placed.less_urgent(-9) == 0
