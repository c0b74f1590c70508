"""The check that requests leave a stalled worker, on the messages of a router."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.config import RouterConfig
from baton.errors import InvariantBroken
from baton.protocol.control import InstanceReady
from baton.protocol.handoff import Forget
from baton.protocol.ids import RequestId
from baton.protocol.instance import Heartbeat, InstanceHello
from baton.protocol.request import GenerateRequest
from baton.sim.cluster.stall_watch import MARGIN_SECONDS, StallWatch
from baton.sim.scenario import Client

STALLED, WELL = 1, 2
"""Sessions of two instances."""
BEAT_SECONDS = 0.1
REQUEST = GenerateRequest(id=RequestId("a"), prompt=(1, 2, 3))


class Line:
    """A router's messages: the request is on an instance that is stalled from the begin."""

    def __init__(self) -> None:
        self.asked = SimpleNamespace(client=Client("a", 0.0, [1, 2, 3], 9), is_answered=False, delivered=[[]])
        watch: Any = SimpleNamespace(requests={"a": self.asked}, saw=lambda what: None)
        self.watch, self.now = StallWatch(RouterConfig(), watch), 0.0
        for session in (STALLED, WELL):
            hello = InstanceHello(f"i{session}", 1, "mixed", InstanceReady(64, 4, 4, 16, 256), b"layout")
            self.watch.received(session, hello, 0.0)
        self.watch.sent(STALLED, REQUEST, 0.0)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += BEAT_SECONDS
            self.watch.received(WELL, Heartbeat(), self.now)
            self.watch.received(STALLED, Heartbeat("the worker is stalled", stalled=True), self.now)


def test_a_request_that_stays_on_a_stalled_worker_is_found():
    line = Line()
    with pytest.raises(InvariantBroken, match="a waits for a stalled worker"):
        line.pass_time(10.0)
    assert line.now > RouterConfig().lapse_seconds


def test_a_request_that_got_a_token_is_due_again_and_not_at_once():
    """Found by clusters with ranks: a token of the prefill instance made a request movable again, and the check wanted the
    second move a few milliseconds later, before the router's own check."""
    line = Line()
    line.pass_time(RouterConfig().lapse_seconds + 0.2)
    line.watch.sent(STALLED, Forget(RequestId("a"), 1), line.now)  # the move, to another instance that is stalled as long
    line.watch.sent(STALLED, REQUEST, line.now)
    line.pass_time(5.0)
    line.asked.delivered[0].append(7)
    line.pass_time(MARGIN_SECONDS)
    with pytest.raises(InvariantBroken, match="a waits for a stalled worker"):
        line.pass_time(1.0)
