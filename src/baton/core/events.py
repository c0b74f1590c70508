"""What an instance can be told. The shell makes these from messages, child processes and its clock."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from baton.protocol.handoff import Forget, PeerOffer, Prefill, Release, Released, Reserve
from baton.protocol.ids import PoolIncarnation, RequestId, WorkerEpoch
from baton.protocol.moves import MoveResult, StorageAnswer
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
    """A worker of this epoch takes plans, on the pool of this incarnation. Its predecessor is proven dead."""

    epoch: WorkerEpoch
    pool: PoolIncarnation
    fingerprint: bytes = b""
    "Digest of all besides tokens that KV depends on: the root of every block key."


class WorkerProgressed(Struct, frozen=True):
    """The worker of this epoch got on with the plan that it has (progress_watch.py): a long step, and no hang."""

    epoch: WorkerEpoch


LossCause = Literal["died", "killed", "timeout", "protocol"]
"""How a worker was lost. All are evidence against what it was computing, but one.

died       by a fault signal or with an exit status of its own, or it did not start
killed     from outside, by a signal that no fault of the worker sends: it costs time, never an answer
timeout    no result, or not ready, in time
protocol   its result is not one of the protocol
"""


class WorkerLost(Struct, frozen=True):
    """The worker of this epoch is dead: no plan of it is executed any more and no block is written."""

    epoch: WorkerEpoch
    reason: str = "died"
    "For people."
    cause: LossCause = "died"


class BlocksMoved(Struct, frozen=True):
    """The cache service's answer to a move. May come late, or after the service was thought lost: then it is inert."""

    result: MoveResult


class StorageAnswered(Struct, frozen=True):
    answer: StorageAnswer


class CacheReady(Struct, frozen=True):
    """A cache service takes moves. Its predecessor is proven dead."""

    kept: bool = True
    "It has the host memory of the one before."
    wants_tokens: bool = False
    "Storage is to be told the token ids that keys stand for."


class CacheLost(Struct, frozen=True):
    """The cache service is dead: no move of it goes on."""


class Pause(Struct, frozen=True):
    """Stop accepting, drain, then stop scheduling: three states in this order."""

    drain_seconds_max: float | None = None
    "What is not finished by then is ended with what it has. None: as long as it takes."
    number: int | None = None
    "Of the order, for its OrderAnswer. None: nobody waits for one."


class Resume(Struct, frozen=True):
    """Take requests again, from draining or paused."""

    number: int | None = None


class Sleep(Struct, frozen=True):
    """Give up the worker, and with it weights and cache. Only of a paused instance."""

    number: int


class WorkerStopped(Struct, frozen=True):
    """What StopWorker asked for is done."""


class Wake(Struct, frozen=True):
    """Start a worker again. It stays paused: Resume comes after."""

    number: int


class PreemptSome(Struct, frozen=True):
    """Preempt the `count` least urgent running sequences: memory pressure from outside, or a simulation."""

    count: int = 1


class ForgetCache(Struct, frozen=True):
    """Drop what is cached and not in use, on these tiers; storage keeps what it has."""

    number: int
    "Of the order, for its OrderAnswer."
    device: bool = True
    host: bool = True


class EvictSome(Struct, frozen=True):
    """Drop up to `count` idle cached blocks."""

    count: int = 1


class Tick(Struct, frozen=True):
    """Time has passed: look at the deadlines."""


HandoffEvent = Reserve | Prefill | PeerOffer | Release | Released | Forget
"""What a router says about a hand-off (protocol/handoff.py)."""

Event = (
    Submit
    | Abort
    | StepDone
    | WorkerReady
    | WorkerLost
    | WorkerProgressed
    | BlocksMoved
    | StorageAnswered
    | CacheReady
    | CacheLost
    | Pause
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
