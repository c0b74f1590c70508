"""Everything else that crosses a process boundary of one instance: front <-> engine <-> worker."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from baton.protocol.ids import PoolIncarnation, RequestId, WorkerEpoch
from baton.protocol.numbers import Counter, Natural, Positive, Seconds
from baton.protocol.request import Count, FinishReason, Refused


class AbortRequest(Struct, frozen=True, array_like=True):
    """The client is gone, or the front has seen a stop string. One of the n sequences, or all."""

    request: RequestId
    index: Natural | None = None
    reason: FinishReason = FinishReason.ABORT


class RefusedRequest(Struct, frozen=True, array_like=True):
    request: RequestId
    refused: Refused
    attempt: Count = 1


class Ping(Struct, frozen=True, array_like=True):
    """Are you well? An engine that has work under way answers by itself, from the worker's progress word. One that has none
    asks its worker, which has nothing else to do."""

    number: int


class Pong(Struct, frozen=True, array_like=True):
    number: int
    fault: str = ""
    "What is wrong, for people. Empty: nothing."


class ProgressShared(Struct, frozen=True, array_like=True):
    """Comes with the descriptor of the worker's progress word (protocol/progress.py), before its WorkerHello."""

    epoch: WorkerEpoch


class PauseInstance(Struct, frozen=True, array_like=True):
    number: int
    "The answer to this order names it."
    drain_seconds_max: Seconds | None = None


class ResumeInstance(Struct, frozen=True, array_like=True):
    """Take requests again."""

    number: int


class ClearCache(Struct, frozen=True, array_like=True):
    """Forget what is cached and not in use."""

    number: int
    device: bool = True
    host: bool = True


class SleepInstance(Struct, frozen=True, array_like=True):
    """Of a paused one: weights and cache are released together."""

    number: int


class WakeInstance(Struct, frozen=True, array_like=True):
    """Load the weights again. It stays paused."""

    number: int
    model: str = ""
    "Other weights, of the same vocabulary: where they are. Empty: the same."


class ModelChanged(Struct, frozen=True, array_like=True):
    """The instance computes with other weights from now on."""

    model: str
    identity: bytes
    identity_parts: dict[str, str] = {}
    "As in WorkerHello."


OrderOutcome = Literal["done", "overtaken", "refused"]
"""What came of an order.

done        it is as was ordered
overtaken   a later order undid it before it was done
refused     nothing was done
"""


class OrderAnswer(Struct, frozen=True, array_like=True):
    """The one answer to the order of this number."""

    number: int
    outcome: OrderOutcome
    detail: str = ""
    "For people: why it was refused."


class ModeReport(Struct, frozen=True, array_like=True):
    """The instance is serving, draining or paused from now on."""

    mode: str


class LoadProgress(Struct, frozen=True, array_like=True):
    """The worker is loading its model."""

    done: int
    total: int
    stage: str = ""
    "For people: what takes a while before that (compiling kernels). Empty: the weights are being read."


class WorkerHello(Struct, frozen=True, array_like=True):
    """The worker has its model and its pool, and takes plans from now on."""

    epoch: WorkerEpoch
    blocks: Positive
    block_size: Positive
    vocab_size: Positive
    "Width of the head: every token id is below it."
    context_tokens: Natural
    identity: bytes = b""
    "Of what is loaded: the root of every block key (worker/identity.py)."
    pool: PoolIncarnation = PoolIncarnation(0)
    "Equal to that of an earlier worker: it attached to the same pool."
    model_context_tokens: Natural = 0
    "What the model was made for: more than context_tokens where the pool does not hold it."
    sampling_defaults: dict[str, int | float] = {}
    "For requests that do not say."
    block_bytes: Counter = 0
    "Of one block, in the pool and on every tier."
    digest_seconds: Seconds = 0.0
    "What the digest of the weights took, where it was not kept from an earlier start."
    plan: dict[str, int | float | str] = {}
    "How the size of the pool was found, for people (worker/build.py)."
    layout: bytes = b""
    "Fingerprint of a KV block's layout (kvpool/layout.py): between two that are equal blocks can be copied."
    identity_parts: dict[str, str] = {}
    "What `identity` is a digest of, by name, each in a few characters: so that a refusal can name the part that differs."
    pooling: str = "mean"
    "For embeddings that do not say: one of request.POOLINGS, or the name of one that is not there (models/pooling.py)."
    steps: dict[str, int | float] = {}
    "Sizes of steps that it chose for its device, by field of SchedulerConfig (config/device_defaults.py)."
    scoring: str = ""
    "How the model scores a pair of texts (models/scoring.py). Empty: it was not made for that."


class CacheHello(Struct, frozen=True, array_like=True):
    """The cache service has what it was told to have of host memory and storage, is attached to the pool, and takes moves."""

    pool: PoolIncarnation
    "Of the device pool that it is attached to."
    host_blocks: int
    kept: bool
    "The host memory is the one that its predecessor had."
    storage: str = ""
    "Scheme of the storage backend; empty: there is none."
    peer: str = ""
    "Where other instances may read the pool: the addresses of its messenger (node.py). Empty: nowhere."
    wants_tokens: bool = False
    "Its storage finds blocks by token ids: questions, puts and fetches are to carry them."


