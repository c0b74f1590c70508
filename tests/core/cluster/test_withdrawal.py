"""A client that wants no more, in every state: one end, told once, and nobody keeps anything."""

from __future__ import annotations

import pytest

from baton.core.cluster.handoff_table import RequestState
from baton.protocol.control import AbortRequest
from baton.protocol.handoff import Forget
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason

from .harness import Room, request
from .test_losses import STATES, assigned, at_phase, go_on


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.STOP])
def test_all_of_it_in_each_phase(phase, reason, n):
    room = at_phase(phase, n=n, max_tokens=6)
    attempt = room.routed.attempt
    prefill, decode = assigned(room)
    room.withdraw(reason=reason)
    room.settle()
    assert [room.ends["r", index].reason for index in range(n)] == [reason] * n
    if phase != "H8":
        assert Forget("r", attempt) in decode.heard
    if phase in ("H2", "H2b", "H3", "H5", "H6"):
        assert Forget("r", attempt) in prefill.heard
    room.at_rest()
    room.withdraw()
    assert len(room.ends) == n


@pytest.mark.parametrize("phase", STATES)
@pytest.mark.parametrize(("n", "index"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
def test_one_sequence_in_each_phase(phase, n, index):
    """The others come out as if nothing had happened, also where the leader goes, and where one of two is left."""
    room = at_phase(phase, n=n, max_tokens=6)
    room.withdraw(index=index, reason=FinishReason.STOP)
    room.settle()
    assert list(room.ends) == [("r", index)]
    go_on(room)
    others = [other for other in range(n) if other != index]
    assert [room.ends["r", other].reason for other in others] == [FinishReason.LENGTH] * len(others)
    assert all(len(room.told["r", other]) == 6 for other in others)
    if phase in ("H2", "H2b", "H3", "H8"):  # no answer was kept from the router there
        assert room.router.stats.broken == 0


def test_queued():
    room = Room()
    room.arrive(request("first"))
    room.arrive(request("second", n=2))
    room.withdraw("second", index=1)
    assert list(room.ends) == [("second", 1)]
    room.withdraw("first")
    room.withdraw("second")
    assert len(room.ends) == 3
    assert all(ended.output_tokens == 0 for ended in room.ends.values())
    room.at_rest()


def test_unknown_or_ended_is_nothing():
    room = Room("mixed")
    assert room.withdraw("nobody") == []
    room.arrive(request(n=2))
    room.withdraw(index=1)
    room.settle()
    assert room.withdraw(index=1) == []
    assert room.withdraw(index=7) == []


def test_said_twice_is_asked_once():
    room = Room("mixed")
    (only,) = room.instances
    room.arrive(request(max_tokens=9))
    room.step()
    only.hold = (Emit,)
    room.withdraw()
    room.withdraw()
    assert sum(isinstance(message, AbortRequest) for message in only.heard) == 1


def test_home_tells_usage_of_a_stop_string():
    room = Room("mixed")
    room.arrive(request(max_tokens=9))
    room.step(2)
    room.withdraw(reason=FinishReason.STOP)
    assert not room.ends, "it is home that knows"
    room.settle()
    assert room.ends["r", 0].reason is FinishReason.STOP
    room.at_rest()


def test_stop_string_in_the_first_token_waits_for_the_usage_that_follows():
    room = at_phase("H3")
    prefill, _ = assigned(room)
    assert room.routed.state is RequestState.PREFILLING
    room.withdraw(reason=FinishReason.STOP)
    assert not room.ends
    room.say(prefill, prefill.out.popleft())
    ended = room.ends["r", 0]
    assert (ended.reason, ended.cached_tokens, ended.output_tokens) == (FinishReason.STOP, 8, 1)
    room.at_rest()


@pytest.mark.parametrize("phase", ["H3", "H8"])
def test_an_end_that_nobody_tells_is_told_by_the_router(phase):
    room = at_phase(phase, max_tokens=50)
    for instance in room.instances:
        instance.out.clear()
        instance.hold = (Emit,)
    room.withdraw(reason=FinishReason.STOP)
    assert not room.ends
    room.wait(2.25)
    assert room.ends["r", 0].reason is FinishReason.STOP
    room.at_rest()


@pytest.mark.parametrize("phase", ["H3", "H8"])
def test_loss_ends_what_was_withdrawn(phase):
    room = at_phase(phase, n=2, max_tokens=50)
    _, decode = assigned(room)
    for instance in room.instances:
        instance.out.clear()
        instance.hold = (Emit,)
    room.withdraw(index=0, reason=FinishReason.STOP)
    assert not room.ends
    room.kill(decode)
    assert list(room.ends) == [("r", 0)]
    go_on(room)
    assert room.ends["r", 1].reason is FinishReason.LENGTH


def test_tokens_that_were_under_way_are_still_told():
    room = Room("mixed")
    (only,) = room.instances
    room.arrive(request(max_tokens=9))
    room.step()
    only.step()
    room.withdraw()
    room.settle()
    assert len(room.told["r", 0]) == room.ends["r", 0].output_tokens == 2


def test_an_end_that_came_first_counts():
    room = Room("mixed")
    (only,) = room.instances
    room.arrive(request(max_tokens=1))
    only.step()
    room.withdraw()
    room.settle()
    assert room.ends["r", 0].reason is FinishReason.LENGTH
    room.at_rest()
