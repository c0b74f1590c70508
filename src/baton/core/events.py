"""What an instance can be told. The shell makes these from messages, child processes and its clock."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.protocol.ids import RequestId, WorkerEpoch
from baton.protocol.request import FinishReason, GenerateRequest
from baton.protocol.step import StepResult


class Submit(Struct, frozen=True):
    """A request. Refused at once (Refuse) or owed n ends (Ended)."""

    request: GenerateRequest


class Abort(Struct, frozen=True):
    """The client is gone, or the front has seen a stop string. Unknown or ended: nothing happens, nothing is left."""

    request: RequestId
    index: int | None = None
    "One of the n sequences, or all."
    reason: Literal[FinishReason.ABORT, FinishReason.STOP] = FinishReason.ABORT


class StepDone(Struct, frozen=True):
    """The worker's answer. May come late, twice or out of order; steps are absorbed once, in order."""

    result: StepResult


class WorkerReady(Struct, frozen=True):
    """A worker of this epoch takes plans. `pool_kept`: it attached to the pool of its predecessor, which is proven dead."""

    epoch: WorkerEpoch
    pool_kept: bool = False


class WorkerLost(Struct, frozen=True):
    """The worker of this epoch is dead: no plan of it is executed any more and no block is written."""

    epoch: WorkerEpoch
    reason: str = "died"


class Pause(Struct, frozen=True):
    """Stop accepting, drain, then stop scheduling: three states in this order."""

    drain_seconds_max: float | None = None
    "What is not finished by then is ended with what it has. None: as long as it takes."


class Resume(Struct, frozen=True):
    """Take requests again, from draining or paused."""


class PreemptSome(Struct, frozen=True):
    """Preempt the `count` least urgent running sequences: memory pressure from outside, or a rehearsal."""

    count: int = 1


class EvictSome(Struct, frozen=True):
    """Drop up to `count` idle cached blocks."""

    count: int = 1


class Tick(Struct, frozen=True):
    """Time has passed: look at the deadlines."""


Event = Submit | Abort | StepDone | WorkerReady | WorkerLost | Pause | Resume | PreemptSome | EvictSome | Tick
