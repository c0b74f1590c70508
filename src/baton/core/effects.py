"""Effects of an instance. The shell performs them; the outcome, if there is one, returns as an event."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from baton.core.events import LossCause
from baton.protocol.control import OrderAnswer
from baton.protocol.handoff import Adopted, Offer, Release, Released, Reserved
from baton.protocol.ids import RequestId, WorkerEpoch
from baton.protocol.moves import BlockMove, StorageQuery
from baton.protocol.output import Emit
from baton.protocol.request import Refused
from baton.protocol.step import StepPlan


class RunStep(Struct, frozen=True):
    """Hand the plan to the worker. Plans go out in the order of their numbers."""

    plan: StepPlan


class Refuse(Struct, frozen=True):
    """The request is refused. No state of it remains."""

    request: RequestId
    refused: Refused
    attempt: int = 1


class RestartWorker(Struct, frozen=True):
    """Ensure now that the old worker is dead. After the delay start a worker of this epoch and dispatch WorkerReady."""

    epoch: WorkerEpoch
    cause: LossCause
    reason: str
    "Text for the log."
    delay_seconds: float = 0.0


class SendToCache(Struct, frozen=True):
    """Send this message to the cache service, in order. Without a service the message is dropped: CacheLost is or will be
    dispatched."""

    message: BlockMove | StorageQuery


class RestartCache(Struct, frozen=True):
    """The cache service hangs: ensure that it is dead, dispatch CacheLost, and start another one."""

    reason: str
    "Text for the log."


class StopWorker(Struct, frozen=True):
    """Every process unmaps the pool, the worker exits, and no other is started. Dispatch WorkerStopped afterwards."""

    epoch: WorkerEpoch
    "Epoch of the next worker, whenever it starts."


class Mode(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"
    PAUSED = "paused"


class ModeChanged(Struct, frozen=True):
    mode: Mode


HandoffEffect = Reserved | Offer | Release | Released | Adopted
"""Messages for the router, in this order and after the Emit of the same event (protocol/handoff.py)."""

Effect = (
    RunStep
    | Emit
    | Refuse
    | RestartWorker
    | SendToCache
    | RestartCache
    | ModeChanged
    | OrderAnswer
    | StopWorker
    | HandoffEffect
)
