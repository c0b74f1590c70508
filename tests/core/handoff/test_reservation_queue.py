"""Reservations that wait for room at a decode instance: the most urgent goes first, each within its time."""

from random import Random
from typing import Any

import pytest

from baton.core.effects import Refuse
from baton.core.events import Abort, Submit
from baton.protocol.handoff import Forget, Offer, PeerOffer, Released, Reserve, Reserved
from baton.protocol.ids import PoolIncarnation, RequestId

from ..engine.harness import make_request
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
    """All blocks are those of request `held`."""
    node = Asked(**({"blocks": 5} | settings))
    node.reserve("held", 0)
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


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_requests_is_served_as_a_sorted_list(seed: int):
    """The oracle: a list sorted by priority and age, of which the first that fit get room when the holder leaves."""
    rng = Random(seed)
    node = full(blocks=5 + rng.randrange(4), order="priority")
    lengths = {}
    for number in range(1, 8):
        name, length = f"r{number}", rng.choice((2, 6, 14))
        order = (rng.randrange(3), -rng.randrange(50))
        lengths[name] = (order[0], order[1], number, length // 4 + 1)
        node.reserve(name, number, length=length, priority=order[0], age_seconds=float(-order[1]))
    early = node.reserved()
    node.forget("held")
    free = node.pool.total - sum(lengths[name][3] for name in early)
    waiting = sorted((name for name in lengths if name not in early), key=lengths.__getitem__)
    wanted = []
    for name in waiting:
        if lengths[name][3] > free:
            break
        free -= lengths[name][3]
        wanted.append(name)
    assert node.reserved() == wanted
