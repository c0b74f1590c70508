"""What an instance wants done. The shell does it; the outcome, if there is one, comes back as an event."""

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
    """The request is not taken. It leaves no trace."""

    request: RequestId
    refused: Refused
    attempt: int = 1


class RestartWorker(Struct, frozen=True):
    """Make sure now that the old worker is dead; after the delay start one of this epoch, say WorkerReady."""

    epoch: WorkerEpoch
    cause: LossCause
    reason: str
    "For people."
    delay_seconds: float = 0.0


class SendToCache(Struct, frozen=True):
    """Hand this to the cache service, in this order. If there is none, nothing happens: CacheLost has been or will be told."""

    message: BlockMove | StorageQuery


class RestartCache(Struct, frozen=True):
    """The cache service hangs: make sure that it is dead, say CacheLost, and start another one."""

    reason: str
    "For people."


class StopWorker(Struct, frozen=True):
    """Everybody unmaps the pool, then the worker ends, and none follows. Say WorkerStopped when it has."""

    epoch: WorkerEpoch
    "Of the next one, whenever that comes."


class Mode(StrEnum):
    SERVING = "serving"
    DRAINING = "draining"
    PAUSED = "paused"


class ModeChanged(Struct, frozen=True):
    mode: Mode


HandoffEffect = Reserved | Offer | Release | Released | Adopted
"""For the router, in this order and after what clients are told by the same event (protocol/handoff.py)."""

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
