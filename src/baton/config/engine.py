"""Settings of the processes of one instance: engine, worker, cache service."""

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
"""Defaults are defined once, by the owner of the setting."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """Settings of the worker process."""

    model: str = "smollm2"
    "A folder, a .gguf file, a Hugging Face id, or an alias."
    device: Device = "auto"
    "Compute device (worker/platforms/choose.py)."
    device_index: Annotated[int, Range(0, 1023)] = 0
    "Index among the visible GPUs (CUDA_VISIBLE_DEVICES). `baton up` spreads its instances over them."
    device_sharers: Annotated[int, Range(1, 1024)] = 1
    "Instances on that GPU, this one included. They divide memory_utilization."
    device_place: Annotated[int, Range(0, 1023)] = 0
    "Index of this instance on the GPU: instances before it have taken their memory when it measures the rest (runtime/up.py)."
    dtype: Dtype = "auto"
    "Data type of activations."
    deterministic: bool = False
    "On a GPU: the bits of an answer do not depend on the other requests. The C kernels of a CPU are always deterministic."
    load_format: LoadFormat = "auto"
    "Source of weights: the model's files, or random numbers."
    model_shape: str = ""
    "With dummy weights: a name of models/shapes.py instead of the model's own shape."
    quantization: Quantization = "auto"
    "Storage and arithmetic of weights."
    kv_dtype: KVCacheType = "auto"
    "Data type of the KV cache."
    compute: Compute = "auto"
    "Kernel backend."
    threads: Threads = 0
    "Compute threads. 0: one per core."
    generation_config: GenerationConfig = "auto"
    "Default sampling of requests: the recommendation of the model's files, or OpenAI's defaults."
    context_tokens_max: ContextTokens | None = None
    "Maximum length of a sequence, prompt and output. None: the model's context, or what the pool holds if that is less."
    blocks: Blocks | None = None
    "KV blocks. None: as many as memory_utilization leaves room for, or kv_memory_gib holds."
    memory_utilization: Share | None = None
    "Share of the memory for weights, steps and KV pool together; the pool's part is measured (worker/profile.py)."
    kv_memory_gib: Gibibytes | None = None
    "Memory for the KV pool, if blocks and memory_utilization are None. None: 2 on a CPU; on a GPU memory_utilization is 0.9."
    memory_reserved_gib: Annotated[float, Range(0, 1_000_000)] = 0.0
    "Memory of memory_utilization that the pool leaves free, because it is allocated later."
    block_size: BlockSize = _KV.block_size
    slots: Slots = CPU.slots
    tokens_per_step: StepTokens = CPU.tokens_per_step
    "Maximum size of a step."
    by_device: tuple[str, ...] = ()
    "Step sizes that were not given; the worker chooses them for its device (device_defaults.py)."
    pool: PoolAccess = "private"
    "Who creates the KV pool; set by the engine from its row of core/startup.py."
    start_seconds_max: Seconds = _SCHEDULER.worker_start_seconds_max
    "How long the worker waits for a pool that another process creates."
    epoch: int = 1
    "Epoch of the worker, counted by the engine."

    def __post_init__(self) -> None:
        check_values(self)


STAGING_GIB = 0.25
"""Memory for blocks on their way to and from storage, without a host tier."""
STAGING_BLOCKS_MIN = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TiersConfig:
    """Tiers of KV blocks below the device. Neither host nor storage: no tiers."""

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
        """Size of the host pool. Without a host tier: the staging memory for storage."""
        if not self:
            return 0.0
        return self.host_gib if self.host_gib > 0 else STAGING_GIB

    def host_blocks(self, block_bytes: int) -> int:
        if not self:
            return 0
        return max(STAGING_BLOCKS_MIN, int(self.memory_gib * 2**30) // max(block_bytes, 1))

    def machine(self, block_bytes: int) -> TierConfig:
        """The tiers in the form of the core."""
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
    """Settings of the cache service."""

    tiers: TiersConfig = field(default_factory=TiersConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    "The worker's settings: a messenger that creates the pool before there is a worker derives the layout from them."
    peer: str = ""
    """Addresses at which the messenger lets other instances read the pool, separated by blanks; set by the engine. Empty: none
    yet."""
    cluster_secret: str = ""
    "File with the secret that messengers of other machines must know. Empty: only messengers of this machine."
    wire: WireConfig = field(default_factory=WireConfig)
    log_level: LogLevel
    log_format: LogFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Settings of the engine process."""

    instance: InstanceConfig = field(default_factory=InstanceConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    role: Role = "mixed"
    tiers: TiersConfig = field(default_factory=TiersConfig)
    "Not used without prefix caching."
    peer: str = ""
    "Address at which other instances read its pool; the engine chooses it."
    routers: tuple[str, ...] = ()
    "Addresses of the routers that it serves (addresses.py). Empty: only its front."
    cluster_secret: str = ""
    "File with the secret of the cluster. No configuration contains the secret itself."
    transfer_address: str = "auto"
    "Address for messengers of other machines: HOST:PORT; auto: derived from the connection to the router; none: no address."
    name: str = ""
    "Name in the cluster: unique, and stable across restarts."
    health_url: str = ""
    "URL of the HTTP server beside the engine, for operators."
    wire: WireConfig = field(default_factory=WireConfig)
    "Limits of its connections with routers and other instances."
    drain_seconds_max: float = 30.0
    "After a request to stop, requests of its routers may run this long; then other instances continue them."
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def cache(self) -> CacheConfig:
        return part_of(self, CacheConfig)
