"""Which kinds of messages may come from whom in a session between instance and router. Any other ends the session, unread."""

from __future__ import annotations

from typing import Final

from baton.protocol.codec import kinds_of
from baton.protocol.control import (
    AbortRequest,
    ClearCache,
    InstanceReady,
    InstanceStats,
    ModelChanged,
    ModeReport,
    OrderAnswer,
    PauseInstance,
    Ping,
    Pong,
    RefusedRequest,
    ResumeInstance,
    SleepInstance,
    WakeInstance,
)
from baton.protocol.handoff import Adopted, AskRelease, Expect, Expecting, Forget, Offer, PeerOffer, Prefill, Released
from baton.protocol.node import Beat, NodeHello, NodeRefused, RouterBeat, RouterHello
from baton.protocol.output import Emit
from baton.protocol.request import GenerateBatch, GenerateRequest

FROM_INSTANCE: Final = kinds_of(
    NodeHello,
    Beat,
    InstanceReady,
    InstanceStats,
    Emit,
    RefusedRequest,
    Expecting,
    Offer,
    AskRelease,
    Released,
    Adopted,
    Pong,
    OrderAnswer,
    ModeReport,
    ModelChanged,
)
FROM_ROUTER: Final = kinds_of(
    RouterHello,
    NodeRefused,
    RouterBeat,
    GenerateRequest,
    GenerateBatch,
    AbortRequest,
    Expect,
    Prefill,
    PeerOffer,
    AskRelease,
    Released,
    Forget,
    Ping,
    PauseInstance,
    ResumeInstance,
    SleepInstance,
    WakeInstance,
    ClearCache,
)
