"""ServeConfig (and what other commands take besides) as options and as YAML keys: generated, so that a new field needs no
line here.

order of precedence    example                        a field that is given in both: the upper one counts
flag                   --max-num-seqs 32
familiar flag          --parallel 32                  the same field; both at once are refused
YAML key               max_num_seqs: 32               familiar names work too, with - or _
default                the dataclass

No setting is read from an environment variable: what a server does is what its command line and its file say.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from baton.cli.say import Failed
from baton.config import ServeConfig
from baton.errors import InvalidConfig
from baton.familiar import FAMILIAR, FLAGS, SHORT, STRANGERS, verdict_on
from baton.ranges import refusal

ConfigT = TypeVar("ConfigT")

PANELS: dict[str, tuple[str, ...]] = {
    "Cluster": (
        "router",
        "role",
        "name",
        "prefill",
        "decode",
        "mixed",
        "cluster_host",
        "cluster_port",
        "cluster_secret",
        "transfer_address",
        "wire",
        "placement",
        "handoff",
        "handoff_tokens_min",
        "migrations_max",
        "router_limits",
    ),
    "Model": (
        "model",
        "revision",
        "served_model_name",
        "chat_template",
        "tool_call_parser",
        "reasoning_parser",
        "generation_config",
        "device",
        "dtype",
        "deterministic",
        "load_format",
        "model_shape",
        "quantization",
        "compute",
        "threads",
        "max_model_len",
    ),
    "Listening": (
        "host",
        "port",
        "root_path",
        "api_key",
        "api_key_file",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
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
    "Administration": ("admin_api_key", "admin_api_key_file", "admin_port", "admin_host", "log_level", "log_format"),
    "KV cache": (
        "kv_cache_dtype",
        "kv_blocks",
        "gpu_memory_utilization",
        "kv_memory_gib",
        "block_size",
        "enable_prefix_caching",
        "eviction",
        "kv_host_gib",
        "kv_storage",
        "kv_write",
        "kv_write_outputs",
        "preempted_kv",
    ),
    "Scheduling": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "chunk_tokens_max",
        "prefill_tokens_beside_decodes",
        "decode_gap_ms",
        "steps_in_flight",
        "order",
    ),
    "Queue": ("queue_requests_max", "queue_tokens_max"),
    "Times": ("step_seconds_max", "drain_seconds_max", "start_seconds_max"),
}
"""How --help groups the fields; one that is not named here is under "More"."""

MEMBER = ("router", "role", "cluster_secret", "transfer_address", "name")
"""Fields of ServeConfig that are about an instance of a cluster: not for commands that start a router."""

SECRET = ("api_key", "admin_api_key")
"""Values that no message repeats."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of ServeConfig, or of another class of settings, as the command line sees it."""

    owner: type
    name: str
    hint: Any
    default: Any
    help: str
    panel: str
    familiar: tuple[str, ...]

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def kind(self) -> Any:
        """The type of the option: without None, lists for tuples, and text (YAML) for what has no option type."""
        bare = [part for part in get_args(self.hint) if part is not type(None)] if _is_union(self.hint) else [self.hint]
        if len(bare) == 1 and (bare[0] in (bool, int, float, str) or get_origin(bare[0]) is Literal):
            return bare[0]
        return list[str] if get_origin(self.hint) is tuple else str

    @property
    def help_with_default(self) -> str:
        also = f" (also {', '.join(map(flag_of, self.familiar))})" if self.familiar else ""
        default = {True: "on", False: "off"}[self.default] if isinstance(self.default, bool) else self.default
        return f"{self.help}{also}" + ("" if default in (None, (), "", {}) else f" \\[default: {default}]")

    def read(self, value: Any, origin: str) -> Any:
        """The value as the field's type wants it, and in its range. `origin` is the file, or empty for the command line."""
        import msgspec

        if get_origin(self.hint) is tuple and isinstance(value, str):
            value = [value]
        if get_origin(self.hint) is tuple and isinstance(value, list) and self.name not in SECRET:
            value = [part for each in value for part in _listed(each)]
        named = f"{origin}: {self.name}" if origin else self.flag
        try:
            read = msgspec.convert(value, self.hint)
        except msgspec.ValidationError as error:
            shown = "" if self.name in SECRET else f", and it is {value!r}"
            raise Failed(f"{named}: {str(error)[:1].lower()}{str(error)[1:]}{shown}") from None
        if wrong := refusal(self.owner, self.name, read):
            raise Failed(f"{named} {wrong}")
        return read


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a class, from its source: Python itself throws those away."""
    tree = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    (body,) = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    docs = {}
    for node, below in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(below, ast.Expr):
            docs[node.target.id] = " ".join(ast.literal_eval(below.value).split())
    return docs


def all_settings(owner: type = ServeConfig, leave_out: Collection[str] = ()) -> list[Setting]:
    hints, docs = get_type_hints(owner), field_docs(owner)
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    made = []
    for field in fields(owner):
        if field.name in leave_out:
            continue
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        help_text = docs.get(field.name, "")
        panel = panels.get(field.name, "More")
        made.append(Setting(owner, field.name, hints[field.name], default, help_text, panel, FAMILIAR.get(field.name, ())))
    return made


# Options


def parameters(settings: Sequence[Setting] | None = None) -> list[inspect.Parameter]:
    """Everything that `baton serve`, or a command with other settings, takes, for its signature. None always means "not
    given"."""
    made = [
        _parameter("positional", str | None, typer.Argument(metavar="MODEL", help="Same as --model.", show_default=False)),
        _parameter("config", Path | None, typer.Option("--config", metavar="FILE", help="YAML: every option is a key.")),
    ]
    for setting in all_settings() if settings is None else settings:
        made.append(_option(setting, setting.name))
        made += [_option(setting, name) for name in setting.familiar]
    return made + [_stranger(name) for name in STRANGERS]


