"""What the front is told, once: what it serves, and how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from baton.api.limits import RANGES, Limits
from baton.config import ServeConfig
from baton.config.parts import part_of, with_changes
from baton.errors import InvalidConfig
from baton.protocol.request import OPENAI_SAMPLING

_SERVE = ServeConfig()
"A default is said once, there."
_DEFAULTABLE = (*OPENAI_SAMPLING, "max_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model behind the engine, as clients see it."""

    name: str
    "What clients call it."
    aliases: tuple[str, ...] = ()
    "Other names that are taken for it; answers use `name`."
    any_name: bool = False
    "Every other name is taken for it too (--served-model-name '*')."
    context_tokens: int
    "Prompt and output together."
    head_width: int
    "Rows of the model's output head: every token id is checked against it, not against the tokenizer."
    created: int = 0
    "Unix seconds for /v1/models."
    fingerprint: str = "fp_baton"
    "Changes with weights, dtype or layout; clients see it as system_fingerprint."
    weights: str = ""
    "Digest of the content of the weight files. Empty: unknown."
    weights_bytes: int = 0
    "Size of the weight files. 0: unknown."
    sampling_defaults: Mapping[str, int | float] = field(default_factory=lambda: dict(OPENAI_SAMPLING))
    "For requests that do not say. max_tokens, where it is there, is the length of chats alone."
    pooling: str = "mean"
    "Of embeddings, for requests that do not say: one of request.POOLINGS, or the name of one that the engine does not have."
    scoring: str = ""
    "How the model scores a pair of texts (models/scoring.py). Empty: by the cosine of two embeddings, or not at all."

    def __post_init__(self) -> None:
        _require(bool(self.name), "model.name is empty")
        _require(self.context_tokens >= 2, f"model.context_tokens is {self.context_tokens}: a prompt and a token need 2")
        _require(self.head_width >= 1, f"model.head_width is {self.head_width}")
        for name, value in self.sampling_defaults.items():
            known = name in _DEFAULTABLE and value in RANGES[name]
            _require(known, f"model.sampling_defaults.{name} is {value}: not a setting in its range")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    def is_called(self, name: object) -> bool:
        return name in self.names or (self.any_name and isinstance(name, str))


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig:
    """How the front answers."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    "Bearer keys. Each is a tenant of its own: cached blocks, aborts, idempotency keys are not shared. None: no key is asked."
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys for the admin routes (/config, /metrics, /v1/pause and its like); they open all others too. None: the admin routes
    are closed where there are API keys, and answer this machine only where there are none."""
    admin_port: int | None = None
    "Connections that come in on this port reach the admin routes and nothing else, and all others do not reach them."
    host: str = "127.0.0.1"
    "What the server listens on: one of the names that it may be called by."
    allowed_hosts: tuple[str, ...] = ()
    """Further names that it may be called by in a Host header: `name`, `*.name` or `*`. Addresses are allowed, and names
    without a dot where `host` is more than this machine."""
    chat_page: bool = True
    "Serve the chat page at /."
    allowed_origins: tuple[str, ...] = ()
    "Web origins (https://name:port, or *) whose pages may call this server from a browser. Others are refused."
    client_priority_min: int = 0
    "The most urgent (lowest) priority that a request may name without an admin key."
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    "Fields of a request that we do not know. Ignored by default: OpenAI's clients send extras. Never passed on either way."
    stop_on_repetition: bool | None = None
    "End answers that repeat themselves, of requests that do not say. None: no."
    tool_call_parser: str = "auto"
    "How the model writes tool calls (text/parsers/styles.py). auto: as its chat template does."
    reasoning_parser: str = "auto"
    "How it writes thoughts."
    streams_per_key_max: int | None = None
    "Requests one key may have open. None: all of limits.streams with one key, half with several: none shuts out another."
    keep_alive_seconds: float = _SERVE.keep_alive_seconds
    "A stream without news for this long gets a comment line, so that proxies and half-open sockets show."
    retry_after_seconds: int = _SERVE.retry_after_seconds
    "What a 429 or 503 tells the client."
    text_threads: int = _SERVE.text_threads
    "Threads that parse, render and tokenise large requests, so that streams of others go on."
    limits: Limits = field(default_factory=Limits)
    routers: tuple[str, ...] = ()
    "Of an instance of a cluster: where its requests come from. It has no routes that generate, and no page."
    settings: Mapping[str, Any] = field(default_factory=dict)
    "Resolved settings of the other parts, shown at /config. Must hold no secrets."

    def __post_init__(self) -> None:
        for key in (*self.api_keys, *self.admin_api_keys):
            ok = key.isascii() and key.isprintable() and 0 < len(key.strip()) == len(key) <= self.limits.api_key_bytes
            _require(ok, "an API key must be printable ASCII without spaces around it, and not too long")
        _require(not (set(self.api_keys) & set(self.admin_api_keys)), "a key is both an API key and an admin key")
        for origin in self.allowed_origins:
            ok = origin == "*" or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin) is not None
            _require(ok, f"allowed_origins: {origin!r} must be like https://name or https://name:port, without a path, or *")
        for name in self.allowed_hosts:
            ok = re.fullmatch(r"(\*\.)?[^\s/:*]+|\*", name) is not None
            _require(ok, f"allowed_hosts: {name!r} must be a host name without a port, *.name, or *")
        _require(self.keep_alive_seconds > 0, "keep_alive_seconds must be more than 0")
        _require(self.text_threads >= 1, "text_threads must be at least 1")
        _require(self.streams_per_key_max is None or self.streams_per_key_max >= 1, "streams_per_key_max must be at least 1")

    @property
    def streams_of_one_key_max(self) -> int:
        share = self.limits.streams if len(self.api_keys) < 2 else max(1, self.limits.streams // 2)
        return share if self.streams_per_key_max is None else self.streams_per_key_max

    def shown(self) -> dict[str, Any]:
        """For /config: everything but the keys, of which only the number is told."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("limits", "settings")}
        own["api_keys"], own["admin_api_keys"] = len(self.api_keys), len(self.admin_api_keys)
        own["limits"] = {f.name: getattr(self.limits, f.name) for f in fields(self.limits)}
        return {"api": own, **self.settings}


def api_config_of(serve: ServeConfig, settings: Mapping[str, Any]) -> ApiConfig:
    """What `baton serve` was told, for the front. The command line makes one too, before it starts anything: it is a check."""
    return part_of(
        serve,
        ApiConfig,
        {"api_keys": "api_key", "admin_api_keys": "admin_api_key"},
        chat_page=serve.chat_page and not serve.routers,
        limits=limits_of(serve),
        settings=settings,
    )


def limits_of(serve: ServeConfig) -> Limits:
    """Those of limits.py, but for what the operator says."""
    for each in fields(Limits):
        value = serve.limits.get(each.name, each.default)
        whole = not isinstance(each.default, int) or type(value) is int
        _require(whole, f"limits: {each.name} is {value}: give a whole number")
    return with_changes(Limits, serve.limits, "limits", "docs/limits.md")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidConfig(message)
