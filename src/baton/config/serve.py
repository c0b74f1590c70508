"""Options of `baton serve`, on the command line and in the configuration file, with their help.

A setting stands in one class: here, or in the Options class of its owner (front, engine, scheduler, tiers, worker), which
ServeConfig and the owner's configuration inherit. `engine()` builds the owners' classes by field names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Annotated, Literal

from baton.addresses import parse_router
from baton.config.device_defaults import BY_DEVICE, CPU, OPTIONS
from baton.config.engine import EngineConfig, EngineOptions, TiersConfig, TiersOptions, WorkerConfig, WorkerOptions
from baton.config.instance import InstanceConfig, KVConfig, QueueConfig, SchedulerConfig, SchedulerOptions
from baton.config.parts import part_of
from baton.config.transfer import check_transfer
from baton.config.values import (
    API_KEY_CHARACTERS_MAX,
    DRAFTS_MAX,
    NODE_NAME_CHARACTERS_MAX,
    SERVED_NAME_CHARACTERS_MAX,
    Blocks,
    ContextTokens,
    KVCacheType,
    Ranks,
    ReasoningParser,
    Seconds,
    Share,
    Slots,
    StepTokens,
    ToolCallParser,
    is_api_key,
    require,
)
from baton.config.wire import wire_config
from baton.errors import InvalidConfig
from baton.ranges import Range, check_values

_KV, _QUEUE, _WORKER = KVConfig(), QueueConfig(), WorkerConfig()
_WORKER_OPTIONS = {
    "kv_dtype": "kv_cache_dtype",
    "context_tokens_max": "max_model_len",
    "blocks": "kv_blocks",
    "memory_utilization": "gpu_memory_utilization",
    "ranks": "tensor_parallel_size",
}
"""Fields of the owners that have another name as an option. Options with the owner's name need no entry (parts.py)."""

OWN_PATHS = (
    *("v1", "api", "health", "live", "ready", "tokenize", "detokenize", "openapi.json", "version", "metrics", "config"),
    *("reset_prefix_cache", "openai", "v2", "rerank", "score", "pooling", "infill", "classify"),
)
"""First segments of the paths of all routes (api/app.py)."""


