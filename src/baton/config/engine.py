"""Settings of the processes of one instance: engine, worker, cache service."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from baton.config.credentials import MemberOptions
from baton.config.device_defaults import CPU
from baton.config.instance import InstanceConfig, KVConfig, SchedulerConfig, TierConfig
from baton.config.parts import part_of
from baton.config.values import (
    RANKS_MAX,
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
    Ranks,
    Role,
    Seconds,
    Share,
    Slots,
    Speculate,
    StepTokens,
    Threads,
    require,
)
from baton.config.wire import WireConfig
from baton.ranges import Range, check_values

_KV, _SCHEDULER, _TIER = KVConfig(), SchedulerConfig(), TierConfig()
"""Defaults are defined once, by the owner of the setting."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of `baton serve` that the worker takes as they are."""

    model: str = "smollm2"
    """A folder, a .gguf file, a Hugging Face id (owner/model, or owner/model:QUANT for a GGUF file), or an alias (baton models
    lists them)."""
    device: Device = "auto"
    """Compute device. cuda: an NVIDIA GPU, with torch. cpu: C kernels. auto: a GPU if torch sees one and the model is no GGUF
    file. Other names come with plug-ins."""
    dtype: Dtype = "auto"
    "Data type of activations, and on a GPU of weights and KV cache. auto: float32 on a CPU, bfloat16 on a GPU."
    deterministic: bool = False
    """On a GPU: an answer has the same bits whatever else runs beside it; slower (docs/gpu.md). The C kernels of a CPU need no
    such option."""
    load_format: LoadFormat = "auto"
    "Where weights come from. auto: the model's files. dummy: random numbers, to measure speed."
    model_shape: str = ""
    """With --load-format dummy: shape of a well-known model instead of the model's own (llama-3-8b, qwen3-8b, ...). Text is
    still the model's."""
    quantization: Quantization = "auto"
    """How weights are stored and multiplied. auto: 4-bit weights as the file has them, all others in 8 bits.
    int8: all in 8 bits; fastest for prompts and many requests at once. int4: all in 4 bits, but embedding and output head in 8
    where the file does not have them in 4; fastest for one request at a time, and smallest.
    none: float32, dequantised at load; the exact mode, and the slowest. On a GPU auto and none: as --dtype says; fp8:
    matrices of layers in 8 bits, with a scale for each output."""
    compute: Compute = "auto"
    "Kernel backend. native: C, compiled at first use. torch: several times slower. auto: native if there is a C compiler."
    threads: Threads = 0
    "Compute threads. 0: one per core."
    speculate: Speculate = "none"
    """Speculative decoding: draft tokens are verified several at a time, and never change an answer (docs/speculation.md).
    ngram: drafts are what followed the last tokens earlier in the prompt or the answer; for answers that repeat parts of their
    prompt. grammar: the text that structured output forces, such as names of properties. auto: both. draft:MODEL: a smaller
    model with the same vocabulary drafts (a folder, a .gguf file, a Hugging Face id or an alias), beside grammar."""
    generation_config: GenerationConfig = "auto"
    """Sampling of requests that name none. auto: as the model's generation_config.json (or GGUF metadata) recommends, else
    llama.cpp's defaults (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05). none: OpenAI's defaults (temperature 1)."""
    kv_memory_gib: Gibibytes | None = None
    """Memory for the KV cache, in GiB; several ranks divide it. It counts where neither kv_blocks nor gpu_memory_utilization is
    given. Without it: 2 on a CPU; on a GPU gpu_memory_utilization is 0.9."""
    block_size: BlockSize = _KV.block_size
    "Tokens per KV block."
    start_seconds_max: Seconds = _SCHEDULER.worker_start_seconds_max
    "How long loading may take, from the start of the processes. A download of the model comes before and is not counted."


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig(WorkerOptions):
    """Settings of a worker process."""

    device_index: Annotated[int, Range(0, 1023)] = 0
    """Index among the visible GPUs (CUDA_VISIBLE_DEVICES), or with several ranks among groups of this many. `baton up` spreads
    its instances over them."""
    device_sharers: Annotated[int, Range(1, 1024)] = 1
    "Number of instances on that GPU, this one included. They divide memory_utilization."
    device_place: Annotated[int, Range(0, 1023)] = 0
    "Index of this instance on the GPU: instances before it have taken their memory when it measures the rest (runtime/up.py)."
    kv_dtype: KVCacheType = "auto"
    "Data type of the KV cache."
    context_tokens_max: ContextTokens | None = None
    "Maximum length of a sequence, prompt and output. None: the model's context, or what the pool holds if that is less."
    blocks: Blocks | None = None
    "KV blocks. None: as many as memory_utilization leaves room for, or kv_memory_gib holds."
    memory_utilization: Share | None = None
    "Share of the memory for weights, steps and KV pool together; the pool's part is measured (worker/profile.py)."
    memory_reserved_gib: Annotated[float, Range(0, 1_000_000)] = 0.0
    "Bytes of memory_utilization that the pool leaves free, because they are allocated later."
    slots: Slots = CPU.slots
    tokens_per_step: StepTokens = CPU.tokens_per_step
    "Maximum of tokens per step."
    by_device: tuple[str, ...] = ()
    "Step sizes that were not given; the worker chooses them for its device (device_defaults.py)."
    pool: PoolAccess = "private"
    "How the worker gets the KV pool; set by the engine from its row of core/startup.py."
    epoch: int = 1
    "Epoch of the worker, counted by the engine."
    ranks: Ranks = 1
    "Processes that compute the model together, each with a part of its weights and heads: the worker set."
    rank: Annotated[int, Range(0, RANKS_MAX - 1)] = 0
    "Index of this process in its worker set."
    pool_incarnation: int = 0
    "Incarnation of the KV pool that the worker creates, less its rank (protocol/pool.py). 0: a random one, for a single rank."
    rendezvous: str = ""
    """Private directory of this epoch of the set, in which its ranks find each other (torch.distributed); in the engine's
    settings, the directory above it. Empty: one rank."""

    def __post_init__(self) -> None:
        check_values(self)

    @property
    def gpu_index(self) -> int:
        """Index of this rank's GPU among the visible ones: an instance has as many in a row as ranks."""
        return self.device_index * self.ranks + self.rank


