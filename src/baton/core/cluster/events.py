"""Events and effects of a router."""

from __future__ import annotations

from typing import NewType

from msgspec import Struct

from baton.protocol.control import AbortRequest, InstanceStats, RefusedRequest
from baton.protocol.handoff import Adopted, Forget, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import RequestId
from baton.protocol.instance import CachedKeys, Heartbeat, InstanceHello
from baton.protocol.output import Emit, EndError
from baton.protocol.request import FinishReason, GenerateRequest, Refused

Session = NewType("Session", int)
"""Number of one connection of one instance. Never reused, so messages of an earlier connection are ignored."""

FromInstance = Emit | RefusedRequest | Reserved | Offer | Release | Released | Adopted | Heartbeat | InstanceStats | CachedKeys
ToInstance = GenerateRequest | AbortRequest | Reserve | Prefill | PeerOffer | Release | Released | Forget

# Events


class SubmitRequest(Struct, frozen=True):
    """A client's request. Rejected at once (RejectRequest), or ended once for each of its sequences."""

    request: GenerateRequest


class WithdrawRequest(Struct, frozen=True):
    """The client disconnected, or a stop string was found: one sequence, or all. The end is delivered like any other."""

    request: RequestId
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT


class InstanceJoined(Struct, frozen=True):
    """An instance has opened a session. Its earlier session ends."""

    session: Session
    hello: InstanceHello


class InstanceLeft(Struct, frozen=True):
    """The session has ended; no message of it follows."""

    session: Session
    reason: str
    reloaded: bool = False
    "Whether the instance comes back at once with other weights, so that nothing was lost."


class InstanceMessage(Struct, frozen=True):
    """An instance sends a message. Any message proves that it is alive."""

    session: Session
    message: FromInstance


class StopAdmission(Struct, frozen=True):
    """Reject new requests from now on; open ones may finish."""


class RouterTick(Struct, frozen=True):
    """Time has passed: check the deadlines."""


class RunPass(Struct, frozen=True):
    """Place requests of the queue: the turn of the event loop has ended. Dispatched for SchedulePass."""


class Resumed(Struct, frozen=True):
    """The router itself was stalled for a while: silence of instances in that time does not count."""


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
    """Send this message, in order. To an ended session no message is sent: InstanceLeft is or will be dispatched."""

    session: Session
    message: ToInstance


class Deliver(Struct, frozen=True):
    """Deliver to clients: every position of every sequence once, in order; one end each."""

    emit: Emit


class RejectRequest(Struct, frozen=True):
    """The request is rejected before it began."""

    request: RequestId
    refused: Refused
    retry_seconds: float = 1.0
    "Seconds after which a retry may succeed."


class FailRequest(Struct, frozen=True):
    """The request has begun and cannot continue: its open sequences end with this error."""

    request: RequestId
    error: EndError
    detail: str


class CloseSession(Struct, frozen=True):
    """End the session: its instance timed out or does not fit. InstanceLeft need not be dispatched."""

    session: Session
    reason: str
    retry_seconds: float = 0.0
    "InstanceRefused.retry_seconds."


class WarnOfInstance(Struct, frozen=True):
    """Log this warning about an instance. Sent once per session and cause."""

    session: Session
    text: str


class SchedulePass(Struct, frozen=True):
    """Dispatch RunPass after the events that have already arrived. However many they are, there is one pass."""


ClusterEffect = SchedulePass | SendToInstance | Deliver | RejectRequest | FailRequest | CloseSession | WarnOfInstance
