"""Settings of the front: the served model, and how requests are answered. Frozen; made once at start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from baton.api.limits import RANGES, Limits
from baton.config import FrontOptions, ServeConfig
from baton.config.parts import part_of, with_changes
from baton.errors import InvalidConfig
from baton.protocol.request import OPENAI_SAMPLING

PAIR_SCORES = ("yes_no", "vectors", "sigmoid", "logit")
"Kinds of models/scoring.py that score a pair of texts."
DEFAULTABLE = (*OPENAI_SAMPLING, "max_tokens")
"Names of sampling defaults."


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """The model behind the engine, as clients see it."""

    name: str
    "The name that clients use."
    aliases: tuple[str, ...] = ()
    "Other accepted names; answers use `name`."
    any_name: bool = False
    "Whether every other name is accepted too (--served-model-name '*')."
    context_tokens: int
    "Maximum of prompt and output tokens together."
    head_width: int
    "Rows of the model's output head: every token id is checked against it, not against the tokenizer."
    created: int = 0
    "Unix seconds for /v1/models."
    fingerprint: str = "fp_baton"
    "`system_fingerprint` for clients: it changes with weights, dtype or layout."
    weights: str = ""
    "Digest of the content of the weight files. Empty: unknown."
    weights_bytes: int = 0
    "Size of the weight files. 0: unknown."
    sampling_defaults: Mapping[str, int | float] = field(default_factory=lambda: dict(OPENAI_SAMPLING))
    "Values for fields that a request leaves out. max_tokens, if present, applies to chats only."
    pooling: str = "mean"
    "Default pooling of embeddings: one of request.POOLINGS, or a name that the engine does not support."
    scoring: str = ""
    "How the model scores a pair of texts (models/scoring.py). Empty: the model has no scoring head."
    generates: bool = True
    "Whether the model generates. False: an encoder. Inputs that are too long are cut, as sentence-transformers does it."
    labels: tuple[str, ...] = ()
    "Names of the classes of a model that classifies."

    def __post_init__(self) -> None:
        _require(bool(self.name), "model.name is empty")
        _require(self.context_tokens >= 2, f"model.context_tokens is {self.context_tokens}: a prompt and a token need 2")
        _require(self.head_width >= 1, f"model.head_width is {self.head_width}")
        for name, value in self.sampling_defaults.items():
            known = name in DEFAULTABLE and value in RANGES[name]
            _require(known, f"model.sampling_defaults.{name} is {value}: not a setting in its range")

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def input_tokens(self) -> int:
        """Maximum length of a prompt: an answer has at least one token."""
        return self.context_tokens - 1

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks that the model supports."""
        found = {
            "generate": self.generates,
            "embed": not self.labels,
            "score": self.scoring in PAIR_SCORES,
            "classify": bool(self.labels),
        }
        return tuple(name for name, able in found.items() if able)

    def is_called(self, name: object) -> bool:
        return name in self.names or (self.any_name and isinstance(name, str))


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiConfig(FrontOptions):
    """Limits, keys and behaviour of the HTTP front."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    "Bearer keys. Each key is a tenant: cached blocks, aborts and idempotency keys are not shared. Empty: no key is required."
    admin_api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Keys for the admin routes (/config, /metrics, /v1/pause and others); they open all other routes too. Empty: with API keys
    the admin routes are closed, without them they answer this machine only."""
    limits: Limits = field(default_factory=Limits)
    routers: tuple[str, ...] = ()
    "Addresses of the routers of this instance. An instance of a cluster has no routes that generate, and no chat page."
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
        """Settings for /config: keys are replaced by their number."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("limits", "settings")}
        own["api_keys"], own["admin_api_keys"] = len(self.api_keys), len(self.admin_api_keys)
        own["limits"] = {f.name: getattr(self.limits, f.name) for f in fields(self.limits)}
        return {"api": own, **self.settings}


def api_config_of(serve: ServeConfig, settings: Mapping[str, Any]) -> ApiConfig:
    """The front's part of the settings of `baton serve`. The command line also builds one, as a check before it starts
    anything."""
    return part_of(
        serve,
        ApiConfig,
        {"api_keys": "api_key", "admin_api_keys": "admin_api_key"},
        chat_page=serve.chat_page and not serve.routers,
        limits=limits_of(serve),
        settings=settings,
    )


def limits_of(serve: ServeConfig) -> Limits:
    """Limits of limits.py with the operator's changes. Raises for values that are not numbers of the right kind."""
    for each in fields(Limits):
        value = serve.limits.get(each.name, each.default)
        whole = not isinstance(each.default, int) or type(value) is int
        _require(whole, f"limits: {each.name} is {value}: give a whole number")
    return with_changes(Limits, serve.limits, "limits", "docs/limits.md")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise InvalidConfig(message)
