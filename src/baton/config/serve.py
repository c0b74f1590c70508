"""Options of `baton serve`, on the command line and in the configuration file, with their help.

ServeConfig owns only the settings of the front. All others have another owner, whose default is used; `engine()` builds the
owners' classes by field names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Annotated, Literal

from baton.addresses import parse_address, parse_listening
from baton.config.device_defaults import BY_DEVICE, CPU, OPTIONS
from baton.config.engine import EngineConfig, TiersConfig, WorkerConfig
from baton.config.instance import InstanceConfig, KVConfig, QueueConfig, SchedulerConfig
from baton.config.parts import part_of
from baton.config.values import (
    API_KEY_CHARACTERS_MAX,
    NODE_NAME_CHARACTERS_MAX,
    SERVED_NAME_CHARACTERS_MAX,
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
    Quantization,
    ReasoningParser,
    Role,
    Seconds,
    Share,
    Slots,
    StepTokens,
    Threads,
    ToolCallParser,
    is_api_key,
    require,
)
from baton.config.wire import wire_config
from baton.errors import InvalidConfig
from baton.ranges import Range, check_values

_KV, _SCHEDULER, _QUEUE = KVConfig(), SchedulerConfig(), QueueConfig()
_WORKER, _TIERS, _ENGINE = WorkerConfig(), TiersConfig(), EngineConfig()
_WORKER_OPTIONS = {
    "kv_dtype": "kv_cache_dtype",
    "context_tokens_max": "max_model_len",
    "blocks": "kv_blocks",
    "memory_utilization": "gpu_memory_utilization",
}
_TIERS_OPTIONS = {
    "host_gib": "kv_host_gib",
    "storage": "kv_storage",
    "write": "kv_write",
    "write_outputs": "kv_write_outputs",
    "preempted": "preempted_kv",
}
"""Fields of the owners that have another name as an option. Options with the owner's name need no entry (parts.py)."""

