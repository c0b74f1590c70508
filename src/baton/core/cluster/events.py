"""What a router can be told, and what it wants done."""

from __future__ import annotations

from typing import NewType

from msgspec import Struct

from baton.protocol.control import AbortRequest, InstanceStats, RefusedRequest
from baton.protocol.handoff import Adopted, Forget, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import RequestId
from baton.protocol.instance import Heartbeat, InstanceHello
from baton.protocol.output import Emit, EndError
from baton.protocol.request import FinishReason, GenerateRequest, Refused

Session = NewType("Session", int)
"""One connection of one instance. Never reused: what comes from an earlier one is not heard."""

FromInstance = Emit | RefusedRequest | Reserved | Offer | Release | Released | Adopted | Heartbeat | InstanceStats
ToInstance = GenerateRequest | AbortRequest | Reserve | Prefill | PeerOffer | Release | Released | Forget

# Events


class SubmitRequest(Struct, frozen=True):
    """A client's request. Turned away at once (RejectRequest) or owed an end for each of its sequences."""

    request: GenerateRequest


class WithdrawRequest(Struct, frozen=True):
    """The client is gone, or a stop string was seen: one sequence, or all. Its end is told like any other."""

    request: RequestId
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT


class InstanceJoined(Struct, frozen=True):
    """An instance has opened a session. One of the same name that was there before is gone."""

    session: Session
    hello: InstanceHello


class InstanceLeft(Struct, frozen=True):
    """The session is over; nothing more comes from it."""

    session: Session
    reason: str
    reloaded: bool = False
    "It comes back at once, with other weights: nothing was lost."


class InstanceMessage(Struct, frozen=True):
    """An instance says something. Whatever it is, it lives."""

    session: Session
    message: FromInstance


class StopAdmission(Struct, frozen=True):
    """No new requests from now on; those that are open may finish."""


class RouterTick(Struct, frozen=True):
    """Time has passed: look at the deadlines."""


class RunPass(Struct, frozen=True):
    """The turn of the event loop is over: see which requests in the queue can be placed. The answer to SchedulePass."""


class Resumed(Struct, frozen=True):
    """The router itself was stalled for a while: no instance is to blame for a silence in that time."""


ClusterEvent = (
    SubmitRequest
    | WithdrawRequest
    | InstanceJoined
    | InstanceLeft
    | InstanceMessage
    | StopAdmission
    | RouterTick
    | RunPass
    | Resumed
)

# Effects


class SendToInstance(Struct, frozen=True):
    """Send this, in this order. A session that is over: nothing happens, Part has been or will be told."""

    session: Session
    message: ToInstance


class Deliver(Struct, frozen=True):
    """To clients: every position of every sequence once, in order; one end each."""

    emit: Emit


class RejectRequest(Struct, frozen=True):
    """The request was not begun, and is over."""

    request: RequestId
    refused: Refused
    retry_seconds: float = 1.0
    "When it may be worth trying again."


class FailRequest(Struct, frozen=True):
    """The request was begun and cannot go on: its sequences that have not ended end with this error."""

    request: RequestId
    error: EndError
    detail: str


class CloseSession(Struct, frozen=True):
    """End the session: its instance is given up, or does not fit. Part need not be told."""

    session: Session
    reason: str


class SchedulePass(Struct, frozen=True):
    """Send a RunPass once the events that are here already are handled. However many they are, there is one pass."""


ClusterEffect = SchedulePass | SendToInstance | Deliver | RejectRequest | FailRequest | CloseSession
