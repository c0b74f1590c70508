"""Front and routers' sessions beside each other in one engine: equal ids and numbers, and what is left when one goes."""

from __future__ import annotations

from typing import Any

from baton.core.effects import Refuse
from baton.core.events import Abort, CallerLeft, HoldPause, Pause, Submit
from baton.protocol.control import (
    AbortRequest,
    OrderAnswer,
    PauseInstance,
    Ping,
    Pong,
    RefusedRequest,
    ResumeInstance,
    WakeInstance,
)
from baton.protocol.handoff import Forget, Offer, PeerOffer, Reserve, Reserved
from baton.protocol.ids import BlockId, PoolIncarnation, RequestId
from baton.protocol.output import Emit, Ended
from baton.protocol.request import FinishReason, GenerateRequest, Refused
from baton.protocol.step import RowLogprobs
from baton.runtime.engine import callers as module
from baton.runtime.engine.callers import Callers

R = RequestId("r")
REQUEST = GenerateRequest(id=R, prompt=(1, 2))


class FakeEngine:
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.pings: list[int] = []
        self.open: list[RequestId] = []

    def dispatch(self, event: Any) -> None:
        self.events.append(event)

    def ping(self, number: int) -> None:
        self.pings.append(number)

    def wake(self, number: int, model: str) -> None:
        self.events.append((number, model))

    def open_requests(self) -> list[RequestId]:
        return self.open


def two() -> tuple[FakeEngine, Callers, list[Any], list[Any], Any, Any]:
    engine, one, other = FakeEngine(), [], []
    callers = Callers(engine)
    return engine, callers, one, other, callers.add(one.append), callers.add(other.append)


def ended(request: str) -> Ended:
    return Ended(RequestId(request), 0, FinishReason.LENGTH, 2, 0, 1, 0)


def test_a_front_alone_uses_ids_as_they_are():
    engine, told = FakeEngine(), []
    callers = Callers(engine)
    front = callers.add(told.append, alone=True)
    callers.on_message(front, REQUEST)
    assert engine.events == [Submit(REQUEST)]
    emit = Emit([(R, 1, 0, 0, [5])], [ended("r")])
    callers.emit(emit)
    callers.refuse(Refuse(R, Refused("paused"), 3))
    assert told[0] is emit, "nothing is copied"
    assert told[1] == RefusedRequest(R, Refused("paused"), 3)


def test_equal_ids_are_other_requests_and_each_hears_of_its_own():
    engine, callers, one, other, first, second = two()
    for caller in (first, second):
        callers.on_message(caller, REQUEST)
    ours, others = (event.request.id for event in engine.events)
    assert ours != others
    thought = RowLogprobs(0, [], None)
    thoughts = [(ours, 0, thought), (others, 0, thought), (ours, 1, thought)]
    callers.emit(Emit([(ours, 1, 0, 0, [5]), (others, 1, 0, 0, [6]), (ours, 1, 0, 1, [7])], [ended(others)], thoughts))
    assert one == [Emit([(R, 1, 0, 0, [5]), (R, 1, 0, 1, [7])], [], [(R, 0, thought), (R, 1, thought)])]
    assert other == [Emit([(R, 1, 0, 0, [6])], [ended("r")], [(R, 0, thought)])]
    callers.on_message(first, AbortRequest(R, 0, FinishReason.STOP))
    assert engine.events[-1] == Abort(ours, 0, FinishReason.STOP)


def test_ids_of_hand_offs_are_translated_wherever_they_are():
    engine, callers, one, other, _, second = two()
    offer = Offer(R, 1, PoolIncarnation(9), 0, (BlockId(3),), 2)
    for message in (Reserve(REQUEST, 5.0), PeerOffer(offer, ("unix:/x",)), Forget(R, 1)):
        callers.on_message(second, message)
    expect, peer_offer, forget = engine.events
    assert expect.request.id == peer_offer.offer.request == forget.request != R
    callers.forward(Reserved(forget.request, 1, 0))
    assert (one, other) == ([], [Reserved(R, 1, 0)])


