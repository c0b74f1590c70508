"""What the core is told: one instance machine, with its pool, scheduler, queue and tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from baton.config.values import require


@dataclass(frozen=True, kw_only=True, slots=True)
class KVConfig:
    """The device pool of one instance."""

    blocks: int = 1024
    "Blocks in the pool."
    block_size: int = 16
    "Tokens a block holds."
    prefix_caching: bool = True
    "Share computed blocks between requests. Off: only the n sequences of one request share their prompt."
    eviction: Literal["lru", "lfu"] = "lru"
    "Which unreferenced cached block goes first (core/kv/eviction.py)."

    def __post_init__(self) -> None:
        require(self.blocks >= 1, f"kv.blocks is {self.blocks}: a pool needs at least one block")
        require(self.block_size >= 1, f"kv.block_size is {self.block_size}: a block holds at least one token")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """What one step may hold, and how careful admission is."""

    slots: int = 256
    "Sequences that may sit on the worker at once."
    tokens_per_step: int = 8192
    "Upper bound of tokens, prompt and decode together, in one step."
    chunk_tokens_max: int | None = None
    "Upper bound of prompt tokens of one sequence in one step. None: only tokens_per_step bounds it."
    prompts_at_once: int = 4
    """Prompts longer than a step that may be under way at once: while there are fewer, a prompt leaves half of a step to others
    of its class that wait (core/engine/sharing.py). 1: prompts of a class are computed one after the other."""
    prefill_tokens_beside_decodes: int | None = None
    "Upper bound of prompt tokens in a step in which others decode: their next token waits for it. None: as tokens_per_step."
    decode_gap_seconds: float | None = None
    "How long a step may take in which prompts are computed beside decodes (core/engine/pace.py). None: as long as it takes."
    steps_in_flight: int = 2
    "Plans handed to the worker before the oldest result is in. 2 hides the scheduler behind the worker."
    order: Literal["priority", "arrival"] = "priority"
    "Order of waiting requests: by priority (lower is more urgent) and then arrival, or by arrival alone."
    reserve_start: float = 0.05
    "Share of max_tokens that a sequence is expected to use, before any has ended. Admission keeps that much room free."
    reserve_learning: float = 0.0625
    "How much the end of one sequence counts in that share. 0: it stays as it is."
    reserve_clip_tokens: int = 4096
    "A sequence's expected growth is counted up to this many tokens."
    new_bytes_max: int = 1024 * 1024
    "New sequences of one plan, in bytes on the wire. More wait for the next plan; one alone may be larger."
    plan_bytes_max: int = 32 * 1024 * 1024
    "A request that could need a plan of more bytes than this, at its longest, is refused. Half of what a frame may hold."
    sleep_orders_max: int = 256
    "Orders to sleep, and orders to wake, that wait for the worker at once. More are refused."
    step_seconds_max: float = 60.0
    "A step without a result and without progress for this long means that the worker is lost; so does one 20 times as long."
    worker_start_seconds_max: float = 600.0
    "A restarted worker that is not ready after this long is lost too."
    worker_stop_seconds_max: float = 60.0
    "An order to sleep or to wake waits so long for the worker to end; then it is refused."
    worker_restarts_max: int = 5
    "Worker losses in a row, none of them healthy in between, after which the instance gives up."
    worker_kills_max: int = 5
    "Kills of the worker from outside, within worker_kill_seconds, that do not count as losses. Each one more does."
    worker_kill_seconds: float = 60.0
    "Time for those, in which workers were ready: their start is not counted."
    restart_backoff_seconds_max: float = 10.0
    "Restarts in a row wait longer and longer, up to this."

    def __post_init__(self) -> None:
        require(self.slots >= 1, f"scheduler.slots is {self.slots}: at least one sequence must be able to run")
        require(
            self.tokens_per_step >= self.slots,
            f"scheduler.tokens_per_step is {self.tokens_per_step}, less than scheduler.slots ({self.slots}): "
            "every running sequence needs one token of a step",
        )
        require(self.steps_in_flight >= 1, "scheduler.steps_in_flight must be at least 1")
        require(self.chunk_tokens_max is None or self.chunk_tokens_max >= 1, "scheduler.chunk_tokens_max must be at least 1")
        require(self.prompts_at_once >= 1, "scheduler.prompts_at_once must be at least 1")
        require(
            self.prefill_tokens_beside_decodes is None or self.prefill_tokens_beside_decodes >= 1,
            "scheduler.prefill_tokens_beside_decodes must be at least 1: prompts would wait for as long as anything decodes",
        )
        require(self.decode_gap_seconds is None or self.decode_gap_seconds > 0, "scheduler.decode_gap_seconds must be positive")
        require(
            min(self.new_bytes_max, self.plan_bytes_max, self.sleep_orders_max) >= 1,
            "scheduler.new_bytes_max, plan_bytes_max and sleep_orders_max must be at least 1",
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
    """How much may wait. Over it a request is refused at once, with the numbers."""

    requests_max: int = 1024
    "Sequences waiting for their first admission; a preempted one keeps its place and does not count."
    tokens_max: int = 1_000_000
    "Prompt tokens of those sequences."

    def __post_init__(self) -> None:
        require(self.requests_max >= 1 and self.tokens_max >= 1, "queue: both bounds must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class TierConfig:
    """Where KV goes that the device has no room for (core/kv/tiers.py)."""

    host_blocks: int = 0
    "Of the host tier. 0: there are no tiers. Storage needs some, which its blocks pass through."
    storage: bool = False
    write: Literal["through", "selective", "back"] = "through"
    """Which blocks are copied down. through: each when it is computed. selective: when it was found again `write_hits` times.
    back: when the device runs out of blocks, the ones that would be evicted next."""
    write_outputs: bool = True
    "With through: what was generated too, not only prompts."
    write_hits: int = 1
    watermark: float = 0.25
    "With back: the share of blocks that are kept free or copied."
    write_back_blocks: int = 64
    "With back: copied at once."
    preempted: Literal["storage", "host", "drop"] = "drop"
    "How far down the KV of a preempted sequence goes at once."
    storage_seconds_max: float = 1.0
    "How long storage may take for a question or a move."
    memory_seconds_max: float = 10.0
    "A copy in memory that takes longer means that the cache service hangs."
    load_blocks_min: int = 1
    "Fewer are computed rather than loaded."
    peers: bool = False
    "The cache service can copy blocks of other instances: a prompt may be computed there (core/handoff/destination.py)."
    pull_seconds_max: float = 5.0
    "How long such a copy may take. What is not here by then is computed."
    release_seconds_max: float = 2.0
    "How long the other instance may take to say that what was copied is what it offered."
    queries_max: int = 64
    "Questions to storage at once. Those behind in line are asked for as answers come in."
    store_blocks_max: int = 1024
    "Blocks that are being copied to the host at once. More are not copied: the service is far behind."
    put_blocks: int = 32
    "Blocks of one put to storage. Several puts are under way at once."
    spare_seconds: float = 0.05
    "A request waits for a lower tier so much longer than computing would take."
    load_again_after: int = 32
    "After so many loads that were not worth it one is made all the same: the rate is measured again."
    reservations_max: int = 1024
    "Requests that wait here for a prompt which another instance computes."
    kept_max: int = 256
    "Computed prompts that wait for another instance to copy them. One more: the oldest lapses."
    attempts_max: int = 4096
    "Requests of hand-offs whose highest attempt is remembered."

    @property
    def adopt_seconds_max(self) -> float:
        """From the last offer of a prompt that another instance computed until it goes on here."""
        return self.pull_seconds_max + self.release_seconds_max

    def __post_init__(self) -> None:
        require(self.host_blocks >= 0 and self.write_hits >= 1 and self.load_blocks_min >= 1, "tiers: a number is too small")
        copies = min(self.queries_max, self.store_blocks_max, self.put_blocks, self.load_again_after)
        handoffs = min(self.reservations_max, self.kept_max, self.attempts_max)
        require(min(copies, handoffs) >= 1, "tiers: a bound is below 1")
        require(self.pull_seconds_max > 0.0 and self.release_seconds_max > 0.0, "tiers: a hand-off needs time")
        require(0.0 <= self.watermark <= 1.0, "tiers.watermark must be between 0 and 1")
        require(not self.storage or self.host_blocks > 0, "tiers: storage needs host blocks that its blocks pass through")
        require(self.preempted == "drop" or self.host_blocks > 0, "tiers.preempted needs a host tier or storage")
        require(self.preempted != "storage" or self.storage, "tiers.preempted is storage, and there is none")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceConfig:
    """Everything the instance machine (core/instance.py) is told."""

    kv: KVConfig = field(default_factory=KVConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    tiers: TierConfig = field(default_factory=TierConfig)
