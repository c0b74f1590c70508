"""What the processes of one instance are told: engine, worker, cache service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from baton.config.device_defaults import CPU
from baton.config.instance import InstanceConfig, KVConfig, SchedulerConfig, TierConfig
from baton.config.parts import part_of
from baton.config.values import (
    Blocks,
    BlockSize,
    Compute,
    ContextTokens,
    Device,
    Dtype,
    GenerationConfig,
    Gibibytes,
    KVCacheType,
    LoadFormat,
    LogFormat,
    LogLevel,
    PoolAccess,
    Quantization,
    Role,
    Seconds,
    Share,
    Slots,
    StepTokens,
    Threads,
    require,
)
from baton.config.wire import WireConfig
from baton.ranges import Range, check_values

_KV, _SCHEDULER, _TIER = KVConfig(), SchedulerConfig(), TierConfig()
"""A default is said once, by the owner of the setting. Others take it from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What the worker process is told."""

    model: str = "smollm2"
    "A folder, a .gguf file, a Hugging Face id, or an alias."
    device: Device = "auto"
    "Compute device (worker/platforms/choose.py)."
    device_index: Annotated[int, Range(0, 1023)] = 0
    "Which of the GPUs that are visible (CUDA_VISIBLE_DEVICES). `baton up` spreads its instances over them."
    device_sharers: Annotated[int, Range(1, 1024)] = 1
    "Instances on that GPU, this one included. They divide memory_utilization."
    device_place: Annotated[int, Range(0, 1023)] = 0
    "Its place among them: so many have taken their part of the memory before it measures what is left (runtime/up.py)."
    dtype: Dtype = "auto"
    "Data type of activations."
    deterministic: bool = False
    "On a GPU: the bits of an answer do not depend on what else runs. Native kernels of a CPU are always so."
    load_format: LoadFormat = "auto"
    "Where weights come from: the model's files, or chance."
    model_shape: str = ""
    "With dummy weights: a name of models/shapes.py instead of the model's own shape."
    quantization: Quantization = "auto"
    "How weights are kept and computed on."
    kv_dtype: KVCacheType = "auto"
    "What the KV cache holds."
    compute: Compute = "auto"
    "Kernel backend."
    threads: Threads = 0
    "Compute threads. 0: one per core."
    generation_config: GenerationConfig = "auto"
    "Sampling of requests that do not say: as the model's files recommend, or OpenAI's defaults."
    context_tokens_max: ContextTokens | None = None
    "Longest sequence, prompt and output. None: what the model was made for, or what the pool holds if that is less."
    blocks: Blocks | None = None
    "KV blocks. None: as many as memory_utilization leaves room for, or kv_memory_gib holds."
    memory_utilization: Share | None = None
    "Share of the memory for weights, steps and KV pool together; how much of it the pool gets is measured (worker/profile.py)."
    kv_memory_gib: Gibibytes | None = None
    "Memory for the KV pool, where neither of them is given. None: 2 on a CPU; on a GPU memory_utilization is 0.9 then."
    memory_reserved_gib: Annotated[float, Range(0, 1_000_000)] = 0.0
    "Memory that is taken after the KV pool: of memory_utilization the pool leaves so much."
    block_size: BlockSize = _KV.block_size
    slots: Slots = CPU.slots
    tokens_per_step: StepTokens = CPU.tokens_per_step
    "The largest step that is ever run."
    by_device: tuple[str, ...] = ()
    "Sizes of steps that the worker chooses for its device (device_defaults.py): these are not given."
    pool: PoolAccess = "private"
    "Whose the KV pool is; the engine says it by its row of core/startup.py."
    start_seconds_max: Seconds = _SCHEDULER.worker_start_seconds_max
    "How long it waits for a pool that it is to be handed."
    epoch: int = 1
    "Which life of the worker this is; the engine counts."

    def __post_init__(self) -> None:
        check_values(self)


STAGING_GIB = 0.25
"""Memory that blocks pass through on their way to and from storage, where there is no host tier."""
STAGING_BLOCKS_MIN = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TiersConfig:
    """Where KV blocks are kept besides the device. Neither: there are no tiers."""

    host_gib: Annotated[float, Range(0, 1_000_000)] = 0.0
    "Memory of the host tier. 0: none."
    storage: str = ""
    "URL of the storage tier (kvcache/storage/open.py). Empty: none."
    write: Literal["through", "selective", "back"] = _TIER.write
    write_outputs: bool = _TIER.write_outputs
    preempted: Literal["auto", "storage", "host", "drop"] = "auto"

    def __post_init__(self) -> None:
        check_values(self)
        require(
            self.preempted not in ("storage", "host") or bool(self),
            f"preempted_kv is {self.preempted}, and there is no tier: give kv_host_gib or kv_storage too",
        )
        require(
            self.preempted != "storage" or bool(self.storage), "preempted_kv is storage, and there is none: give kv_storage too"
        )
        require(
            self.preempted != "host" or self.host_gib > 0,
            "preempted_kv is host, and there is no host tier: give kv_host_gib too",
        )

    def __bool__(self) -> bool:
        return self.host_gib > 0 or bool(self.storage)

    @property
    def memory_gib(self) -> float:
        """Of the host pool. Without a host tier: what blocks need on their way to and from storage."""
        if not self:
            return 0.0
        return self.host_gib if self.host_gib > 0 else STAGING_GIB

    def host_blocks(self, block_bytes: int) -> int:
        if not self:
            return 0
        return max(STAGING_BLOCKS_MIN, int(self.memory_gib * 2**30) // max(block_bytes, 1))

    def machine(self, block_bytes: int) -> TierConfig:
        """What the core is told of them."""
        lowest: Literal["storage", "host", "drop"] = "storage" if self.storage else "host" if self else "drop"
        return TierConfig(
            host_blocks=self.host_blocks(block_bytes),
            storage=bool(self.storage),
            write=self.write,
            write_outputs=self.write_outputs,
            preempted=lowest if self.preempted == "auto" else self.preempted,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """What the cache service is told."""

    tiers: TiersConfig = field(default_factory=TiersConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    "Of the worker beside it: a messenger that makes the pool before there is a worker looks there for the layout."
    peer: str = ""
    """Addresses at which its messenger lets other instances read the pool, with blanks between them; the engine says them.
    Empty: nowhere by now."""
    cluster_secret: str = ""
    "File with the secret that messengers of other machines must know. Empty: only those of this one are read or served."
    wire: WireConfig = field(default_factory=WireConfig)
    log_level: LogLevel
    log_format: LogFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What the engine process is told."""

    instance: InstanceConfig = field(default_factory=InstanceConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    role: Role = "mixed"
    tiers: TiersConfig = field(default_factory=TiersConfig)
    "Without prefix caching they are not used."
    peer: str = ""
    "Where other instances may read its pool; the engine finds a place."
    routers: tuple[str, ...] = ()
    "Addresses of the routers that it serves (addresses.py). None: only its front."
    cluster_secret: str = ""
    "File with the secret of the cluster. The secret itself is in no configuration."
    transfer_address: str = "auto"
    "Where messengers of other machines dial: HOST:PORT; auto: found out from the way to the router; none: nowhere."
    name: str = ""
    "In the cluster: unique, and the same after a restart."
    health_url: str = ""
    "Of the HTTP beside it, for people."
    wire: WireConfig = field(default_factory=WireConfig)
    "Bounds of its connections with routers and other instances."
    drain_seconds_max: float = 30.0
    "When it is told to end, requests of its routers may run so long; then others go on with them."
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def cache(self) -> CacheConfig:
        return part_of(self, CacheConfig)
