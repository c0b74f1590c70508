"""When an instance sends its heartbeats to one router.

    regular   at the interval that the router wants, with changes of the cache digest, and stats now and then
    early     after a request of another router, at most every EARLY_HEARTBEAT_SECONDS: the heartbeat alone

A router counts its own requests when it sends them. Requests of another router show only in heartbeats: with regular ones
alone, two routers send to the same instances for a quarter of a second, until the prefixes there are evicted that both count
on (bench/fleet.py, `2 routers`).
"""

from __future__ import annotations

from typing import Final

from baton.protocol.handoff import Prefill, Reserve
from baton.protocol.request import GenerateBatch, GenerateRequest

REQUESTS: Final = frozenset({GenerateRequest, GenerateBatch, Reserve, Prefill})
"""Messages of a router that take room of an instance."""
EARLY_HEARTBEAT_SECONDS: Final = 0.02
"""Shortest time between a heartbeat and an early one."""


class HeartbeatTimes:
    __slots__ = ("due", "early_due", "seconds", "sent_at")

    def __init__(self, now: float, seconds: float) -> None:
        self.due = self.sent_at = now
        self.seconds = seconds
        "Interval of regular heartbeats."
        self.early_due: float | None = None
        "None: no request of another router has arrived since the last heartbeat."

    def on_request_of_another(self, now: float) -> None:
        if self.early_due is None:
            early = max(now, self.sent_at + EARLY_HEARTBEAT_SECONDS)
            self.early_due = early if early < self.due else None

    def on_sent(self, now: float, *, early: bool = False) -> None:
        self.sent_at, self.early_due = now, None
        if not early:
            self.due = now + self.seconds
