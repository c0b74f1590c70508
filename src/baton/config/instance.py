"""Settings of the core: one instance machine, with its pool, scheduler, queue and tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from baton.config.values import DRAFTS_MAX, Seconds, StepTokens, require
from baton.ranges import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class KVConfig:
    """The device pool of one instance."""

    blocks: int = 1024
    "Blocks in the pool."
    block_size: int = 16
    "Tokens per block."
    prefix_caching: bool = True
    "Whether computed blocks are shared between requests. Off: only the n sequences of one request share their prompt."
    eviction: Literal["lru", "lfu"] = "lru"
    "Order in which unreferenced cached blocks are evicted (core/kv/eviction.py)."
    digest: bool = False
    "Keep a digest of the cached blocks for routers (core/kv/digest.py)."
    digest_changes_max: int = 16_384
    "Changes of the digest that are remembered for routers that are behind. Beyond it they are sent the whole digest again."

    def __post_init__(self) -> None:
        require(self.blocks >= 1, f"kv.blocks is {self.blocks}: a pool needs at least one block")
        require(self.digest_changes_max >= 1, "kv.digest_changes_max must be at least 1")
        require(self.block_size >= 1, f"kv.block_size is {self.block_size}: a block holds at least one token")


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Options of `baton serve` that the scheduler takes as they are."""

    chunk_tokens_max: StepTokens | None = None
    "Prompt tokens of one sequence per step, at most. Without it: all that the step has, and half of it while others wait."
    steps_in_flight: Annotated[int, Range(1, 64)] = 2
    "Steps sent to the worker before the result of the oldest is back."
    order: Literal["priority", "arrival"] = "priority"
    "Order of waiting requests: by priority (lower is more urgent) and then arrival, or by arrival alone."
    step_seconds_max: Seconds = 60.0
    """A worker is replaced that makes no progress in a step for this long, or gives no answer while it has no work; in any case
    after a step of 20 times as long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig(SchedulerOptions):
    """Limits of one step, and the caution of admission."""

    slots: int = 256
    "Maximum of sequences on the worker."
    tokens_per_step: int = 8192
    "Maximum of tokens per step, prompt and decode together."
    drafts_max: int = 0
    "Maximum of draft tokens per sequence and step (speculative decoding). 0: none."
    prompts_at_once: int = 4
    """Number of prompts longer than a step that may be computed concurrently: while there are fewer, a prompt leaves half of a
    step to waiting prompts of its class (core/engine/sharing.py). 1: prompts of a class are computed one after the other."""
    handoff_chunk_tokens_min: int = 512
    "Smallest chunk of a prompt that is handed over (core/engine/handoff_chunks.py)."
    prefill_tokens_beside_decodes: int | None = None
    "Maximum of prompt tokens in a step with decodes, whose next token waits for it. None: tokens_per_step."
    decode_gap_seconds: float | None = None
    "Maximum duration of a step with prompts beside decodes (core/engine/pace.py). None: no limit."
    reserve_start: float = 0.05
    "Expected share of max_tokens that a sequence uses, before any has ended. Admission keeps that much room free."
    reserve_learning: float = 0.0625
    "Weight of each ended sequence in that share. 0: the share is constant."
    reserve_clip_tokens: int = 4096
    "Maximum of tokens of a sequence's expected growth."
    new_bytes_max: int = 1024 * 1024
    "Maximum bytes of new sequences per plan. Further ones wait for the next plan; a single one may be larger."
    plan_bytes_max: int = 32 * 1024 * 1024
    "A request that could need a larger plan at its longest is refused. Half of what a frame may hold."
    pauses_max: int = 256
    "Orders to pause that wait for the drain at the same time. More are refused: they order nothing new."
    sleep_orders_max: int = 256
    "Maximum of waiting orders to sleep and to wake. Further ones are refused."
    worker_start_seconds_max: float = 600.0
    "Seconds after which a restarted worker that is not ready is lost."
    worker_stop_seconds_max: float = 60.0
    "Seconds that an order to sleep or to wake waits for the worker to end; then it is refused."
    worker_restarts_max: int = 5
    "Number of consecutive worker losses, without a healthy worker in between, after which the instance gives up."
    worker_kills_max: int = 5
    "Number of external kills of the worker within worker_kill_seconds that do not count as losses."
    worker_kill_seconds: float = 60.0
    "Window of worker_kills_max, in seconds during which workers were ready: their start is not counted."
    restart_backoff_seconds_max: float = 10.0
    "Maximum delay between consecutive restarts, which grows."

    def __post_init__(self) -> None:
        require(self.slots >= 1, f"scheduler.slots is {self.slots}: at least one sequence must be able to run")
        require(
            self.tokens_per_step >= self.slots,
            f"scheduler.tokens_per_step is {self.tokens_per_step}, less than scheduler.slots ({self.slots}): "
            "every running sequence needs one token of a step",
        )
        require(self.steps_in_flight >= 1, "scheduler.steps_in_flight must be at least 1")
        require(self.chunk_tokens_max is None or self.chunk_tokens_max >= 1, "scheduler.chunk_tokens_max must be at least 1")
        require(0 <= self.drafts_max <= DRAFTS_MAX, f"scheduler.drafts_max must be between 0 and {DRAFTS_MAX}")
        require(self.prompts_at_once >= 1, "scheduler.prompts_at_once must be at least 1")
        require(self.handoff_chunk_tokens_min >= 1, "scheduler.handoff_chunk_tokens_min must be at least 1")
        require(
            self.prefill_tokens_beside_decodes is None or self.prefill_tokens_beside_decodes >= 1,
            "scheduler.prefill_tokens_beside_decodes must be at least 1: prompts would wait for as long as anything decodes",
        )
        require(self.decode_gap_seconds is None or self.decode_gap_seconds > 0, "scheduler.decode_gap_seconds must be positive")
        require(
            min(self.new_bytes_max, self.plan_bytes_max, self.pauses_max, self.sleep_orders_max) >= 1,
            "scheduler.new_bytes_max, plan_bytes_max, pauses_max and sleep_orders_max must be at least 1",
        )
        require(0.0 <= self.reserve_start <= 1.0, "scheduler.reserve_start must be between 0 and 1")
        require(0.0 <= self.reserve_learning <= 1.0, "scheduler.reserve_learning must be between 0 and 1")
        require(self.reserve_clip_tokens >= 1, "scheduler.reserve_clip_tokens must be at least 1")
        require(
            min(self.step_seconds_max, self.worker_start_seconds_max, self.worker_stop_seconds_max) > 0,
            "scheduler.step_seconds_max, worker_start_seconds_max and worker_stop_seconds_max must be positive",
        )
        require(self.worker_restarts_max >= 0, "scheduler.worker_restarts_max must not be negative")
        require(self.worker_kills_max >= 1 and self.worker_kill_seconds > 0, "scheduler: the bounds of kills are too small")
        require(self.restart_backoff_seconds_max >= 0, "scheduler.restart_backoff_seconds_max must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueConfig:
    """Limits of the queue. A request beyond them is refused at once, with the numbers."""

    requests_max: int = 1024
    "Sequences waiting for their first admission; preempted ones do not count."
    tokens_max: int = 1_000_000
    "Prompt tokens of the sequences waiting for their first admission."

    def __post_init__(self) -> None:
        require(self.requests_max >= 1 and self.tokens_max >= 1, "queue: both bounds must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class CircuitConfig:
    """The circuit breaker of a lower tier (core/kv/circuit.py)."""

    failures_max: int = 3
    "Failures or timeouts in a row that open the circuit."
    open_seconds: float = 1.0
    "First wait before a probe; it doubles with every probe that fails."
    open_seconds_max: float = 60.0
    probe_seconds_max: float = 30.0
    "A probe that has not come back by then counts as failed."
    permits_max: int = 4096
    "Open permits that are remembered. The end of an older one is ignored."

    def __post_init__(self) -> None:
        require(min(self.failures_max, self.permits_max) >= 1, "tiers.circuit: a bound is below 1")
        require(0.0 < self.open_seconds <= self.open_seconds_max, "tiers.circuit.open_seconds must be at most open_seconds_max")
        require(self.probe_seconds_max > 0.0, "tiers.circuit.probe_seconds_max must be positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class TierConfig:
    """Tiers for KV blocks below the device (core/kv/tiers.py)."""

    host_blocks: int = 0
    "Blocks of the host tier. 0: no tiers. Storage needs some, because its blocks pass through them."
    storage: bool = False
    write: Literal["through", "selective", "back"] = "through"
    """Blocks that are copied to lower tiers. through: each when it is computed. selective: after `write_hits` prefix hits.
    back: when the device runs out of blocks, those that would be evicted next."""
    write_outputs: bool = True
    "Whether generated tokens are copied too, not only prompts; with through."
    write_hits: int = 1
    watermark: float = 0.25
    "Share of blocks that is kept free or copied; with back."
    write_back_blocks: int = 64
    "Number of blocks per copy; with back."
    preempted: Literal["storage", "host", "drop"] = "drop"
    "Lowest tier to which the KV of a preempted sequence is copied at once."
    storage_seconds_max: float = 1.0
    "Seconds for a query or a move of storage."
    memory_seconds_max: float = 10.0
    "A copy in memory that takes longer means that the cache service hangs."
    circuit: CircuitConfig = field(default_factory=CircuitConfig)
    "When storage that fails is not called for a while; reads and writes each have such a circuit."
    load_blocks_min: int = 1
    "Minimum of blocks to load. Fewer blocks are computed instead."
    peers: bool = False
    """Whether the cache service can copy blocks of other instances: then a prompt may be computed there
    (core/handoff/destination.py)."""
    pull_seconds_max: float = 5.0
    "Seconds for a copy from another instance. Blocks that are missing then are computed."
    release_seconds_max: float = 2.0
    "Seconds in which the other instance must confirm that the copied blocks are the offered ones."
    queries_max: int = 64
    "Concurrent queries to storage. Further requests are queried as replies come in."
    store_blocks_max: int = 1024
    "Blocks that are being copied to the host. Beyond it blocks are not copied: the service is far behind."
    put_blocks: int = 32
    "Blocks per put to storage. Several puts run concurrently."
    spare_seconds: float = 0.05
    "Seconds that a request waits for a lower tier beyond the time to compute."
    load_again_after: int = 32
    "Number of loads that were not worth it after which one is made anyway: the rate is measured again."
    reservations_max: int = 1024
    "Maximum of requests that wait for a prompt which another instance computes."
    reservations_waiting_max: int = 64
    "Maximum of reservations that wait for room. Beyond it the least urgent is refused."
    kept_max: int = 256
    "Maximum of computed prompts that wait to be copied by another instance. Beyond it the oldest lapses."
    attempts_max: int = 4096
    "Number of requests whose highest hand-off attempt is remembered."

    @property
    def adopt_seconds_max(self) -> float:
        """Seconds from the last offer of a prompt, computed by another instance, until it continues here."""
        return self.pull_seconds_max + self.release_seconds_max

    def __post_init__(self) -> None:
        require(self.host_blocks >= 0 and self.write_hits >= 1 and self.load_blocks_min >= 1, "tiers: a number is too small")
        copies = min(self.queries_max, self.store_blocks_max, self.put_blocks, self.load_again_after)
        handoffs = min(self.reservations_max, self.reservations_waiting_max, self.kept_max, self.attempts_max)
        require(min(copies, handoffs) >= 1, "tiers: a bound is below 1")
        require(self.pull_seconds_max > 0.0 and self.release_seconds_max > 0.0, "tiers: a hand-off needs time")
        require(0.0 <= self.watermark <= 1.0, "tiers.watermark must be between 0 and 1")
        require(not self.storage or self.host_blocks > 0, "tiers: storage needs host blocks that its blocks pass through")
        require(self.preempted == "drop" or self.host_blocks > 0, "tiers.preempted needs a host tier or storage")
        require(self.preempted != "storage" or self.storage, "tiers.preempted is storage, and there is none")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceConfig:
    """All settings of the instance machine (core/instance.py)."""

    kv: KVConfig = field(default_factory=KVConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