OWN_PATHS = (
    *("v1", "api", "health", "live", "ready", "tokenize", "detokenize", "openapi.json", "version", "metrics", "config"),
    *("reset_prefix_cache", "openai", "v2", "rerank", "score", "pooling", "infill"),
)
"""First path segments of all routes (api/app.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Every option of `baton serve`. Each field is a flag, a YAML key and a line of GET /config."""

    model: str = _WORKER.model
    """A folder, a .gguf file, a Hugging Face id (owner/model, or owner/model:QUANT for a GGUF file), or an alias (baton models
    lists them)."""
    revision: str = ""
    "Branch, tag or commit of a Hugging Face id. Without it: the main branch. Also behind the model: owner/model@REVISION."
    served_model_name: tuple[str, ...] = ()
    """The name clients use. Without it: the model's own. Give the option again for more names; answers have the first one. '*':
    any other name is accepted too, for clients with a built-in one."""
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
    bearer key need none. Allowed anyway: addresses, localhost, --host, names that public DNS cannot have (*.internal, *.local,
    *.lan, *.svc, ...) and, if the server listens to other machines, names without a dot. Give the option again for more."""
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
    "Retry-After of answers 429 and 503, where no better time is known."
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
    tool_call_parser: ToolCallParser = "auto"
    """How the model writes tool calls. auto: as its chat template shows. hermes: also Qwen's. harmony: gpt-oss'. json: plain
    JSON, for any model. none: requests with tools are refused."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model writes its reasoning, which answers then have apart from their content. auto: as its chat template shows.
    qwen3: between <think> and </think>. deepseek_r1: the same, and every answer begins with it. none: it is content."""
    device: Device = _WORKER.device
    """Compute device. cuda: an NVIDIA GPU, with torch. cpu: C kernels. auto: a GPU if torch sees one and the model is no GGUF
    file. Other names come with plug-ins."""
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
    kv_cache_dtype: KVCacheType = _WORKER.kv_dtype
    """Data type of the KV cache. auto: with quantised weights int8 on x86 with AVX2 or more and on ARM with dot products (a
    scale for each token and head), else float16; also where heads are no multiple of 64 wide, or block_size is not 16. float32
    with --quantization none. fp8: on a GPU, half the bytes of bfloat16."""
    compute: Compute = _WORKER.compute
    "Kernel backend. native: C, compiled at first use. torch: several times slower. auto: native if there is a C compiler."
    threads: Threads = _WORKER.threads
    "Compute threads. 0: one per core."
    generation_config: GenerationConfig = _WORKER.generation_config
    """Sampling of requests that name none. auto: as the model's generation_config.json (or GGUF metadata) recommends, else
    llama.cpp's defaults (temperature 0.8, top_k 40, top_p 0.95, min_p 0.05). none: OpenAI's defaults (temperature 1)."""
    stop_on_repetition: bool | None = None
    """End an answer that repeats itself: a passage of up to 128 tokens, at least three times in a row and over 128 tokens. A
    request's own stop_on_repetition goes before. Without it: only for the built-in model."""
    max_model_len: ContextTokens | None = _WORKER.context_tokens_max
    """Longest sequence, prompt and output together; it must fit the KV cache. Without it: the model's own limit, or what the
    KV cache holds if that is less."""
    kv_blocks: Blocks | None = _WORKER.blocks
    "Number of KV blocks. Without it: as many as gpu_memory_utilization or kv_memory_gib leave room for."
    gpu_memory_utilization: Share | None = _WORKER.memory_utilization
    """Share of the memory that may be in use once the server is ready. Of the GPU, or of the machine or container on a CPU, by
    whatever program: weights, steps and KV cache are measured, and the KV cache gets what is left. Without it: 0.9 on a GPU; on
    a CPU kv_memory_gib counts."""
    kv_memory_gib: Gibibytes | None = _WORKER.kv_memory_gib
    """Memory for the KV cache, in GiB. It counts where neither kv_blocks nor gpu_memory_utilization is given. Without it: 2 on
    a CPU; on a GPU gpu_memory_utilization is 0.9."""
    block_size: BlockSize = _WORKER.block_size
    "Tokens per KV block."
    enable_prefix_caching: bool = _KV.prefix_caching
    "Reuse KV blocks of earlier requests that begin with the same tokens."
    eviction: Literal["lru", "lfu"] = _KV.eviction
    "Which unused cached block is evicted first: least recently or least frequently used."
    kv_host_gib: Annotated[float, Range(0, 1_000_000)] = _TIERS.host_gib
    "Memory, in GiB, for KV blocks that the KV cache has no room for: a second tier of the prefix cache. 0: none."
    kv_storage: str = _TIERS.storage
    """Where KV blocks are kept beyond this server's life: file:DIR, redis://HOST:PORT, mooncake://MASTER:PORT. Also the
    scheme of an installed plug-in. A third tier of the prefix cache, which several servers may share. Empty: nowhere."""
    kv_write: Literal["through", "selective", "back"] = _TIERS.write
    """When a KV block is copied to the lower tiers. through: when it is computed. selective: when it was used again. back: when
    the KV cache runs out of room, those that would be evicted next."""
    kv_write_outputs: bool = _TIERS.write_outputs
    "With through: copy what was generated too, for the next turn of a chat. Without: only prompts."
    preempted_kv: Literal["auto", "storage", "host", "drop"] = _TIERS.preempted
    """Where the KV of a preempted request goes, to be found when it continues. auto: the lowest tier there is. drop: it is
    computed again, unless it is still in the KV cache."""
    max_num_seqs: Slots | None = None
    """Sequences that run at once, at most. Without it: by the device, 64 on a CPU, 64 to 256 on a GPU by its memory. GET
    /config shows what was chosen."""
    max_num_batched_tokens: StepTokens | None = None
    "Tokens per step, prompt and decode together, at most. Without it: by the device, 512 on a CPU, 2,048 to 8,192 on a GPU."
    chunk_tokens_max: StepTokens | None = _SCHEDULER.chunk_tokens_max
    "Prompt tokens of one sequence per step, at most. Without it: all that the step has, and half of it while others wait."
    prefill_tokens_beside_decodes: Annotated[int, Range(0, 1_048_576)] | None = None
    """Prompt tokens per step while other sequences decode, at most. Smaller: steadier streams, later first tokens. Without it:
    by the device, 128 on a CPU, 512 to 2,048 on a GPU. 0: no bound but that of the step."""
    decode_gap_ms: Annotated[float, Range(0, 3_600_000)] | None = None
    """Prompts are computed in pieces that keep the time between two tokens of running streams near this, in milliseconds; or
    near three times what decoding alone takes (beyond 90 ms: twice), if that is longer. 0: only prefill_tokens_beside_decodes
    bounds the pieces. Without it: by the device, 25 on all of them today."""
    steps_in_flight: Annotated[int, Range(1, 64)] = _SCHEDULER.steps_in_flight
    "Steps sent to the worker before the result of the oldest is back."
    order: Literal["priority", "arrival"] = _SCHEDULER.order
    "Order of waiting requests: by priority (lower is more urgent) and then arrival, or by arrival alone."
    queue_requests_max: Annotated[int, Range(1, 1_000_000)] = _QUEUE.requests_max
    "Sequences that may wait. Beyond it clients get 429."
    queue_tokens_max: Annotated[int, Range(1, 1_000_000_000)] = _QUEUE.tokens_max
    "Prompt tokens that may wait. Beyond it clients get 429."
    step_seconds_max: Seconds = _SCHEDULER.step_seconds_max
    "A worker that makes no progress in a step for this long is replaced, and in any case after 20 times as long."
    drain_seconds_max: Annotated[float, Range(0, 31_536_000)] = _ENGINE.drain_seconds_max
    "How long running requests may take to finish after Ctrl-C. Those that do not are ended with an error."
    start_seconds_max: Seconds = _WORKER.start_seconds_max
    "How long loading may take, from the start of the processes. A download of the model comes before and is not counted."
    router: tuple[str, ...] = ()
    """Cluster port of a router (tcp://HOST:PORT or unix:/PATH) whose requests this instance serves. Its own HTTP then has
    health, metrics and administration only. Give the option again, or a list with commas, for more routers."""
    role: Role = _ENGINE.role
    """What the instance does for its routers. prefill: computes prompts, which others continue. decode: continues prompts
    that others have computed, and computes short ones. mixed: serves requests from beginning to end."""
    cluster_secret: str = _ENGINE.cluster_secret
    "File with the secret that routers and instances of a cluster share; only its owner may read it."
    transfer_address: str = _ENGINE.transfer_address
    """Where instances on other machines read this one's KV cache in a hand-off: HOST:PORT (port 0: any that is free), an
    address that they reach, or 0.0.0.0 or [::] for all. auto: where this machine is seen from its router, any free port, and
    nothing if the router is on this machine (but a KV cache on a GPU). none: nowhere. Only who knows the secret is served."""
    wire: dict[str, int | float] = field(default_factory=dict)
    """Bounds of connections between routers and instances that differ from those of docs/limits.md, as YAML: {readers_max: 512,
    peers_max: 512}."""
    name: str = _ENGINE.name
    "Name of the instance in the cluster. No two may have the same. Without it: host name and port."

    def __post_init__(self) -> None:
        check_values(self)
        self._check_cluster()
        wire_config(self.wire)
        for name in ("model", "host", "admin_host"):
            require(bool(getattr(self, name).strip()), f"{name} is empty")
        for served in self.served_model_name:
            require(
                served.isprintable() and 1 <= len(served.strip()) <= SERVED_NAME_CHARACTERS_MAX,
                f"served_model_name must be 1 to {SERVED_NAME_CHARACTERS_MAX} printable characters",
            )
        require(len(set(self.served_model_name)) == len(self.served_model_name), "served_model_name has a name twice")
        self._check_listening()
        for name in ("api_key", "admin_api_key"):
            keys = getattr(self, name)
            for place, key in enumerate(keys, 1):
                require(
                    is_api_key(key),
                    f"{name} {place} of {len(keys)} must be 1 to {API_KEY_CHARACTERS_MAX:,} printable ASCII characters "
                    f"without spaces, and it {'is empty' if not key else 'is not'}",
                )
        require(not set(self.api_key) & set(self.admin_api_key), "admin_api_key has a key that is an api_key too: use another")
        require(
            self.enable_prefix_caching or not (self.kv_host_gib or self.kv_storage),
            "kv_host_gib and kv_storage are tiers of the prefix cache, which is off (enable_prefix_caching)",
        )
        self._tiers()
        require(self.admin_port is None or self.admin_port != self.port, "admin_port is the same as port: give another one")

    def _check_listening(self) -> None:
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            require(
                not getattr(self, name) or bool(self.ssl_certfile), f"{name} needs an ssl_certfile too: give --ssl-certfile"
            )
        path = self.root_path
        require(
            not path or (path[0] == "/" and all(is_api_key(part) and part not in (".", "..") for part in path[1:].split("/"))),
            f"root_path is {path!r}: it must begin with / and not end with it, like /llm",
        )
        first = path.split("/")[1] if path else ""
        require(
            first not in OWN_PATHS,
            f"root_path is {path!r}: /{first} is the beginning of routes of the server itself, so it would not be clear which "
            "path is below root_path; give another one, like /llm",
        )

    def _check_cluster(self) -> None:
        for address in self.routers:
            try:
                parse_address(address)
            except InvalidConfig as error:
                raise InvalidConfig(f"router {error}") from None
        require(not self.router or bool(self.routers), "router is empty: give tcp://HOST:PORT or unix:/PATH")
        require(
            self.role == "mixed" or bool(self.routers),
            f"role is {self.role}: such an instance gets its requests from a router; give --router and --cluster-secret too",
        )
        require(
            bool(self.routers) == bool(self.cluster_secret),
            "router needs a cluster_secret: a file that routers and instances share"
            if self.routers
            else "cluster_secret is for an instance that has a --router",
        )
        if self.transfer_address not in ("auto", "none"):
            try:
                parse_listening(self.transfer_address)
            except InvalidConfig as error:
                raise InvalidConfig(f"transfer_address {error}; or auto, or none") from None
            require(bool(self.routers), "transfer_address is for an instance that has a --router")
        name = self.name
        require(
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

    @property
    def by_device(self) -> tuple[str, ...]:
        """Step sizes that were not given: the worker uses those of its device (device_defaults.py)."""
        return tuple(field for field, option in zip(BY_DEVICE, OPTIONS, strict=True) if getattr(self, option) is None)

    def engine(self) -> EngineConfig:
        # Sizes that were not given are a CPU's until the worker reports its own.
        slots = CPU.slots if self.max_num_seqs is None else self.max_num_seqs
        tokens = CPU.tokens_per_step if self.max_num_batched_tokens is None else self.max_num_batched_tokens
        slots = min(slots, tokens) if self.max_num_seqs is None else slots
        tokens = max(slots, tokens)
        beside, gap = self.prefill_tokens_beside_decodes, self.decode_gap_ms
        beside = CPU.prefill_tokens_beside_decodes if beside is None else beside
        gap = CPU.decode_gap_seconds * 1000 if gap is None else gap
        steps = {"slots": slots, "tokens_per_step": tokens}
        scheduler = part_of(
            self,
            SchedulerConfig,
            {"worker_start_seconds_max": "start_seconds_max"},
            **steps,
            prefill_tokens_beside_decodes=beside or None,
            decode_gap_seconds=gap / 1000 or None,
        )
        instance = InstanceConfig(
            kv=part_of(self, KVConfig, {"prefix_caching": "enable_prefix_caching"}),
            scheduler=scheduler,
            queue=part_of(self, QueueConfig, {"requests_max": "queue_requests_max", "tokens_max": "queue_tokens_max"}),
        )
        tiers = self._tiers()
        return part_of(
            self,
            EngineConfig,
            instance=instance,
            worker=part_of(self, WorkerConfig, _WORKER_OPTIONS, **steps, memory_reserved_gib=tiers.memory_gib),
            tiers=tiers,
            wire=wire_config(self.wire),
            health_url=self.url if self.routers else "",
        )

    def _tiers(self) -> TiersConfig:
        return part_of(self, TiersConfig, _TIERS_OPTIONS)


def shown(config: ServeConfig) -> dict[str, object]:
    """Settings for GET /config and the start-up message, without passwords; keys are replaced by their number."""
    keys = {"api_key": len(config.api_key), "admin_api_key": len(config.admin_api_key)}
    wire = asdict(wire_config(config.wire))
    return {**asdict(config), **keys, "wire": wire, "kv_storage": without_password(config.kv_storage)}


def without_password(url: str) -> str:
    """The address of a store without its password: everything before an @ is hidden."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}://***@{rest.rpartition('@')[2]}" if separator and "@" in rest else url


def lowered_context(config: ServeConfig, context_tokens: int, model_context_tokens: int) -> str | None:
    """A message if the KV pool, not a setting, limits the context below the model's."""
    if config.max_model_len is not None or context_tokens >= model_context_tokens:
        return None
    if config.kv_blocks is not None:
        option = f"--kv-blocks {-(-model_context_tokens // config.block_size)}"
    elif config.gpu_memory_utilization is not None:
        option = "--gpu-memory-utilization"
    else:
        option = f"--kv-memory-gib {ceil(100 * (config.kv_memory_gib or 2.0) * model_context_tokens / context_tokens) / 100:g}"
    return (
        f"the context is lowered to the {context_tokens:,} tokens that the KV pool holds; the model was made for "
        f"{model_context_tokens:,}: raise it with {option}, or choose it with --max-model-len"
    )
