"""Reservations that wait for room at a decode instance: the most urgent goes first, each within its time."""

from random import Random
from typing import Any

import pytest

from baton.core.effects import Refuse
from baton.core.events import Abort, Submit
from baton.protocol.handoff import Forget, Offer, PeerOffer, Released, Reserve, Reserved
from baton.protocol.ids import PoolIncarnation, RequestId

from ..engine.harness import make_request, undisturbed
from .test_handoff_destination import Decoder

WAIT = 1.0


def tokens(number: int, length: int = 14) -> tuple[int, ...]:
    return tuple(range(20 * number, 20 * number + length))


class Asked(Decoder):
    """A decode instance that routers ask for room; a request of 14 tokens needs 4 blocks."""

    def reserve(self, name: str, number: int, wait: float = WAIT, length: int = 14, **given: Any) -> None:
        self.dispatch(Reserve(make_request(name, tokens(number, length), **({"max_tokens": 6} | given)), 10.0, wait))

    def reserved(self) -> list[str]:
        return [message.request for message in self.take(Reserved)]

    def forget(self, name: str) -> None:
        self.dispatch(Forget(RequestId(name), 1))


def full(**settings: Any) -> Asked:
    """All blocks are those of request `held`, which is more urgent than any other."""
    node = Asked(**({"blocks": 5} | settings))
    node.reserve("held", 0, priority=-9)
    assert node.reserved() == ["held"]
    return node


def test_without_room_a_reservation_waits_and_gets_the_room_that_becomes_free():
    node = full()
    node.reserve("a", 1)
    assert not node.said
    node.advance(0.5)
    node.forget("held")
    (reserved,) = node.take(Reserved)
    assert (reserved.request, reserved.waited_seconds) == ("a", pytest.approx(0.5))
    assert not node.instance.board.awaiting


def test_a_router_that_does_not_wait_is_refused_at_once():
    node = full()
    node.reserve("a", 1, wait=0.0)
    assert node.refusals() == ["no_room"]


def test_after_its_time_it_is_refused_with_the_numbers():
    node = full()
    node.reserve("a", 1)
    node.advance(WAIT + 0.01)
    (refuse,) = node.take(Refuse)
    assert (refuse.refused.reason, refuse.refused.needed, refuse.refused.limit) == ("no_room", 4, 1)
    assert not node.instance.board.awaiting
    node.reserve("a", 1)
    assert node.refusals() == ["duplicate_id"], "that attempt has ended"


def test_an_urgent_reservation_goes_first():
    node = full(order="priority")
    node.reserve("late", 1, priority=5)
    node.reserve("urgent", 2, priority=-5)
    node.reserve("old", 3, priority=5, age_seconds=9.0)
    node.forget("held")
    assert node.reserved() == ["urgent"]
    node.forget("urgent")
    assert node.reserved() == ["old"]
    node.forget("old")
    assert node.reserved() == ["late"]


def test_a_small_reservation_does_not_overtake_a_large_one():
    """Two routers: without the order the small requests of one keep the room from the large one of the other for ever."""
    node = full(blocks=7)
    node.reserve("large", 1, length=22)
    node.reserve("small", 2, length=3)
    node.reserve("no patience", 3, wait=0.0, length=3)
    assert not node.reserved()
    assert node.refusals() == ["no_room"]
    node.forget("held")
    assert node.reserved() == ["large", "small"]


def test_a_later_request_of_the_queue_leaves_the_room_to_an_earlier_reservation():
    node = Asked(blocks=8, slots=2)
    node.dispatch(Submit(make_request("runs", tokens(0), max_tokens=6)))
    node.step()
    node.reserve("a", 1, length=22)
    node.dispatch(Submit(make_request("later", tokens(2, 5), max_tokens=2)))
    node.step()
    running = [sequence.request.id for sequence in node.instance.view.running()]
    assert running == ["runs"], "there are blocks for it, and the reservation waits for them"
    while not (granted := node.reserved()):
        node.step()
    assert granted == ["a"]


def test_too_many_that_wait_the_least_urgent_is_refused():
    node = full(order="priority", reservations_waiting_max=2)
    for number, (name, priority) in enumerate({"b": 1, "c": 3, "a": -1}.items(), 1):
        node.reserve(name, number, priority=priority)
    assert [(refuse.request, refuse.refused.reason) for refuse in node.take(Refuse)] == [("c", "no_room")]
    assert [sequence.request.id for sequence in node.instance.board.awaiting] == ["a", "b"]


def test_one_that_is_given_up_leaves_the_queue():
    for give_up in (Forget(RequestId("a"), 1), Abort(RequestId("a"))):
        node = full()
        node.reserve("a", 1)
        node.reserve("b", 2)
        node.dispatch(give_up)
        node.said.clear()
        node.forget("held")
        assert node.reserved() == ["b"]


def test_a_repeated_message_neither_answers_nor_extends_the_wait():
    node = full()
    node.reserve("a", 1)
    node.advance(0.6)
    node.reserve("a", 1)
    assert not node.said
    node.advance(0.5)
    assert node.refusals() == ["no_room"]


def test_what_is_for_a_copy_changes_nothing_for_one_that_waits():
    node = full()
    node.reserve("a", 1)
    offer = Offer(RequestId("a"), 1, PoolIncarnation(7), 0, (), 14, last=True)
    node.dispatch(PeerOffer(offer, ("peer",), (1,)))
    node.dispatch(Released(RequestId("a"), 1, kept=False))
    assert not node.said
    node.forget("held")
    assert node.reserved() == ["a"]


