"""Configuration: frozen, one class per owner, a sentence per field, checked once when it is made.

What a number may be is stated once, at its field (`Annotated[int, Range(...)]`). ranges.py checks it, here and for the
command line.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Annotated, Literal

from baton.addresses import parse_address
from baton.errors import InvalidConfig
from baton.ranges import Range, check_values

Quantization = Literal["auto", "int8", "int4", "fp8", "none"]
"""How weights are kept and computed on. What becomes of which tensor: models/quantise.py."""
KVCacheType = Literal["auto", "float32", "float16", "bfloat16", "int8", "fp8"]
"""What the KV cache holds. bfloat16 needs a processor with tiles (AMX), int8 heads whose width is a multiple of 64,
fp8 a GPU."""
Compute = Literal["auto", "native", "torch"]
Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16"]
"""Of activations, and on a GPU of weights and KV cache too."""
LoadFormat = Literal["auto", "dummy"]
GenerationConfig = Literal["auto", "none"]
"""Whether requests that do not say are sampled as the model's files recommend (models/generation.py)."""
Role = Literal["mixed", "prefill", "decode"]
"""What an instance does: both, or one half of a split deployment."""
PoolAccess = Literal["private", "announced", "attached"]
"""How a worker comes to its KV pool: it makes one for itself, makes and announces it, or attaches to the one it is handed."""
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


API_KEY_CHARACTERS_MAX = 1024
SERVED_NAME_CHARACTERS_MAX = 256
NODE_NAME_CHARACTERS_MAX = 64


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidConfig(message)


Threads = Annotated[int, Range(0, 1024)]
ContextTokens = Annotated[int, Range(2, 2**31 - 1)]
Blocks = Annotated[int, Range(1, 2**31 - 1)]
BlockSize = Annotated[int, Range(1, 1024)]
Share = Annotated[float, Range(0, 1, above=True)]
Gibibytes = Annotated[float, Range(0, 1_000_000, above=True)]
Slots = Annotated[int, Range(1, 65_536)]
StepTokens = Annotated[int, Range(1, 1_048_576)]
Seconds = Annotated[float, Range(0, 31_536_000, above=True)]


