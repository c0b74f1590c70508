"""All other messages between the processes of one instance: front <-> engine <-> worker."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from baton.protocol.ids import PoolIncarnation, RequestId, WorkerEpoch
from baton.protocol.numbers import Counter, Natural, Positive, Seconds
from baton.protocol.request import Count, FinishReason, Refused


class AbortRequest(Struct, frozen=True, array_like=True):
    """Ends a request: the client disconnected, or the front found a stop string. One of the n sequences; None: all."""

    request: RequestId
    index: Natural | None = None
    reason: FinishReason = FinishReason.ABORT


class RefusedRequest(Struct, frozen=True, array_like=True):
    request: RequestId
    refused: Refused
    attempt: Count = 1


class Ping(Struct, frozen=True, array_like=True):
    """A health check. An engine with work in flight answers by itself, from the worker's progress word. An idle one pings its
    worker, which is idle too."""

    number: int


class Pong(Struct, frozen=True, array_like=True):
    number: int
    fault: str = ""
    "Fault of the engine or worker, as text for users. Empty: none."


class ProgressShared(Struct, frozen=True, array_like=True):
    """Sent with the descriptor of the worker's progress word (protocol/progress.py), before its WorkerHello."""

    epoch: WorkerEpoch


class CollectiveShared(Struct, frozen=True, array_like=True):
    """Sent with the descriptor of an empty memory file that all ranks of a worker set share: the first message that each of
    them gets on its descriptor socket. A set of one rank gets none."""

    epoch: WorkerEpoch
    ranks: Positive


class PauseInstance(Struct, frozen=True, array_like=True):
    number: int
    "Number of this order, which the answer names."
    drain_seconds_max: Seconds | None = None
    held: bool = False
    """Whether the pause is a part of a longer order, after which the router resumes. If its session ends before, the instance
    serves again by itself."""


class ResumeInstance(Struct, frozen=True, array_like=True):
    """Accept requests again."""

    number: int


class ClearCache(Struct, frozen=True, array_like=True):
    """Drop cached blocks that are not in use."""

    number: int
    device: bool = True
    host: bool = True


class SleepInstance(Struct, frozen=True, array_like=True):
    """Put a paused instance to sleep: weights and cache are freed together."""

    number: int


class WakeInstance(Struct, frozen=True, array_like=True):
    """Load the weights again. The instance stays paused until the router resumes it, or its session ends."""

    number: int
    model: str = ""
    "Path of other weights, with the same vocabulary. Empty: the same weights."


class ModelChanged(Struct, frozen=True, array_like=True):
    """The instance computes with other weights from now on."""

    model: str
    identity: bytes
    identity_parts: dict[str, str] = {}
    "Identity of the model, as in WorkerHello."


OrderOutcome = Literal["done", "overtaken", "refused"]
"""Outcome of an order.

done        the order was executed
overtaken   a later order undid it before it was done
refused     nothing was done
"""


class OrderAnswer(Struct, frozen=True, array_like=True):
    """The one answer to the order of this number."""

    number: int
    outcome: OrderOutcome
    detail: str = ""
    "Reason for which the order was refused, as text for users."


class ModeReport(Struct, frozen=True, array_like=True):
    """The instance is serving, draining or paused from now on."""

    mode: str


class LoadProgress(Struct, frozen=True, array_like=True):
    """The worker is loading its model."""

    done: int
    total: int
    stage: str = ""
    "Other slow stage, as text for users (compiling kernels). Empty: the weights are being read."


class WorkerHello(Struct, frozen=True, array_like=True):
    """The worker has its model and its pool, and accepts plans from now on."""

    epoch: WorkerEpoch
    blocks: Positive
    block_size: Positive
    vocab_size: Positive
    "Width of the head: every token id is below it."
    context_tokens: Natural
    identity: bytes = b""
    "Digest of the loaded model: the root of every block key (worker/identity.py)."
    pool: PoolIncarnation = PoolIncarnation(0)
    "Incarnation of the pool. Equal to that of an earlier worker: it attached to the same pool."
    model_context_tokens: Natural = 0
    "The model's own context: more than context_tokens if the pool cannot hold it."
    sampling_defaults: dict[str, int | float] = {}
    "Default sampling of the model's files."
    block_bytes: Counter = 0
    "Bytes of one block, in the pool and on every tier."
    digest_seconds: Seconds = 0.0
    "Seconds for the digest of the weights, unless it was kept from an earlier start."
    plan: dict[str, int | float | str] = {}
    "How the size of the pool was found, for users (worker/build.py)."
    layout: bytes = b""
    "Fingerprint of a KV block's layout (kvpool/layout.py): blocks can be copied between equal ones."
    identity_parts: dict[str, str] = {}
    "The inputs of `identity` by name, each in a few characters: so that a refusal can name the part that differs."
    pooling: str = "mean"
    "Default pooling of embeddings: one of request.POOLINGS, or the name of an unsupported one (models/pooling.py)."
    steps: dict[str, int | float] = {}
    "Step sizes that the worker chose for its device, by field of SchedulerConfig (config/device_defaults.py)."
    scoring: str = ""
    "How the model scores a pair of texts (models/scoring.py). Empty: it cannot."
    generates: bool = True
    "Whether the model generates. False: an encoder, which gives vectors or classes."
    labels: tuple[str, ...] = ()
    "Names of the classes of a model that classifies."
    steps_ahead: Positive = 1
    "Maximum of plans that the worker begins before it sends the result of the first (engine/recovery.py)."