def test_heartbeats_do_not_offer_the_room_that_is_waited_for():
    node = full(blocks=9)
    assert node.instance.view.blocks_available == 5
    node.reserve("a", 1, length=22)
    assert node.instance.view.blocks_available == 0
    node.forget("a")
    assert node.instance.view.blocks_available == 5


class SortedList:
    """The oracle: those that wait, sorted. The first gets room, also that of less urgent leases if it is enough."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks
        self.waiting: list[tuple[int, int, int, str, int]] = []
        self.granted: list[tuple[int, int, int, str, int]] = []

    def grant(self) -> list[str]:
        before = len(self.granted)
        names = []
        while self.waiting:
            first = min(self.waiting)
            less = sorted(each for each in self.granted if each[0] > first[0])
            if first[4] > self.free + sum(each[4] for each in less):
                break
            while first[4] > self.free:
                self.granted.remove(least := less.pop())
                self.free += least[4]
            self.waiting.remove(first)
            self.granted.append(first)
            self.free -= first[4]
            names.append(first[3])
        assert before <= len(self.granted) or names
        return names


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_requests_is_served_as_a_sorted_list(seed: int):
    rng = Random(seed)
    blocks = 5 + rng.randrange(4)
    node, oracle = full(blocks=blocks, order="priority"), SortedList(blocks - 4)
    for number in range(1, 8):
        name, length = f"r{number}", rng.choice((2, 6, 14))
        priority, age = rng.randrange(3), rng.randrange(50)
        oracle.waiting.append((priority, -age, number, name, length // 4 + 1))
        node.reserve(name, number, length=length, priority=priority, age_seconds=float(age))
        assert node.reserved() == oracle.grant()
    node.forget("held")
    oracle.free += 4
    assert node.reserved() == oracle.grant()


# A reservation that is more urgent than what runs


def busy(**settings: Any) -> Asked:
    """Two answers run, the later one of lower urgency; 3 of 12 blocks are free."""
    node = Asked(**({"blocks": 12, "slots": 4} | settings))
    node.submit("old", tokens(0, 15), max_tokens=6, priority=5)
    node.submit("young", tokens(1, 15), max_tokens=6, priority=6)
    node.step(3)
    assert [len(sequence.blocks) for sequence in node.instance.board.running] == [5, 5]
    return node


def running(node: Asked) -> list[str]:
    return [sequence.request.id for sequence in node.instance.board.running]


@pytest.mark.parametrize("wait", [0.0, WAIT])
def test_an_urgent_reservation_preempts_what_is_less_urgent(wait: float):
    node = busy()
    node.reserve("urgent", 2, wait, priority=-5)
    assert node.reserved() == ["urgent"]
    assert not node.refusals()
    assert running(node) == ["old"], "as few as suffice, the least urgent first"
    node.forget("urgent")
    node.run()
    answered(node, "old", "young")
    assert {end.request: end.preemptions for end in node.ends()} == {"old": 0, "young": 1}


def answered(node: Asked, *names: str) -> None:
    """Each has the tokens of an undisturbed run."""
    for name in names:
        assert node.outputs(name) == undisturbed(node.requests[name], 0)


def test_a_reservation_of_equal_urgency_preempts_nothing():
    node = busy()
    node.reserve("equal", 2, priority=6)
    assert not node.reserved()
    assert running(node) == ["old", "young"]
    node.reserve("at once", 3, 0.0, priority=6)
    assert node.refusals() == ["no_room"]


def test_no_sequence_is_preempted_for_a_reservation_that_does_not_fit_all_the_same():
    node = busy()
    node.reserve("urgent", 2, 0.0, length=30, priority=5)
    assert node.refusals() == ["no_room"]
    node.reserve("waits", 3, length=30, priority=5)
    assert running(node) == ["old", "young"]
    assert not node.reserved()


def test_a_waiting_reservation_preempts_when_what_was_as_urgent_has_ended():
    node = Asked(blocks=12, slots=4)
    node.submit("equal", tokens(0, 15), max_tokens=3, priority=-5)
    node.submit("low", tokens(1, 15), max_tokens=12, priority=5)
    node.step(1)
    node.reserve("urgent", 2, length=38, priority=-5)
    assert running(node) == ["equal", "low"], "`low` alone does not have enough"
    while not (granted := node.reserved()):
        node.step()
    assert granted == ["urgent"]
    assert [end.request for end in node.ends()] == ["equal"], "`low` is preempted, and has not ended"
    node.forget("urgent")
    node.run()
    answered(node, "equal", "low")


def test_a_lease_goes_before_a_running_sequence():
    node = busy(blocks=16)
    node.reserve("low", 2, priority=7)
    node.reserve("urgent", 3, priority=-5)
    assert node.reserved() == ["low", "urgent"]
    assert running(node) == ["old", "young"]
    assert [sequence.request.id for sequence in node.instance.board.leased] == ["urgent"]


def test_the_preempted_do_not_take_the_room_back():
    """A circle would be endless: the preempted sequence is behind the reservation, before and after its prompt has arrived."""
    node = busy()
    node.reserve("urgent", 2, priority=-5)
    node.run()
    assert node.reserved() == ["urgent"]
    assert [end.request for end in node.ends()] == ["old", "young"]
    assert [sequence.request.id for sequence in node.instance.board.leased] == ["urgent"]
    assert node.instance.stats.preemptions == 1


def test_the_copy_waits_for_the_last_plan_that_writes_to_the_blocks():
    node = busy()
    last = node.history[-1].step
    node.reserve("urgent", 2, priority=-5)
    (lease,) = node.instance.board.leased
    assert lease.load is not None
    assert lease.load.fence == last