STAGING_GIB = 0.25
"""Bytes of staging memory for blocks on their way to and from storage, without a host tier."""
STAGING_BLOCKS_MIN = 16


@dataclass(frozen=True, kw_only=True)
class TiersOptions:
    """Options of `baton serve` for the tiers of the KV cache."""

    kv_host_gib: Annotated[float, Range(0, 1_000_000)] = 0.0
    """Memory, in GiB, for KV blocks that the KV cache has no room for: a second tier of the prefix cache. Several ranks divide
    it. 0: none."""
    kv_storage: str = ""
    """Where KV blocks are kept beyond this server's life: file:DIR, redis://HOST:PORT, mooncake://MASTER:PORT. Also the
    scheme of an installed plug-in. A third tier of the prefix cache, which several servers may share. Empty: nowhere."""
    kv_write: Literal["through", "selective", "back"] = _TIER.write
    """When a KV block is copied to the lower tiers. through: when it is computed. selective: when it was used again. back: when
    the KV cache runs out of room, those that would be evicted next."""
    kv_write_outputs: bool = _TIER.write_outputs
    "With through: copy what was generated too, for the next turn of a chat. Without: only prompts."
    preempted_kv: Literal["auto", "storage", "host", "drop"] = "auto"
    """Where the KV of a preempted request goes, to be found when it continues. auto: the lowest tier there is. drop: it is
    computed again, unless it is still in the KV cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TiersConfig(TiersOptions):
    """Tiers of KV blocks below the device. Neither host nor storage: no tiers."""

    def __post_init__(self) -> None:
        check_values(self)
        require(
            self.preempted_kv not in ("storage", "host") or bool(self),
            f"preempted_kv is {self.preempted_kv}, and there is no tier: give kv_host_gib or kv_storage too",
        )
        require(
            self.preempted_kv != "storage" or bool(self.kv_storage),
            "preempted_kv is storage, and there is none: give kv_storage too",
        )
        require(
            self.preempted_kv != "host" or self.kv_host_gib > 0,
            "preempted_kv is host, and there is no host tier: give kv_host_gib too",
        )

    def __bool__(self) -> bool:
        return self.kv_host_gib > 0 or bool(self.kv_storage)

    @property
    def memory_gib(self) -> float:
        """Size of the host pool. Without a host tier: the staging memory for storage."""
        if not self:
            return 0.0
        return self.kv_host_gib if self.kv_host_gib > 0 else STAGING_GIB

    def host_blocks(self, block_bytes: int) -> int:
        if not self:
            return 0
        return max(STAGING_BLOCKS_MIN, int(self.memory_gib * 2**30) // max(block_bytes, 1))

    def machine(self, block_bytes: int) -> TierConfig:
        """The tiers in the form of the core."""
        lowest: Literal["storage", "host", "drop"] = "storage" if self.kv_storage else "host" if self else "drop"
        return TierConfig(
            host_blocks=self.host_blocks(block_bytes),
            storage=bool(self.kv_storage),
            write=self.kv_write,
            write_outputs=self.kv_write_outputs,
            preempted=lowest if self.preempted_kv == "auto" else self.preempted_kv,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig(MemberOptions):
    """Settings of the cache service. Without a cluster_secret only messengers of this machine read the pool."""

    tiers: TiersConfig = field(default_factory=TiersConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    "The worker's settings: a messenger that creates the pool before there is a worker derives the layout from them."
    peer: str = ""
    """Addresses at which the messenger lets other instances read the pool, separated by blanks; set by the engine. Empty: none
    yet. With several ranks a line for each."""
    wire: WireConfig = field(default_factory=WireConfig)
    log_level: LogLevel
    log_format: LogFormat


@dataclass(frozen=True, kw_only=True)
class EngineOptions(MemberOptions):
    """Options of `baton serve` that the engine takes as they are."""

    role: Role = "mixed"
    """Work of the instance for its routers. prefill: computes prompts, which others continue. decode: continues prompts that
    others have computed, and computes short ones. mixed: serves requests from beginning to end."""
    transfer_address: str = "auto"
    """Where instances on other machines read this one's KV cache in a hand-off: HOST:PORT (port 0: any that is free), an
    address that they reach, or 0.0.0.0 or [::] for all. With several ranks PORT is that of the first, and each of the others
    has the next one. auto: where this machine is seen from its router, any free port, and nothing if the router is on this
    machine (but a KV cache on a GPU). none: nowhere. Only who knows the secret is served."""
    transfer_announce: str = ""
    """Address at which other instances reach transfer_address, where that is not its own: HOST:PORT of a machine that forwards
    the port (NAT, a container with -p). With several ranks the ports after it are forwarded too, one for each."""
    drain_seconds_max: Annotated[float, Range(0, 31_536_000)] = 30.0
    "How long running requests may take to finish after Ctrl-C. Those that do not are ended with an error."
    log_level: LogLevel = "info"
    "Amount of the log on stderr. info: a line per request. debug: health checks and metrics too. warning, error: failures."
    log_format: LogFormat = "text"
    "Lines of the log as text, or as JSON objects."


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(EngineOptions):
    """Settings of the engine process."""

    instance: InstanceConfig = field(default_factory=InstanceConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    tiers: TiersConfig = field(default_factory=TiersConfig)
    "Tiers below the KV cache. Not used without prefix caching."
    peer: str = ""
    "Addresses at which other instances read its pool, a line for each rank; the engine chooses them."
    routers: tuple[str, ...] = ()
    "Addresses of the routers that it serves (addresses.py). Empty: only its front."
    health_url: str = ""
    "URL of the HTTP server beside the engine, for operators."
    wire: WireConfig = field(default_factory=WireConfig)
    "Limits of its connections with routers and other instances."

    def cache(self) -> CacheConfig:
        return part_of(self, CacheConfig)
