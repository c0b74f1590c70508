"""What a router can be told, and what it wants done."""

from __future__ import annotations

from typing import NewType

from msgspec import Struct

from baton.protocol.control import AbortRequest, InstanceStats, RefusedRequest
from baton.protocol.handoff import Adopted, AskRelease, Expect, Expecting, Forget, Offer, PeerOffer, Prefill, Released
from baton.protocol.ids import RequestId
from baton.protocol.node import Beat, NodeHello
from baton.protocol.output import Emit, EndError
from baton.protocol.request import FinishReason, GenerateRequest, Refused

Session = NewType("Session", int)
"""One connection of one instance. Never reused: what comes from an earlier one is not heard."""

FromInstance = Emit | RefusedRequest | Expecting | Offer | AskRelease | Released | Adopted | Beat | InstanceStats
ToInstance = GenerateRequest | AbortRequest | Expect | Prefill | PeerOffer | AskRelease | Released | Forget

# Events


class Arrive(Struct, frozen=True):
    """A client's request. Turned away at once (TurnAway) or owed an end for each of its sequences."""

    request: GenerateRequest


class Withdraw(Struct, frozen=True):
    """The client is gone, or a stop string was seen: one sequence, or all. Its end is told like any other."""

    request: RequestId
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT


class Join(Struct, frozen=True):
    """An instance has opened a session. One of the same name that was there before is gone."""

    session: Session
    hello: NodeHello


class Part(Struct, frozen=True):
    """The session is over; nothing more comes from it."""

    session: Session
    reason: str
    reloaded: bool = False
    "It comes back at once, with other weights: nothing was lost."


class Say(Struct, frozen=True):
    """An instance says something. Whatever it is, it lives."""

    session: Session
    message: FromInstance


class CloseDoor(Struct, frozen=True):
    """No new requests from now on; those that are open may finish."""


class Tick(Struct, frozen=True):
    """Time has passed: look at the deadlines."""


class RunPass(Struct, frozen=True):
    """The turn of the event loop is over: see which requests in the queue can be placed. The answer to SchedulePass."""


class Resumed(Struct, frozen=True):
    """The router itself was stalled for a while: no instance is to blame for a silence in that time."""


ClusterEvent = Arrive | Withdraw | Join | Part | Say | CloseDoor | Tick | RunPass | Resumed

# Effects


class Tell(Struct, frozen=True):
    """Send this, in this order. A session that is over: nothing happens, Part has been or will be told."""

    session: Session
    message: ToInstance


class Deliver(Struct, frozen=True):
    """To clients: every position of every sequence once, in order; one end each."""

    emit: Emit


class TurnAway(Struct, frozen=True):
    """The request was not begun, and is over."""

    request: RequestId
    refused: Refused
    retry_seconds: float = 1.0
    "When it may be worth trying again."


class BreakOff(Struct, frozen=True):
    """The request was begun and cannot go on: its sequences that have not ended end with this error."""

    request: RequestId
    error: EndError
    detail: str


class HangUp(Struct, frozen=True):
    """End the session: its instance is given up, or does not fit. Part need not be told."""

    session: Session
    reason: str


class SchedulePass(Struct, frozen=True):
    """Send a RunPass once the events that are here already are handled. However many they are, there is one pass."""


ClusterEffect = SchedulePass | Tell | Deliver | TurnAway | BreakOff | HangUp