def test_what_a_caller_that_is_gone_asked_for_is_aborted_and_nobody_hears_of_it():
    engine, callers, one, other, first, second = two()
    callers.on_message(first, REQUEST)
    callers.on_message(second, REQUEST)
    engine.open = [event.request.id for event in engine.events]
    callers.on_message(first, PauseInstance(7))
    callers.on_message(first, Ping(7))
    callers.remove(first)
    assert engine.events[-2:] == [Abort(engine.open[0]), CallerLeft(first.tag)]
    assert Abort(engine.open[1]) not in engine.events
    callers.emit(Emit([], [ended(request) for request in engine.open]))
    callers.refuse(Refuse(engine.open[0], Refused("paused")))
    callers.answer(OrderAnswer(1, "done"))
    callers.answer(Pong(1))
    assert one == []
    assert other == [Emit([], [ended("r")])]
    callers.remove(first)  # twice is harmless
    assert callers.add(one.append).tag not in (first.tag, second.tag)


def test_a_pause_for_a_longer_order_and_a_wake_are_held_by_their_caller():
    engine, callers, _, _, first, second = two()
    callers.on_message(first, PauseInstance(1, None, True))
    assert engine.events == [Pause(None, 1), HoldPause(first.tag)]
    engine.events.clear()
    callers.on_message(second, PauseInstance(1))
    assert engine.events == [Pause(None, 2)], "it lasts until a resume"
    engine.events.clear()
    callers.on_message(second, WakeInstance(2, "/other"))
    assert engine.events == [HoldPause(second.tag), (3, "/other")]


def test_equal_numbers_are_other_orders():
    engine, callers, one, other, first, second = two()
    for caller in (first, second):
        callers.on_message(caller, PauseInstance(7, 1.0))
    numbers = [event.number for event in engine.events if type(event) is Pause]
    assert len(set(numbers)) == 2
    assert callers.caller_of_order(numbers[1]) is second
    callers.answer(OrderAnswer(numbers[1], "done"))
    callers.answer(OrderAnswer(numbers[1], "done"))
    assert (one, other) == ([], [OrderAnswer(7, "done")])


def test_what_is_not_answered_is_bounded(monkeypatch):
    """A worker that is stopped answers no ping, for hours. Then it is replaced, and nothing is left of them."""
    monkeypatch.setattr(module, "UNANSWERED_MAX", 3)
    engine, callers, one, _, first, _ = two()
    for number in range(5):
        callers.on_message(first, Ping(number))
        callers.on_message(first, PauseInstance(number))
    assert len(engine.pings) == 3
    assert [message.number for message in one if type(message) is Pong and message.fault] == [3, 4]
    assert [message.outcome for message in one if type(message) is OrderAnswer] == ["refused", "refused"]
    callers.answer_pings("lost")
    assert sorted(message.number for message in one if type(message) is Pong) == [0, 1, 2, 3, 4]
    callers.on_message(first, Ping(9))
    assert len(engine.pings) == 4


def test_a_beat_names_requests_of_its_router_only():
    callers = Callers(FakeEngine())
    first, second = callers.add(lambda message: None), callers.add(lambda message: None)
    ours = (first.ours(R), second.ours(RequestId("s")), second.ours(R))
    assert first.own_ids(ours) == (R,)
    assert second.own_ids(ours) == (RequestId("s"), R)


def test_an_instance_that_is_ending_is_not_resumed():
    """It would take requests until its deadline, and then drop all of them."""
    engine, callers, one, _, first, _ = two()
    callers.leaving = lambda: True
    callers.on_message(first, ResumeInstance(7))
    assert engine.events == []
    (answer,) = one
    assert (answer.number, answer.outcome) == (7, "done")
    assert "ending" in answer.detail
    callers.leaving = lambda: False
    callers.on_message(first, ResumeInstance(8))
    assert len(engine.events) == 1
