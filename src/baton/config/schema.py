"""The schema of options: one entry for each field of a class of settings, read from the class itself.

name, type, range and default    from the field
help                             the string under the field
group, basic, metavar            the tables below
aliases                          other names that mean the same (familiar/)

Command line, YAML file, --help, GET /config, docs/options.md and the tests are generated from it, so a new field needs no line
anywhere else; a field outside of GROUPS is in the group "More".
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from baton.config.serve import ServeConfig
from baton.familiar import ALIASES
from baton.ranges import Range, allowed_values

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        "model",
        "revision",
        "served_model_name",
        "max_model_len",
        "device",
        "quantization",
        "dtype",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "generation_config",
        "stop_on_repetition",
        "deterministic",
        "load_format",
        "model_shape",
        "compute",
        "threads",
        "tensor_parallel_size",
    ),
    "Server": (
        "host",
        "port",
        "api_key",
        "api_key_file",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
        "root_path",
        "allowed_hosts",
        "allowed_origins",
        "unknown_fields",
        "client_priority_min",
        "chat_page",
        "streams_per_key_max",
        "keep_alive_seconds",
        "retry_after_seconds",
        "text_threads",
        "limits",
    ),
    "Scheduling": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "chunk_tokens_max",
        "prefill_tokens_beside_decodes",
        "decode_gap_ms",
        "steps_in_flight",
        "order",
        "speculate",
        "speculative_tokens",
    ),
    "KV cache": (
        "gpu_memory_utilization",
        "kv_memory_gib",
        "kv_blocks",
        "kv_cache_dtype",
        "block_size",
        "enable_prefix_caching",
        "eviction",
        "kv_host_gib",
        "kv_storage",
        "kv_write",
        "kv_write_outputs",
        "preempted_kv",
    ),
    "Cluster": (
        "prefill",
        "decode",
        "mixed",
        "data_parallel_size",
        "router",
        "role",
        "name",
        "cluster_host",
        "cluster_port",
        "cluster_secret",
        "cluster_ssl_certfile",
        "cluster_ssl_keyfile",
        "cluster_ssl_ca_certs",
        "transfer_address",
        "transfer_announce",
        "transfer_digest",
        "wire",
        "placement",
        "handoff",
        "handoff_tokens_min",
        "migrations_max",
        "router_limits",
    ),
    "Ray": ("on", "cluster_name", "ray_address", "ray_strategy", "attach", "detach", "ray_insecure"),
    "Administration": ("admin_api_key", "admin_api_key_file", "admin_port", "admin_host", "log_level", "log_format"),
    "Queue": ("queue_requests_max", "queue_tokens_max"),
    "Times": ("step_seconds_max", "drain_seconds_max", "shutdown_delay", "start_seconds_max"),
}
"""Groups of options in the order of --help and of the page."""
MORE = "More"

BASIC = (
    *("served_model_name", "max_model_len", "device", "quantization", "host", "port", "api_key"),
    *("max_num_seqs", "gpu_memory_utilization", "kv_memory_gib", "kv_storage"),
    *("prefill", "decode", "mixed", "cluster_host", "cluster_port", "placement"),
)
"""Options that --help shows; --help-all shows the others too."""
BASIC_BESIDE: Mapping[str, str] = {"cluster_secret": "cluster_port"}
"""Options that --help shows if the command also has the second one of the pair."""

SECRET = ("api_key", "admin_api_key")
"""Names of settings whose values no message and no page shows."""

METAVARS: Mapping[str, str] = {
    **dict.fromkeys(("host", "admin_host", "cluster_host"), "HOST"),
    **dict.fromkeys(("port", "admin_port", "cluster_port"), "PORT"),
    **dict.fromkeys(("api_key", "admin_api_key"), "KEY"),
    **dict.fromkeys(("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "chat_template", "cluster_secret"), "FILE"),
    **dict.fromkeys(("api_key_file", "admin_api_key_file"), "FILE"),
    **dict.fromkeys(("cluster_ssl_certfile", "cluster_ssl_keyfile", "cluster_ssl_ca_certs"), "FILE"),
    **dict.fromkeys(("kv_storage", "router"), "URL"),
    **dict.fromkeys(("limits", "wire", "router_limits"), "YAML"),
    "model": "MODEL",
    "root_path": "PATH",
    "allowed_origins": "ORIGIN",
    **dict.fromkeys(("transfer_address", "transfer_announce"), "ADDRESS"),
    "gpu_memory_utilization": "SHARE",
    "decode_gap_ms": "MS",
}
"""Words for values, where the type is not specific enough."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a class of settings, as an option."""

    owner: type
    name: str
    hint: Any
    default: Any
    help: str
    group: str
    aliases: tuple[str, ...]

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def kind(self) -> Any:
        """Type of one value: without None, lists for tuples, and text (YAML) for structures."""
        bare = [part for part in get_args(self.hint) if part is not type(None)] if is_union(self.hint) else [self.hint]
        if len(bare) == 1 and (bare[0] in (bool, int, float, str) or get_origin(bare[0]) is Literal):
            return bare[0]
        return list[str] if get_origin(self.hint) is tuple else str

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed names. Plug-ins may add more (`plug_in_group`)."""
        names = allowed_values(self.owner)[self.name].names
        if names is not None:
            return *names.own, *names.forms
        return tuple(get_args(self.kind)) if get_origin(self.kind) is Literal else ()

    @property
    def plug_in_group(self) -> str:
        """The entry point group that adds names. Empty: none."""
        names = allowed_values(self.owner)[self.name].names
        return "" if names is None else names.group

    @property
    def bounds(self) -> Range | None:
        return allowed_values(self.owner)[self.name].bounds

    @property
    def metavar(self) -> str:
        """The placeholder after the flag. Empty: it takes no value."""
        if self.kind is bool or self.name in METAVARS:
            return METAVARS.get(self.name, "")
        if self.kind is float:
            return "GIB" if self.name.endswith("_gib") else "S"
        return "N" if self.kind is int else "NAME"

    @property
    def default_text(self) -> str:
        """Default as text. Empty: none; the help describes it."""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, float):
            return f"{self.default:g}"
        return "" if self.default in (None, (), {}) else str(self.default)

    @property
    def type_text(self) -> str:
        """Type for the page: `number from 1 to 64`, `auto, cpu or cuda`."""
        if self.choices:
            return ", ".join(self.choices) + (f", or a plug-in of {self.plug_in_group}" if self.plug_in_group else "")
        if self.bounds is not None:
            return f"{'whole number' if self.kind is int else 'number'} {self.bounds}"
        if get_origin(self.hint) is dict:
            return "table of numbers"
        return {bool: "flag", list[str]: "text, once or more", int: "whole number", float: "number"}.get(self.kind, "text")

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        first, separator, _ = self.help.partition(". ")
        return first + "." if separator else first

    def explained(self, text: str) -> str:
        """A help text with choices and default."""
        notes = [*([f"one of {', '.join(self.choices)}"] if self.choices else [])]
        notes += [f"default: {self.default_text}"] if self.default_text else []
        return f"{text} [{'; '.join(notes)}]" if notes else text


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a class, from its source: Python discards them."""
    docs = {name: doc for base in cls.__bases__ if is_dataclass(base) for name, doc in field_docs(base).items()}
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    for node, below in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            docs[node.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def all_settings(owner: type = ServeConfig, leave_out: Collection[str] = ()) -> list[Setting]:
    return [setting for setting in _schema_of(owner) if setting.name not in leave_out]


@cache
def _schema_of(owner: Any) -> tuple[Setting, ...]:
    hints, docs = get_type_hints(owner), field_docs(owner)
    groups = {name: group for group, names in GROUPS.items() for name in names}
    made = []
    for field in fields(owner):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        aliases = ALIASES.get(field.name, ()) if owner is ServeConfig else ()
        group = groups.get(field.name, MORE)
        made.append(Setting(owner, field.name, hints[field.name], default, docs.get(field.name, ""), group, aliases))
    return tuple(made)


def by_group(settings: Collection[Setting]) -> dict[str, list[Setting]]:
    """Settings by group, in the order of GROUPS; without empty groups."""
    places = {name: place for names in GROUPS.values() for place, name in enumerate(names)}
    found: dict[str, list[Setting]] = {group: [] for group in (*GROUPS, MORE)}
    for setting in settings:
        found[setting.group].append(setting)
    return {group: sorted(them, key=lambda one: places.get(one.name, 0)) for group, them in found.items() if them}
