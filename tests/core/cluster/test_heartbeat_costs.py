"""What a heartbeat costs with a full queue: the same among 10 instances and among 1,000, and no placement pass unless it brings
room."""

from __future__ import annotations

import sys

from baton.config import RouterConfig
from baton.core.cluster.events import InstanceJoined, InstanceMessage, RunPass, SchedulePass, Session, SubmitRequest
from baton.core.cluster.router import Router
from baton.protocol.ids import Instant
from baton.protocol.instance import Heartbeat

from .harness import hello, request

FULL = Heartbeat(token_seconds=0.001, blocks_available=0, slots_free=0, waiting_tokens=500)
WORSE = Heartbeat(token_seconds=0.001, waiting_tokens=900)
QUEUED = 40


class Crowd:
    """A router whose instances have no room, and whose queue is full."""

    def __init__(self, instances, *roles):
        self.router = Router(RouterConfig(queue_requests_max=QUEUED, waiting_prompts_max=0, instances_max=1000))
        self.now = 100.0
        for number in range(instances):
            role = roles[number % len(roles)]
            self.handle(InstanceJoined(Session(number), hello(f"i{number}", role)))
        self.beat(FULL, *range(instances))
        for number in range(QUEUED):
            self.handle(SubmitRequest(request(f"r{number}")))
        self.handle(RunPass())
        assert self.router.queued == QUEUED

    def handle(self, event):
        return self.router.handle(event, Instant(self.now))

    def beat(self, beat, *sessions):
        """Does the router ask for a placement pass?"""
        effects = [effect for each in sessions for effect in self.handle(InstanceMessage(Session(each), beat))]
        return any(isinstance(effect, SchedulePass) for effect in effects)


def calls(function):
    """Number of Python functions that are called."""
    count = 0

    def on_event(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(on_event)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_heartbeat_without_more_room_calls_for_no_pass_and_costs_the_same_among_1000_instances():
    counted = []
    for instances in (10, 1000):
        crowd = Crowd(instances, "mixed", "prefill", "decode")
        crowd.now += 0.25
        assert not crowd.beat(FULL, *range(10)), "the first has nothing that a request could use"
        counted.append([calls(lambda each=each, crowd=crowd: crowd.beat(WORSE, each)) for each in range(10)])
        assert not crowd.beat(FULL, *range(10)), "fewer tokens wait there, and there is no room"
        crowd.router.check()
    assert counted[0] == counted[1]


def test_a_heartbeat_that_brings_room_calls_for_one_pass():
    """However many bring room before it runs."""
    crowd = Crowd(100, "mixed")
    room = Heartbeat(token_seconds=0.001, blocks_available=64, slots_free=8)
    assert crowd.beat(room, 3)
    assert not crowd.beat(room, 4, 5, 6)
    crowd.handle(RunPass())
    assert crowd.router.queued < QUEUED
