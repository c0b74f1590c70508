"""Events of an instance. The shell makes them from messages, child processes and its clock."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.protocol.handoff import Forget, PeerOffer, Prefill, Release, Released, Reserve
from baton.protocol.ids import PoolIncarnation, RequestId, WorkerEpoch
from baton.protocol.moves import MoveResult, StorageAnswer
from baton.protocol.request import FinishReason, GenerateRequest
from baton.protocol.step import StepResult


class Submit(Struct, frozen=True):
    """Submit a request. It is refused at once (Refuse) or ends with n Ended."""

    request: GenerateRequest


class Abort(Struct, frozen=True):
    """End a request: the client disconnected, or the front found a stop string. An unknown or ended request is ignored."""

    request: RequestId
    index: int | None = None
    "Index of the sequence to end; None: all."
    reason: Literal[FinishReason.ABORT, FinishReason.STOP] = FinishReason.ABORT


class StepDone(Struct, frozen=True):
    """The worker returns a result. Results may be late, repeated or out of order; steps are absorbed once, in order."""

    result: StepResult


class WorkerReady(Struct, frozen=True):
    """A worker of this epoch accepts plans, on the pool of this incarnation. Its predecessor is proven dead."""

    epoch: WorkerEpoch
    pool: PoolIncarnation
    fingerprint: bytes = b""
    "Digest of everything except tokens that KV depends on: the root of every block key."
    steps_ahead: int = 1
    "Maximum of plans that it begins before it sends the result of the first."


class WorkerProgressed(Struct, frozen=True):
    """The worker of this epoch makes progress in its plan (progress_watch.py): the step is long, the worker does not hang."""

    epoch: WorkerEpoch


class WorkerSilent(Struct, frozen=True):
    """The worker of this epoch has no plan, and has not answered a ping for `step_seconds_max` (engine/idle_probe.py)."""

    epoch: WorkerEpoch


LossCause = Literal["died", "killed", "timeout", "protocol"]
"""Causes of the loss of a worker. All causes but one are evidence against what it computed.

died       a fault signal or its own exit status ended it, or it did not start
killed     a signal from outside that no fault of the worker sends: it costs time, never an answer
timeout    no result, or not ready, in time
protocol   its result violates the protocol
"""


class WorkerLost(Struct, frozen=True):
    """The worker of this epoch is dead: no plan of it is executed any more and no block is written."""

    epoch: WorkerEpoch
    reason: str = "died"
    "Text for the log."
    cause: LossCause = "died"


class BlocksMoved(Struct, frozen=True):
    """The cache service's result of a move. A late one, or one after the service was considered lost, is ignored."""

    result: MoveResult


class StorageAnswered(Struct, frozen=True):
    answer: StorageAnswer


class CacheReady(Struct, frozen=True):
    """A cache service accepts moves. Its predecessor is proven dead."""

    kept: bool = True
    "Whether the service still has the host memory of its predecessor."
    wants_tokens: bool = False
    "Whether the storage backend wants the token ids of each key."


class CacheLost(Struct, frozen=True):
    """The cache service is dead: none of its moves continues."""


class Pause(Struct, frozen=True):
    """Stop accepting, drain, then stop scheduling: three states in this order."""

    drain_seconds_max: float | None = None
    "Time at which unfinished requests are ended, with the tokens they have. None: no limit."
    number: int | None = None
    "Number of the order, for its OrderAnswer. None: no answer is wanted."


class HoldPause(Struct, frozen=True):
    """The present pause is part of an order of this caller, who resumes in the end. A later pause is not."""

    caller: str


class CallerLeft(Struct, frozen=True):
    """The session of a caller has ended. If it held the pause, the instance wakes and serves again."""

    caller: str


class Resume(Struct, frozen=True):
    """Accept requests again, from draining or paused."""

    number: int | None = None


class Sleep(Struct, frozen=True):
    """Stop the worker, and free weights and cache. Refused unless the instance is paused."""

    number: int


class WorkerStopped(Struct, frozen=True):
    """The worker of a StopWorker effect has stopped."""


class Wake(Struct, frozen=True):
    """Start a worker again. The instance stays paused until Resume."""

    number: int | None
    "Number of the order, for its OrderAnswer. None: no answer is wanted."


class PreemptSome(Struct, frozen=True):
    """Preempt the `count` least urgent running sequences: memory pressure from outside, or a simulation."""

    count: int = 1


class ForgetCache(Struct, frozen=True):
    """Drop cached blocks that are not in use, on these tiers; storage keeps its blocks."""

    number: int
    "Number of the order, for its OrderAnswer."
    device: bool = True
    host: bool = True


class EvictSome(Struct, frozen=True):
    """Drop up to `count` idle cached blocks."""

    count: int = 1


class Tick(Struct, frozen=True):
    """Time has passed: check the deadlines."""


HandoffEvent = Reserve | Prefill | PeerOffer | Release | Released | Forget
"""Messages of a router about a hand-off (protocol/handoff.py)."""

Event = (
    Submit
    | Abort
    | StepDone
    | WorkerReady
    | WorkerLost
    | WorkerProgressed
    | WorkerSilent
    | BlocksMoved
    | StorageAnswered
    | CacheReady
    | CacheLost
    | Pause
    | HoldPause
    | CallerLeft
    | Resume
    | Sleep
    | WorkerStopped
    | Wake
    | PreemptSome
    | EvictSome
    | ForgetCache
    | Tick
    | HandoffEvent
)