@dataclass(frozen=True, kw_only=True)
class FrontOptions:
    """Options that the front takes as they are (api/config.py)."""

    host: str = "127.0.0.1"
    "Address to listen on. 0.0.0.0: every address of this machine; then set an api_key too."
    admin_port: Annotated[int, Range(1, 65_535)] | None = None
    "Serve the admin routes on this port and nowhere else. Without an admin_api_key it answers this machine only."
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
    "Threads that parse, render and tokenise requests: this number for ordinary ones, and the same number for large ones."
    stop_on_repetition: bool | None = None
    """End an answer that repeats itself: a passage of up to 128 tokens, at least three times in a row and over 128 tokens. A
    request's own stop_on_repetition goes before. Without it: only for the built-in model."""
    tool_call_parser: ToolCallParser = "auto"
    """How the model writes tool calls. auto: as its chat template shows. hermes: also Qwen's. harmony: gpt-oss'. json: plain
    JSON, for any model. none: requests with tools are refused."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model writes its reasoning, which answers then have apart from their content. auto: as its chat template shows.
    qwen3: between <think> and </think>. deepseek_r1: the same, and every answer begins with it. none: it is content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig(FrontOptions, EngineOptions, SchedulerOptions, TiersOptions, WorkerOptions):
    """Every option of `baton serve`. Each field is a flag, a YAML key and a line of GET /config."""

    revision: str = ""
    "Branch, tag or commit of a Hugging Face id. Without it: the main branch. Also behind the model: owner/model@REVISION."
    served_model_name: tuple[str, ...] = ()
    """The name clients use. Without it: the model's own. Give the option again for more names; answers have the first one. '*':
    any other name is accepted too, for clients with a built-in one."""
    port: Annotated[int, Range(0, 65_535)] = 8000
    "Port to listen on. 0: a free port."
    api_key: tuple[str, ...] = ()
    "Key that clients must send as a bearer token, on every route but health. Give the option again for more keys."
    api_key_file: str = ""
    "File with such keys, one per line; # begins a comment. Unlike an option, it is in no process list."
    admin_api_key: tuple[str, ...] = ()
    """Key for the admin routes (/metrics, /config, /v1/pause, /v1/resume); it opens all others too. Without one these routes
    are closed if there is an api_key, and answer this machine only if there is none. Give the option again for more keys."""
    admin_api_key_file: str = ""
    "File with admin keys, one per line."
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
    limits: dict[str, int | float] = field(default_factory=dict)
    "Limits of requests and connections that differ from those of docs/limits.md, as YAML: {streams: 100, body_bytes: 1000000}."
    chat_template: str | None = None
    "File with a chat template (Jinja) to use instead of the model's own."
    tensor_parallel_size: Ranks = _WORKER.ranks
    """Processes that compute the model together, on a GPU of their own each: layers are divided between them
    (docs/tensor-parallel.md)."""
    data_parallel_size: Annotated[int, Range(1, 64)] = 1
    """Instances of the model behind this port, each with GPUs of its own (tensor_parallel_size of them). More than one: as
    `baton up --mixed N` does."""
    kv_cache_dtype: KVCacheType = _WORKER.kv_dtype
    """Data type of the KV cache. auto: with quantised weights int8 on x86 with AVX2 or more and on ARM with dot products (a
    scale for each token and head), else float16; also where heads are no multiple of 64 wide, or block_size is not 16. float32
    with --quantization none. fp8: on a GPU, half the bytes of bfloat16."""
    max_model_len: ContextTokens | None = _WORKER.context_tokens_max
    """Longest sequence, prompt and output together; it must fit the KV cache. Without it: the model's own limit, or what the
    KV cache holds if that is less."""
    kv_blocks: Blocks | None = _WORKER.blocks
    "Number of KV blocks. Without it: as many as gpu_memory_utilization or kv_memory_gib leave room for."
    gpu_memory_utilization: Share | None = _WORKER.memory_utilization
    """Share of the memory that may be in use once the server is ready. Of the GPU, or of the machine or container on a CPU, by
    whatever program: weights, steps and KV cache are measured, and the KV cache gets what is left. Without it: 0.9 on a GPU; on
    a CPU kv_memory_gib counts."""
    enable_prefix_caching: bool = _KV.prefix_caching
    "Reuse KV blocks of earlier requests that begin with the same tokens."
    eviction: Literal["lru", "lfu"] = _KV.eviction
    "Which unused cached block is evicted first: least recently or least frequently used."
    max_num_seqs: Slots | None = None
    """Sequences that run at once, at most. Without it: by the device, 64 on a CPU, 64 to 256 on a GPU by its memory. GET
    /config shows what was chosen."""
    max_num_batched_tokens: StepTokens | None = None
    "Tokens per step, prompt and decode together, at most. Without it: by the device, 512 on a CPU, 2,048 to 8,192 on a GPU."
    prefill_tokens_beside_decodes: Annotated[int, Range(0, 1_048_576)] | None = None
    """Prompt tokens per step while other sequences decode, at most. Smaller: steadier streams, later first tokens. Without it:
    by the device, 128 on a CPU, 512 to 2,048 on a GPU. 0: no bound but that of the step."""
    decode_gap_ms: Annotated[float, Range(0, 3_600_000)] | None = None
    """Prompts are computed in pieces that keep the time between two tokens of running streams near this, in milliseconds; or
    near three times what decoding alone takes (beyond 90 ms: twice), if that is longer. 0: only prefill_tokens_beside_decodes
    bounds the pieces. Without it: by the device, 25 on all of them today."""
    speculative_tokens: Annotated[int, Range(1, DRAFTS_MAX)] = 4
    "With speculate: draft tokens per sequence and step, at most. Fewer are run where they do not pay."
    queue_requests_max: Annotated[int, Range(1, 1_000_000)] = _QUEUE.requests_max
    "Sequences that may wait. Beyond it clients get 429."
    queue_tokens_max: Annotated[int, Range(1, 1_000_000_000)] = _QUEUE.tokens_max
    "Prompt tokens that may wait. Beyond it clients get 429."
    router: tuple[str, ...] = ()
    """Cluster port of a router (tcp://HOST:PORT or unix:/PATH) whose requests this instance serves. dns://NAME:PORT: of a
    router at every address of the name; file:PATH: at every address in the file, one per line; both are looked up again and
    again. Its own HTTP then has health, metrics and administration only. Give the option again, or a list with commas, for more
    routers."""
    shutdown_delay: Annotated[float, Range(0, 31_536_000)] = 0.0
    """After SIGTERM the server is not ready (/ready) but accepts requests for this long, so that load balancers notice before
    the port is closed. It is a part of drain_seconds_max. An instance of a cluster has no need of it: its routers know at
    once."""
    wire: dict[str, int | float] = field(default_factory=dict)
    """Bounds of connections between routers and instances that differ from those of docs/limits.md, as YAML: {readers_max: 512,
    peers_max: 512}."""

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
        require(
            self.shutdown_delay <= self.drain_seconds_max,
            f"shutdown_delay is {self.shutdown_delay:g}: it is part of drain_seconds_max ({self.drain_seconds_max:g})",
        )
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
                parse_router(address)
            except InvalidConfig as error:
                raise InvalidConfig(f"router {error}") from None
        require(
            not self.router or bool(self.routers),
            "router is empty: give tcp://HOST:PORT, dns://NAME:PORT, file:PATH or unix:/PATH",
        )
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
        require(
            self.data_parallel_size == 1 or not self.router,
            f"data_parallel_size is {self.data_parallel_size}: an instance of a cluster is one instance; start as many",
        )
        self.check_credentials()
        taken = {"port": (self.host, self.port), "admin_port": (self.admin_host, self.admin_port or 0)}
        check_transfer(self, self.tensor_parallel_size, self.routers, taken)
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
            drafts_max=0 if self.speculate == "none" else self.speculative_tokens,
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
        return part_of(self, TiersConfig)


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