class CacheHello(Struct, frozen=True, array_like=True):
    """The cache service has its host memory and storage, is attached to the pool, and accepts moves."""

    pool: PoolIncarnation
    "Incarnation of the device pool that the service is attached to."
    host_blocks: int
    kept: bool
    "Whether the host memory is its predecessor's."
    storage: str = ""
    "Scheme of the storage backend; empty: none."
    peer: str = ""
    "Addresses at which other instances read the pool: those of its messenger (instance.py). Empty: it is not readable."
    wants_tokens: bool = False
    "Whether storage finds blocks by token ids: queries, puts and fetches must carry them."


class CacheStats(Struct, frozen=True, array_like=True):
    """Counters of the cache service, by name. They restart with every life of the service."""

    counters: dict[str, Counter]
    "Counters of the storage backend."
    pulls: dict[str, int] = {}
    "Copies from other instances, by transport and outcome: `tcp/copied` (kvcache/messenger.py)."
    pull_bytes: dict[str, int] = {}
    pull_microseconds: dict[str, int] = {}
    "Bytes and microseconds of those copies, by transport."
    readers: dict[str, int] = {}
    "Instances that read our pool, by transport and outcome: `tcp/evicted`."
    loop_lag_microseconds: Counter = 0
    "Longest delay of its event loop in the last seconds."


class InstanceReady(Struct, frozen=True, array_like=True):
    """The engine accepts requests. Sent once, before anything else except LoadProgress."""

    blocks: Positive
    block_size: Positive
    slots: Positive
    vocab_size: Positive
    context_tokens: Natural
    model_context_tokens: Natural = 0
    sampling_defaults: dict[str, int | float] = {}
    identity: bytes = b""
    "Identity of the model (WorkerHello.identity)."
    plan: dict[str, int | float | str] = {}
    "Resolved settings, for users: processes, the pool's creator, how many blocks and why."
    identity_parts: dict[str, str] = {}
    "Parts of the identity (WorkerHello.identity_parts)."
    pooling: str = "mean"
    "Default pooling (WorkerHello.pooling)."
    scoring: str = ""
    "Scoring of pairs (WorkerHello.scoring)."
    generates: bool = True
    "Whether the model generates (WorkerHello.generates)."
    labels: tuple[str, ...] = ()
    "Names of the classes (WorkerHello.labels)."


class ChildHangs(Struct, frozen=True, array_like=True):
    """From the supervisor to the process that serves /metrics: how often each child was killed because its event loop did not
    answer."""

    counts: dict[str, Counter]


class StartFailed(Struct, frozen=True, array_like=True):
    """The instance cannot start; the message names the fault and the remedy."""

    message: str


STEP_TOKEN_BUCKETS: Final = tuple(2**power for power in range(15))
STEP_TOKEN_SUM: Final = "sum"


class InstanceStats(Struct, kw_only=True):
    """Stats of an instance. Gauges are current values; the others are counters since the engine's start (core/engine/stats.py),
    and never decrease."""

    mode: str = "serving"
    running: Counter = 0
    waiting: Counter = 0
    "Sequences in the queue for the first time."
    preempted: Counter = 0
    "Sequences that lost their blocks and wait for their turn again."
    blocks_total: Counter = 0
    blocks_free: Counter = 0
    blocks_cached: Counter = 0
    "Cached blocks that no request holds."
    blocks_held: Counter = 0
    slots_taken: Counter = 0
    requests_open: Counter = 0
    steps_in_flight: Counter = 0

    loading: Counter = 0
    "Sequences that wait for KV from a lower tier."
    host_blocks: Counter = 0
    host_blocks_cached: Counter = 0
    cache_service: bool = False
    "Whether the cache service is connected, and accepts moves."
    storage_circuit: str = ""
    "State of the circuit for reads of storage; empty: no storage."
    storage_write_circuit: str = ""
    "State of the circuit for writes of storage."
    routers: Counter = 0
    "Open sessions with routers."
    router_refusal: str = ""
    "Reason for which a router refused the instance, as text for users. Empty: none did since the last session that was opened."

    router_sessions: dict[str, Counter] = {}
    "Sessions with routers that began (opened), and by how they ended or why none began (runtime/engine/router_links.py)."
    handoffs: dict[str, Counter] = {}
    "Prompts of hand-offs, by this instance's end and the outcome."
    pulls: dict[str, Counter] = {}
    "Copies of KV blocks from other instances, by transport and outcome: `tcp/copied` (kvcache/messenger.py)."
    pull_bytes: dict[str, Counter] = {}
    pull_microseconds: dict[str, Counter] = {}
    "Bytes and microseconds of those copies, by transport."
    readers: dict[str, Counter] = {}
    "Connections of instances that read this one's KV pool, by transport and event: `tcp/evicted`."
    tiers: dict[str, Counter] = {}
    "Counters of core/kv/tiers.py."
    storage: dict[str, Counter] = {}
    "Counters of the storage backend; they restart with every life of the cache service."
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
    "Number of lost cache services; another one was started each time."
    loop_lag_microseconds: Counter = 0
    "Longest delay of the engine's event loop in the last seconds."
    cache_loop_lag_microseconds: Counter = 0
    "Longest delay of the cache service's event loop in the last seconds."
    drafts: dict[str, Counter] = {}
    """Counters of speculation: `rows` with drafts, their draft `tokens`, and how many were accepted, by place in the draft
    ("0", "1", ...)."""
    step_tokens: dict[str, Counter] = {}
    "Steps by number of tokens: counts by STEP_TOKEN_BUCKETS and +Inf, and the sum."
    ended: dict[str, Counter] = {}
    "Ended sequences, by FinishReason."
    refused: dict[str, Counter] = {}
    "Refused requests, by RefusalReason."
    held_back: dict[str, Counter] = {}
    "Steps in which the head of the queue did not fit, by the resource that was short."