def _stranger(name: str) -> inspect.Parameter:
    """An option of other engines, which is answered in words."""
    flag = flag_of(name)
    declared = [f"{flag}/--no-{flag[2:]}"] if name in FLAGS else [flag, *([SHORT[name]] if name in SHORT else [])]
    return _parameter(name, (bool if name in FLAGS else str) | None, typer.Option(*declared, hidden=True))


def _option(setting: Setting, name: str) -> inspect.Parameter:
    flag = flag_of(name)
    declaration = f"{flag}/--no-{flag[2:]}" if setting.kind is bool else flag
    shown = name == setting.name
    info = typer.Option(
        *(declaration, *([SHORT[name]] if name in SHORT else [])),
        help=setting.help_with_default,
        show_default=False,
        rich_help_panel=setting.panel,
        hidden=not shown,
    )
    return _parameter(name, setting.kind | None, info)


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])


# Values


def read_config(given: Mapping[str, Any], *, quiet: bool = False) -> ServeConfig:
    """From what the command line gave (by parameter name). Raises Failed with what to do. `quiet`: says nothing else."""
    return Given(given, all_settings(), quiet=quiet).read(ServeConfig)


def _without_strangers(given: Mapping[str, Any], origin: str, *, quiet: bool) -> dict[str, Any]:
    """Settings of other engines are refused with what there is here, or left out with a line that says why."""
    left: dict[str, Any] = {}
    for name, value in given.items():
        verdict = verdict_on(name, value)
        named = f"{origin}: {name}" if origin else flag_of(name)
        if verdict is None:
            left[name] = value
        elif verdict.taken == "refused":
            raise Failed(f"{named} {verdict.words}")
        elif not quiet:
            typer.echo(f"baton: {named} {verdict.words}", err=True)
    return left


class Given:
    """What the command line gave (by parameter name), and the file that it names. Raises Failed with what to do."""

    def __init__(self, given: Mapping[str, Any], settings: Sequence[Setting], *, quiet: bool = False) -> None:
        flags = {name: value for name, value in given.items() if value is not None}
        self._file = flags.pop("config", None)
        positional = flags.pop("positional", None)
        if positional is not None:
            if positional.lower() in ("true", "false", "yes", "no", "on", "off"):  # --prefix-caching true
                raise Failed(f"{positional}: a flag takes no value; write --NAME to switch it on, --no-NAME to switch it off")
            if flags.get("model", positional) != positional:
                raise Failed(f"two models: {positional} and --model {flags['model']}; give one of them")
            flags["model"] = positional
        self._owners = {setting.name: setting.owner for setting in settings}
        self._from_flags = _by_field(_without_strangers(flags, "", quiet=quiet), settings, "", parse_text=True)
        self._from_file = {}
        if self._file is not None:
            keys = _without_strangers(read_yaml(self._file), str(self._file), quiet=quiet)
            self._from_file = _by_field(keys, settings, str(self._file))

    def read(self, owner: Callable[..., ConfigT]) -> ConfigT:
        """The settings of that class."""
        values = {**self._from_file, **self._from_flags}
        try:
            return owner(**{name: value for name, value in values.items() if self._owners[name] is owner})
        except InvalidConfig as error:  # begins with the field's name
            name, _, rest = str(error).partition(" ")
            in_file = name in self._from_file and name not in self._from_flags
            raise Failed(f"{f'{self._file}: {name}' if in_file else flag_of(name)} {rest}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Failed(f"--config {path}: cannot be read ({error.strerror}); give a YAML file") from None
    except (yaml.YAMLError, ValueError) as error:
        raise Failed(f"--config {path}: is no YAML ({error})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise Failed(f"--config {path}: must hold keys with values, like `port: 8001`, not a {type(content).__name__}")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _by_field(
    given: Mapping[str, Any], settings: Sequence[Setting], origin: str, *, parse_text: bool = False
) -> dict[str, Any]:
    by_name = {name: setting for setting in settings for name in (setting.name, *setting.familiar)}
    values: dict[str, Any] = {}
    named: dict[str, str] = {}
    for name, value in given.items():
        setting = by_name.get(name)
        if setting is None:
            raise Failed(f"{origin or 'command line'}: unknown key {name}{did_you_mean(name, by_name)}")
        if setting.name in values:
            raise Failed(f"{origin or 'command line'}: {named[setting.name]} and {name} are the same setting; give one of them")
        if parse_text and setting.kind is str and not _takes_text(setting.hint):
            value = _yaml_value(value)
        values[setting.name], named[setting.name] = setting.read(value, origin), name
    return values


def _listed(value: Any) -> list[Any]:
    """A list may be given as JSON, as vLLM's options are: '["*"]'."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.startswith("[") else None
    except ValueError:
        found = None
    return found if isinstance(found, list) else [value]


def _takes_text(hint: Any) -> bool:
    return hint is str or (_is_union(hint) and str in get_args(hint))


def _yaml_value(text: str) -> Any:
    """A field with structure, given as a flag, is written as YAML (JSON is YAML too)."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def did_you_mean(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else "; `baton serve --help` lists them all"