def is_api_key(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key and 1 <= len(key) <= API_KEY_CHARACTERS_MAX


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
        _require(self.blocks >= 1, f"kv.blocks is {self.blocks}: a pool needs at least one block")
        _require(self.block_size >= 1, f"kv.block_size is {self.block_size}: a block holds at least one token")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """What one step may hold, and how careful admission is."""

    slots: int = 256
    "Sequences that may sit on the worker at once."
    tokens_per_step: int = 8192
    "Upper bound of tokens, prompt and decode together, in one step."
    chunk_tokens_max: int | None = None
    "Upper bound of prompt tokens of one sequence in one step. None: only tokens_per_step bounds it."
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
    step_seconds_max: float = 60.0
    "A step without a result for this long means that the worker is lost."
    worker_start_seconds_max: float = 600.0
    "A restarted worker that is not ready after this long is lost too."
    worker_restarts_max: int = 5
    "Worker losses in a row, none of them healthy in between, after which the instance gives up."
    restart_backoff_seconds_max: float = 10.0
    "Restarts in a row wait longer and longer, up to this."

    def __post_init__(self) -> None:
        _require(self.slots >= 1, f"scheduler.slots is {self.slots}: at least one sequence must be able to run")
        _require(
            self.tokens_per_step >= self.slots,
            f"scheduler.tokens_per_step is {self.tokens_per_step}, less than scheduler.slots ({self.slots}): "
            "every running sequence needs one token of a step",
        )
        _require(self.steps_in_flight >= 1, "scheduler.steps_in_flight must be at least 1")
        _require(self.chunk_tokens_max is None or self.chunk_tokens_max >= 1, "scheduler.chunk_tokens_max must be at least 1")
        _require(
            self.prefill_tokens_beside_decodes is None or self.prefill_tokens_beside_decodes >= 1,
            "scheduler.prefill_tokens_beside_decodes must be at least 1: prompts would wait for as long as anything decodes",
        )
        _require(
            self.decode_gap_seconds is None or self.decode_gap_seconds > 0, "scheduler.decode_gap_seconds must be positive"
        )
        _require(0.0 <= self.reserve_start <= 1.0, "scheduler.reserve_start must be between 0 and 1")
        _require(0.0 <= self.reserve_learning <= 1.0, "scheduler.reserve_learning must be between 0 and 1")
        _require(self.reserve_clip_tokens >= 1, "scheduler.reserve_clip_tokens must be at least 1")
        _require(
            self.step_seconds_max > 0 and self.worker_start_seconds_max > 0,
            "scheduler.step_seconds_max and scheduler.worker_start_seconds_max must be positive",
        )
        _require(self.worker_restarts_max >= 0, "scheduler.worker_restarts_max must not be negative")
        _require(self.restart_backoff_seconds_max >= 0, "scheduler.restart_backoff_seconds_max must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueConfig:
    """How much may wait. Over it a request is refused at once, with the numbers."""

    requests_max: int = 1024
    "Sequences waiting for their first admission; a preempted one keeps its place and does not count."
    tokens_max: int = 1_000_000
    "Prompt tokens of those sequences."

    def __post_init__(self) -> None:
        _require(self.requests_max >= 1 and self.tokens_max >= 1, "queue: both bounds must be at least 1")


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

    @property
    def adopt_seconds_max(self) -> float:
        """From the last offer of a prompt that another instance computed until it goes on here."""
        return self.pull_seconds_max + self.release_seconds_max

    def __post_init__(self) -> None:
        _require(self.host_blocks >= 0 and self.write_hits >= 1 and self.load_blocks_min >= 1, "tiers: a number is too small")
        _require(self.pull_seconds_max > 0.0 and self.release_seconds_max > 0.0, "tiers: a hand-off needs time")
        _require(0.0 <= self.watermark <= 1.0, "tiers.watermark must be between 0 and 1")
        _require(not self.storage or self.host_blocks > 0, "tiers: storage needs host blocks that its blocks pass through")
        _require(self.preempted == "drop" or self.host_blocks > 0, "tiers.preempted needs a host tier or storage")
        _require(self.preempted != "storage" or self.storage, "tiers.preempted is storage, and there is none")


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceConfig:
    """Everything the instance machine (core/engine/instance.py) is told."""

    kv: KVConfig = field(default_factory=KVConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    tiers: TierConfig = field(default_factory=TierConfig)


_KV, _SCHEDULER, _QUEUE, _TIER = KVConfig(), SchedulerConfig(), QueueConfig(), TierConfig()
"""A default is said once, by the owner of the setting. Others take it from there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerConfig:
    """What the worker process is told."""

    model: str = "smollm2"
    "A folder, a .gguf file, a Hugging Face id, or an alias."
    device: Device = "auto"
    "Compute device (worker/platforms/choose.py)."
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
    slots: Slots = 64
    tokens_per_step: StepTokens = 512
    "The largest step that is ever run."
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
        _require(
            self.preempted not in ("storage", "host") or bool(self),
            f"preempted_kv is {self.preempted}, and there is no tier: give kv_host_gib or kv_storage too",
        )
        _require(
            self.preempted != "storage" or bool(self.storage), "preempted_kv is storage, and there is none: give kv_storage too"
        )
        _require(
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
    "Address at which its messenger lets other instances read the pool; the engine says it. Empty: there is no messenger."
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
    name: str = ""
    "In the cluster: unique, and the same after a restart."
    health_url: str = ""
    "Of the HTTP beside it, for people."
    drain_seconds_max: float = 30.0
    "When it is told to end, requests of its routers may run so long; then others go on with them."
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"

    def cache(self) -> CacheConfig:
        return CacheConfig(
            tiers=self.tiers,
            worker=self.worker,
            peer=self.peer,
            log_level=self.log_level,
            log_format=self.log_format,
        )


_WORKER, _TIERS, _ENGINE = WorkerConfig(), TiersConfig(), EngineConfig()


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Everything `baton serve` can be told. Each field is a flag, a YAML key and a line of GET /config."""

    model: str = _WORKER.model
    """A folder, a .gguf file, a Hugging Face id (owner/model, or owner/model:QUANT for a GGUF file), or an alias (baton models
    lists them)."""
    revision: str = ""
    "Branch, tag or commit of a Hugging Face id. Without it: the main branch. Also behind the model: owner/model@REVISION."
    served_model_name: tuple[str, ...] = ()
    "The name clients use. Without it: the model's own. Give the option again for more names; answers have the first one."
    host: str = "127.0.0.1"
    "Address to listen on. 0.0.0.0: every address of this machine; then set an api_key too."
    port: Annotated[int, Range(0, 65_535)] = 8000
    "Port to listen on. 0: one that is free."
    api_key: tuple[str, ...] = ()
    "Key that clients must send as a bearer token, on every route but health. Give the option again for more keys."
    api_key_file: str = ""
    "File with such keys, one per line; # begins a comment. Unlike an option, it is in no process list."
    admin_api_key: tuple[str, ...] = ()
    """Key for the admin routes (/metrics, /config, /v1/pause, /v1/resume); it opens all others too. Without one these routes
    are closed if there is an api_key, and answer this machine only if there is none. Give the option again for more keys."""
    admin_api_key_file: str = ""
    "File with admin keys, one per line."
    admin_port: Annotated[int, Range(1, 65_535)] | None = None
    "Serve the admin routes on this port and nowhere else. Without an admin_api_key it answers this machine only."
    admin_host: str = "127.0.0.1"
    "Address that the admin port listens on."
    ssl_certfile: str = ""
    "File with the certificate of the server, and those between it and its authority (PEM): serve https instead of http."
    ssl_keyfile: str = ""
    "File with the certificate's private key (PEM, without a password). Without it: it is in ssl_certfile."
    ssl_ca_certs: str = ""
    "File with authorities (PEM). Clients must then show a certificate of one of them, on every port of the server."
    root_path: str = ""
    """Path below which a proxy passes this server's routes on, such as /llm; it may leave the path in or cut it off."""
    allowed_hosts: tuple[str, ...] = ()
    """Name by which clients may call the server (Host header), such as llm.example or *.example; * is any. Requests with a
    bearer key need none. Allowed anyway: addresses, localhost, --host and, if the server listens to other machines, names
    without a dot. Give the option again for more names."""
    allowed_origins: tuple[str, ...] = ()
    """Origin of a web app, such as https://app.example, whose pages may call the server from a browser; * is any. Give the
    option again for more origins."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """Fields of a request that the server does not know. ignore: their names come back in the header x-baton-ignored. refuse:
    the request gets 400. Known fields that would change the answer and are not supported are always refused."""
    client_priority_min: Annotated[int, Range(-(2**31), 2**31 - 1)] = 0
    "Lowest priority, and so the most urgent, that a request may ask for without an admin key."
    chat_page: bool = True
    "Serve the chat page at /."
    streams_per_key_max: Annotated[int, Range(1, 1_000_000)] | None = None
    "Requests that one API key may have open. Without it: all that the server takes; with several keys half of them."
    keep_alive_seconds: Seconds = 10.0
    "A stream without news for this long gets a comment line, so that proxies keep it and clients that are gone are noticed."
    retry_after_seconds: Annotated[int, Range(1, 86_400)] = 1
    "What a client that gets 429 or 503 is told to wait, if nobody knows better."
    text_threads: Annotated[int, Range(1, 64)] = 2
    "Threads that parse, render and tokenise requests: so many for ordinary ones, and as many for large ones."
    limits: dict[str, int | float] = field(default_factory=dict)
    "Limits of requests and connections that differ from those of docs/limits.md, as YAML: {streams: 100, body_bytes: 1000000}."
    log_level: LogLevel = _ENGINE.log_level
    "What is logged on stderr. info: a line per request. debug: health checks and metrics too. warning, error: failures."
    log_format: LogFormat = _ENGINE.log_format
    "Lines of the log as text, or as JSON objects."
    chat_template: str | None = None
    "File with a chat template (Jinja) to use instead of the model's own."
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "json", "none"] = "auto"
    """How the model writes tool calls. auto: as its chat template shows. hermes: also Qwen's. json: plain JSON, for any model.
    none: requests with tools are refused."""
    reasoning_parser: Literal["auto", "qwen3", "deepseek_r1", "mistral", "none"] = "auto"
    """How the model writes its reasoning, which answers then have apart from their content. auto: as its chat template shows.
    qwen3: between <think> and </think>. deepseek_r1: the same, and every answer begins with it. none: it is content."""
    device: Device = _WORKER.device
    """Compute device. cuda: an NVIDIA GPU, with torch. cpu: C kernels. auto: a GPU if torch sees one and the model is no GGUF
    file."""
    dtype: Dtype = _WORKER.dtype
    "Data type of activations, and on a GPU of weights and KV cache. auto: float32 on a CPU, bfloat16 on a GPU."
    deterministic: bool = _WORKER.deterministic
    """On a GPU: an answer has the same bits whatever else runs beside it; slower (docs/gpu.md). The C kernels of a CPU need no
    such option."""
    load_format: LoadFormat = _WORKER.load_format
    "Where weights come from. auto: the model's files. dummy: random numbers, to measure speed."
    model_shape: str = _WORKER.model_shape
    """With --load-format dummy: shape of a well-known model instead of the model's own (llama-3-8b, qwen3-8b, ...). Text is
    still the model's."""
    quantization: Quantization = _WORKER.quantization
    """How weights are stored and multiplied. auto: 4-bit weights as the file has them, all others in 8 bits.
    int8: all in 8 bits; fastest for prompts and many requests at once. int4: all in 4 bits, but embedding and output head in 8
    where the file does not have them in 4; fastest for one request at a time, and smallest.
    none: float32, dequantised at load; the exact mode, and the slowest. On a GPU auto and none: as --dtype says; fp8:
    matrices of layers in 8 bits, with a scale for each output."""
    kv_dtype: KVCacheType = _WORKER.kv_dtype
    """Data type of the KV cache. auto: with quantised weights int8 on x86 with AVX2 or more (a scale for each token and head),
    else float16; also where heads are no multiple of 64 wide, or block_size is not 16. float32 with --quantization none.
    fp8: on a GPU, half the bytes of bfloat16."""
    compute: Compute = _WORKER.compute
    "Kernel backend. native: C, compiled at first use. torch: several times slower. auto: native if there is a C compiler."
    threads: Threads = _WORKER.threads
    "Compute threads. 0: one per core."
    generation_config: GenerationConfig = _WORKER.generation_config
    """Sampling of requests that do not say. auto: as the model's generation_config.json (or GGUF metadata) recommends, else
    OpenAI's defaults. none: OpenAI's defaults."""
    context_tokens_max: ContextTokens | None = _WORKER.context_tokens_max
    """Longest sequence, prompt and output together; it must fit the KV cache. Without it: the model's own limit, or what the
    KV cache holds if that is less."""
    kv_blocks: Blocks | None = _WORKER.blocks
    "Number of KV blocks. Without it: as many as memory_utilization or kv_memory_gib leave room for."
    memory_utilization: Share | None = _WORKER.memory_utilization
    """Share of the memory of the machine (or container) that may be in use once the server is ready, by whomever: weights,
    steps and KV cache are measured, and the KV cache gets what is left. Without it: kv_memory_gib."""
    kv_memory_gib: Gibibytes | None = _WORKER.kv_memory_gib
    """Memory for the KV cache in GiB, if neither kv_blocks nor memory_utilization is given. Without it: 2 on a CPU; on a GPU
    memory_utilization is 0.9."""
    block_size: BlockSize = _WORKER.block_size
    "Tokens per KV block."
    prefix_caching: bool = _KV.prefix_caching
    "Reuse KV blocks of earlier requests that begin with the same tokens."
    eviction: Literal["lru", "lfu"] = _KV.eviction
    "Which unused cached block is evicted first: least recently or least frequently used."
    kv_host_gib: Annotated[float, Range(0, 1_000_000)] = _TIERS.host_gib
    "Memory, in GiB, for KV blocks that the KV cache has no room for: a second tier of the prefix cache. 0: none."
    kv_storage: str = _TIERS.storage
    """Where KV blocks are kept beyond this server's life, a third tier that several servers may share: file:DIR,
    redis://HOST:PORT, mooncake://MASTER:PORT, or the scheme of an installed plug-in. Empty: nowhere."""
    kv_write: Literal["through", "selective", "back"] = _TIERS.write
    """When a KV block is copied to the lower tiers. through: when it is computed. selective: when it was used again. back: when
    the KV cache runs out of room, those that would be evicted next."""
    kv_write_outputs: bool = _TIERS.write_outputs
    "With through: copy what was generated too, for the next turn of a chat. Without: only prompts."
    preempted_kv: Literal["auto", "storage", "host", "drop"] = _TIERS.preempted
    """Where the KV of a preempted request goes, to be found when it continues. auto: the lowest tier there is. drop: it is
    computed again, unless it is still in the KV cache."""
    slots: Slots = _WORKER.slots
    "Sequences that run at once, at most."
    tokens_per_step: StepTokens = _WORKER.tokens_per_step
    "Tokens per step, prompt and decode together, at most."
    chunk_tokens_max: StepTokens | None = _SCHEDULER.chunk_tokens_max
    "Prompt tokens of one sequence per step, at most. Without it: tokens_per_step."
    prefill_tokens_beside_decodes: StepTokens | None = 128
    "Prompt tokens per step while other sequences decode, at most. Smaller: steadier streams, later first tokens."
    decode_gap_ms: Annotated[float, Range(0, 3_600_000)] = 25.0
    """Prompts are computed in pieces that keep the time between two tokens of running streams near this, in milliseconds; or
    near three times what decoding alone takes, if that is longer. 0: only prefill_tokens_beside_decodes bounds the pieces."""
    steps_in_flight: Annotated[int, Range(1, 64)] = _SCHEDULER.steps_in_flight
    "Steps sent to the worker before the result of the oldest is back."
    order: Literal["priority", "arrival"] = _SCHEDULER.order
    "Order of waiting requests: by priority (lower is more urgent) and then arrival, or by arrival alone."
    queue_requests_max: Annotated[int, Range(1, 1_000_000)] = _QUEUE.requests_max
    "Sequences that may wait. Beyond it clients get 429."
    queue_tokens_max: Annotated[int, Range(1, 1_000_000_000)] = _QUEUE.tokens_max
    "Prompt tokens that may wait. Beyond it clients get 429."
    step_seconds_max: Seconds = _SCHEDULER.step_seconds_max
    "A worker that gives no result for a step within this time is replaced."
    drain_seconds_max: Annotated[float, Range(0, 31_536_000)] = _ENGINE.drain_seconds_max
    "How long running requests may take to finish after Ctrl-C. Those that do not are ended with an error."
    start_seconds_max: Seconds = _WORKER.start_seconds_max
    "How long loading may take, from the start of the processes. A download of the model comes before and is not counted."
    router: tuple[str, ...] = ()
    """Cluster port of a router (tcp://HOST:PORT or unix:/PATH) whose requests this instance serves. Its own HTTP then has
    health, metrics and administration only. Give the option again, or a list with commas, for more routers."""
    role: Role = _ENGINE.role
    """What the instance does for its routers. prefill: computes prompts, which others go on with. decode: goes on with prompts
    that others have computed, and computes short ones. mixed: serves requests from beginning to end."""
    cluster_secret: str = _ENGINE.cluster_secret
    "File with the secret that routers and instances of a cluster share; only its owner may read it."
    name: str = _ENGINE.name
    "Name of the instance in the cluster. No two may have the same. Without it: host name and port."

    def __post_init__(self) -> None:
        check_values(self)
        self._check_cluster()
        for name in ("model", "host", "admin_host"):
            _require(bool(getattr(self, name).strip()), f"{name} is empty")
        for served in self.served_model_name:
            _require(
                served.isprintable() and 1 <= len(served.strip()) <= SERVED_NAME_CHARACTERS_MAX,
                f"served_model_name must be 1 to {SERVED_NAME_CHARACTERS_MAX} printable characters",
            )
        self._check_listening()
        for name in ("api_key", "admin_api_key"):
            keys = getattr(self, name)
            for place, key in enumerate(keys, 1):
                _require(
                    is_api_key(key),
                    f"{name} {place} of {len(keys)} must be 1 to {API_KEY_CHARACTERS_MAX:,} printable ASCII characters "
                    f"without spaces, and it {'is empty' if not key else 'is not'}",
                )
        _require(not set(self.api_key) & set(self.admin_api_key), "admin_api_key has a key that is an api_key too: use another")
        _require(
            self.prefix_caching or not (self.kv_host_gib or self.kv_storage),
            "kv_host_gib and kv_storage are tiers of the prefix cache, which is off (prefix_caching)",
        )
        self._tiers()
        _require(self.admin_port is None or self.admin_port != self.port, "admin_port is the same as port: give another one")

    def _check_listening(self) -> None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            _require(
                not getattr(self, name) or bool(self.ssl_certfile), f"{name} needs an ssl_certfile too: give --ssl-certfile"
            )
        path = self.root_path
        _require(
            not path or (path[0] == "/" and path[-1] != "/" and all(is_api_key(part) for part in path[1:].split("/"))),
            f"root_path is {path!r}: it must begin with / and not end with it, like /llm",
        )

    def _check_cluster(self) -> None:
        for address in self.routers:
            try:
                parse_address(address)
            except InvalidConfig as error:
                raise InvalidConfig(f"router {error}") from None
        _require(not self.router or bool(self.routers), "router is empty: give tcp://HOST:PORT or unix:/PATH")
        _require(
            self.role == "mixed" or bool(self.routers),
            f"role is {self.role}: such an instance gets its requests from a router; give --router and --cluster-secret too",
        )
        _require(
            bool(self.routers) == bool(self.cluster_secret),
            "router needs a cluster_secret: a file that routers and instances share"
            if self.routers
            else "cluster_secret is for an instance that has a --router",
        )
        name = self.name
        _require(
            not name or (name.isascii() and name.isprintable() and " " not in name and len(name) <= NODE_NAME_CHARACTERS_MAX),
            f"name must be up to {NODE_NAME_CHARACTERS_MAX} printable ASCII characters without spaces",
        )

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(address for text in self.router for address in text.split(",") if address)

    @property
    def scheme(self) -> str:
        return "https" if self.ssl_certfile else "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def engine(self) -> EngineConfig:
        worker = WorkerConfig(
            model=self.model,
            device=self.device,
            dtype=self.dtype,
            deterministic=self.deterministic,
            load_format=self.load_format,
            model_shape=self.model_shape,
            quantization=self.quantization,
            kv_dtype=self.kv_dtype,
            compute=self.compute,
            threads=self.threads,
            generation_config=self.generation_config,
            context_tokens_max=self.context_tokens_max,
            blocks=self.kv_blocks,
            memory_utilization=self.memory_utilization,
            kv_memory_gib=self.kv_memory_gib,
            memory_reserved_gib=self._tiers().memory_gib,
            block_size=self.block_size,
            slots=self.slots,
            tokens_per_step=max(self.tokens_per_step, self.slots),
            start_seconds_max=self.start_seconds_max,
        )
        instance = InstanceConfig(
            kv=KVConfig(block_size=self.block_size, prefix_caching=self.prefix_caching, eviction=self.eviction),
            scheduler=SchedulerConfig(
                slots=self.slots,
                tokens_per_step=max(self.tokens_per_step, self.slots),
                chunk_tokens_max=self.chunk_tokens_max,
                prefill_tokens_beside_decodes=self.prefill_tokens_beside_decodes,
                decode_gap_seconds=self.decode_gap_ms / 1000 or None,
                steps_in_flight=self.steps_in_flight,
                order=self.order,
                step_seconds_max=self.step_seconds_max,
                worker_start_seconds_max=self.start_seconds_max,
            ),
            queue=QueueConfig(requests_max=self.queue_requests_max, tokens_max=self.queue_tokens_max),
        )
        return EngineConfig(
            instance=instance,
            worker=worker,
            role=self.role,
            tiers=self._tiers(),
            routers=self.routers,
            cluster_secret=self.cluster_secret,
            drain_seconds_max=self.drain_seconds_max,
            name=self.name,
            health_url=self.url if self.routers else "",
            log_level=self.log_level,
            log_format=self.log_format,
        )

    def _tiers(self) -> TiersConfig:
        return TiersConfig(
            host_gib=self.kv_host_gib,
            storage=self.kv_storage,
            write=self.kv_write,
            write_outputs=self.kv_write_outputs,
            preempted=self.preempted_kv,
        )


def shown(config: ServeConfig) -> dict[str, object]:
    """For GET /config and the start-up message: everything but the keys, of which only the number is told, and passwords."""
    keys = {"api_key": len(config.api_key), "admin_api_key": len(config.admin_api_key)}
    return {**asdict(config), **keys, "kv_storage": without_password(config.kv_storage)}


def without_password(url: str) -> str:
    """The address of a store, as it may be shown. What is before an @ may be a password, however the address is written."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if separator and "@" in rest else url


def lowered_context(config: ServeConfig, context_tokens: int, model_context_tokens: int) -> str | None:
    """What is said at the start where the KV pool, and nobody's wish, makes the context shorter than the model's."""
    if config.context_tokens_max is not None or context_tokens >= model_context_tokens:
        return None
    if config.kv_blocks is not None:
        option = f"--kv-blocks {-(-model_context_tokens // config.block_size)}"
    elif config.memory_utilization is not None:
        option = "--memory-utilization"
    else:
        option = f"--kv-memory-gib {ceil(100 * (config.kv_memory_gib or 2.0) * model_context_tokens / context_tokens) / 100:g}"
    return (
        f"the context is lowered to the {context_tokens:,} tokens that the KV pool holds; the model was made for "
        f"{model_context_tokens:,}: raise it with {option}, or choose it with --context-tokens-max"
    )