class CacheStats(Struct, frozen=True, array_like=True):
    """What the cache service counts, by name. All begins anew with every life of the service."""

    counters: dict[str, Counter]
    "Of the storage backend."
    pulls: dict[str, int] = {}
    "Copies from other instances, by transport and outcome: `tcp/copied` (kvcache/messenger.py)."
    pull_bytes: dict[str, int] = {}
    pull_microseconds: dict[str, int] = {}
    "Both by transport."
    readers: dict[str, int] = {}
    "Instances that read our pool, by transport and what became of it: `tcp/evicted`."
    loop_lag_microseconds: Counter = 0
    "How late its event loop was, at most, in the last seconds."


class InstanceReady(Struct, frozen=True, array_like=True):
    """The engine takes requests. Sent once, before anything else but LoadProgress."""

    blocks: Positive
    block_size: Positive
    slots: Positive
    vocab_size: Positive
    context_tokens: Natural
    model_context_tokens: Natural = 0
    sampling_defaults: dict[str, int | float] = {}
    identity: bytes = b""
    "WorkerHello.identity."
    plan: dict[str, int | float | str] = {}
    "What was resolved at the start, for people: processes, whose pool, how many blocks and why."
    identity_parts: dict[str, str] = {}
    "WorkerHello.identity_parts."
    pooling: str = "mean"
    "WorkerHello.pooling."
    scoring: str = ""
    "WorkerHello.scoring."


class StartFailed(Struct, frozen=True, array_like=True):
    """The instance cannot start; the message says what is wrong and what to do."""

    message: str


STEP_TOKEN_BUCKETS: Final = tuple(2**power for power in range(15))
STEP_TOKEN_SUM: Final = "sum"


class InstanceStats(Struct, kw_only=True):
    """Gauges are of this moment; the others are counters since the engine began (core/engine/stats.py), and never fall."""

    mode: str = "serving"
    running: Counter = 0
    waiting: Counter = 0
    "In line for the first time."
    preempted: Counter = 0
    "Sequences that lost their blocks and wait for their turn again."
    blocks_total: Counter = 0
    blocks_free: Counter = 0
    blocks_cached: Counter = 0
    "Not referenced by any request; kept for their content."
    blocks_held: Counter = 0
    slots_taken: Counter = 0
    requests_open: Counter = 0
    steps_in_flight: Counter = 0

    loading: Counter = 0
    "Sequences that wait for KV from a lower tier."
    host_blocks: Counter = 0
    host_blocks_cached: Counter = 0
    cache_service: bool = False
    "It is there, and takes moves."
    storage_circuit: str = ""
    "State of the circuit of reading storage; empty: there is no storage."
    storage_write_circuit: str = ""
    "The same of writing."
    routers: Counter = 0
    "Sessions with routers that are open."

    router_sessions: dict[str, Counter] = {}
    "Sessions with routers that began (opened), and by how they ended or why none began (runtime/engine/router_links.py)."
    handoffs: dict[str, Counter] = {}
    "Prompts of hand-offs, by which end this instance was and what became of them."
    pulls: dict[str, Counter] = {}
    "Copies of KV blocks from other instances, by transport and outcome: `tcp/copied` (kvcache/messenger.py)."
    pull_bytes: dict[str, Counter] = {}
    pull_microseconds: dict[str, Counter] = {}
    "What those copies moved and took, by transport."
    readers: dict[str, Counter] = {}
    "Connections of instances that read this one's KV pool, by transport and event: `tcp/evicted`."
    tiers: dict[str, Counter] = {}
    "Counters of core/kv/tiers.py."
    storage: dict[str, Counter] = {}
    "Counters of the storage backend; they begin anew with every life of the cache service."
    steps: Counter = 0
    prompt_tokens: Counter = 0
    cached_tokens: Counter = 0
    output_tokens: Counter = 0
    preemptions: Counter = 0
    folded_blocks: Counter = 0
    evicted_blocks: Counter = 0
    stale_rows: Counter = 0
    stale_results: Counter = 0
    worker_losses: Counter = 0
    crash_ends: Counter = 0
    cache_losses: Counter = 0
    "Cache services that were lost; another one was started."
    loop_lag_microseconds: Counter = 0
    "How late the engine's event loop was, at most, in the last seconds."
    cache_loop_lag_microseconds: Counter = 0
    "The same of the cache service's."
    step_tokens: dict[str, Counter] = {}
    "Steps by how many tokens they compute: counts by STEP_TOKEN_BUCKETS and +Inf, and the sum."
    ended: dict[str, Counter] = {}
    "By FinishReason."
    refused: dict[str, Counter] = {}
    "By RefusalReason."
    held_back: dict[str, Counter] = {}
    "Steps in which the head of the line did not fit, by what was short."
