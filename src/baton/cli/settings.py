"""Settings (config/schema.py) as options of a command line and as keys of a YAML file.

order of precedence    example                        if given in several: the upper one counts
flag                   --max-num-seqs 32
alias                  --parallel 32                  the same field; both at once are refused
YAML key               max_num_seqs: 32               aliases work too, with - or _
default                the dataclass

No setting is read from an environment variable: only the command line and the file count.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from baton.cli.say import Failed
from baton.config import ServeConfig
from baton.config.schema import SECRET, Setting, all_settings, flag_of, is_union
from baton.errors import InvalidConfig
from baton.familiar import (
    BY_ALIAS,
    FOREIGN,
    PAIR,
    SHORT,
    closest,
    environment_lines,
    in_our_words,
    line_about,
    switched_on,
    verdict_on,
)
from baton.familiar.speculation import Unusable, spread
from baton.ranges import refusal

ConfigT = TypeVar("ConfigT")

MEMBER = (
    *("router", "role", "name", "cluster_secret", "cluster_ssl_certfile", "cluster_ssl_keyfile", "cluster_ssl_ca_certs"),
    *("transfer_address", "transfer_announce", "transfer_digest", "data_parallel_size"),
)
"""Fields of ServeConfig for an instance of a cluster: not accepted by commands that start a router."""

FLAG_WORDS = ("true", "false", "yes", "no", "on", "off")
"""Words that are never a model's name, as in `--enable-prefix-caching true`."""


# Options


def parameters(settings: Sequence[Setting] | None = None) -> list[inspect.Parameter]:
    """Parameters of `baton serve`, or of a command with other settings, for its signature. None always means "not given"."""
    model = typer.Argument(metavar="MODEL", help=_summary_of_model(), show_default=False)
    config = typer.Option("--config", metavar="FILE", help="YAML file: every option is a key.")
    made = [_parameter("positional", str | None, model), _parameter("config", Path | None, config)]
    for setting in all_settings() if settings is None else settings:
        made.append(_option(setting, setting.name))
        made += [_option(setting, name) for name in setting.aliases]
    return made + [_foreign(name) for name in FOREIGN]


def _summary_of_model() -> str:
    (setting,) = [one for one in all_settings() if one.name == "model"]
    return setting.explained(setting.help)


def _foreign(name: str) -> inspect.Parameter:
    """A hidden option of other engines, which is refused or explained."""
    flag = FOREIGN[name].flag
    return _parameter(name, (bool if flag else str) | None, typer.Option(*_declared(name, flag=flag), hidden=True))


def _option(setting: Setting, name: str) -> inspect.Parameter:
    found = BY_ALIAS.get(name)
    sized = setting.kind is float and found is not None and found.row is not None and found.row.convert is not None  # 25G
    info = typer.Option(
        *_declared(name, flag=setting.kind is bool),
        metavar=setting.metavar or None,
        help=setting.explained(setting.help),
        show_default=False,
        rich_help_panel=setting.group,
        hidden=name != setting.name or name == "model",  # the argument has the value
    )
    return _parameter(name, (str if setting.choices or sized else setting.kind) | None, info)


def _declared(name: str, *, flag: bool) -> tuple[str, ...]:
    shown = flag_of(name)
    return (f"{shown}/--no-{shown[2:]}" if flag else shown, *SHORT.get(name, ()))


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, info])


# Values


def read_config(given: Mapping[str, Any], *, quiet: bool = False) -> ServeConfig:
    """Reads the command line's values (by parameter name). Raises Failed. `quiet`: prints nothing."""
    return Given(given, all_settings(), quiet=quiet).read(ServeConfig)


class Given:
    """Values of the command line (by parameter name) and of its --config file. Raises Failed."""

    def __init__(self, given: Mapping[str, Any], settings: Sequence[Setting], *, quiet: bool = False) -> None:
        flags = {name: value for name, value in given.items() if value is not None}
        self._file = flags.pop("config", None)
        positional = flags.pop("positional", None)
        if positional is not None:
            if positional.lower() in FLAG_WORDS:
                raise Failed(f"{positional}: a flag takes no value; write --NAME to switch it on, --no-NAME to switch it off")
            if flags.get("model", positional) != positional:
                raise Failed(f"two models: {positional} and --model {flags['model']}; give one of them")
            flags["model"] = positional
        self._owners = {setting.name: setting.owner for setting in settings}
        say = _silent if quiet else _print_notes
        for line in environment_lines(os.environ):
            say(line)
        self._from_flags = SettingSource("", settings, say).values(flags)
        self._from_file: dict[str, Any] = {}
        if self._file is not None:
            self._from_file = SettingSource(str(self._file), settings, say).values(read_yaml(self._file))

    def values(self, owner: Callable[..., ConfigT]) -> dict[str, Any]:
        """Values given for that class. Defaults are left out."""
        values = {**self._from_file, **self._from_flags}
        return {name: value for name, value in values.items() if self._owners[name] is owner}

    def read(self, owner: Callable[..., ConfigT]) -> ConfigT:
        """Reads the settings of that class."""
        try:
            return owner(**self.values(owner))
        except InvalidConfig as error:  # the message begins with the field's name
            name, _, rest = str(error).partition(" ")
            in_file = name in self._from_file and name not in self._from_flags
            raise Failed(f"{f'{self._file}: {name}' if in_file else flag_of(name)} {rest}") from None


def _print_notes(line: str) -> None:
    typer.echo(f"baton: {line}", err=True)


def _silent(line: str) -> None:
    pass


class SettingSource:
    """Names and values from one source: the command line, or a file."""

    def __init__(self, file: str, settings: Sequence[Setting], say: Callable[[str], None]) -> None:
        self._file = file
        "Name of the file. Empty: the command line."
        self._by_name = {name: setting for setting in settings for name in (setting.name, *setting.aliases)}
        self._flags = frozenset(name for name, setting in self._by_name.items() if setting.kind is bool)
        self._flags |= {name for name, row in FOREIGN.items() if row.flag}
        self._print_notes = say

    def values(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values by field. Options of other engines are refused with an alternative, or left out with a line."""
        values: dict[str, Any] = {}
        typed: dict[str, str] = {}
        for name, value in (switched_on(name, value, self._flags) for name, value in self._spread(given)):
            if self._is_foreign(name, value):
                continue
            setting = self._by_name.get(name)
            if setting is None:
                raise Failed(f"{self._file or 'command line'}: unknown key {name}{did_you_mean(name, self._by_name)}")
            read = self._read(setting, name, value)
            if setting.name in values and not (read == values[setting.name] and {name, typed[setting.name]} <= PAIR):
                both = f"{typed[setting.name]} and {name}"
                raise Failed(f"{self._file or 'command line'}: {both} are the same setting; give one of them")
            values[setting.name], typed[setting.name] = read, name
        return values

    def _spread(self, given: Mapping[str, Any]) -> list[tuple[str, Any]]:
        try:
            return list(spread(given))
        except Unusable as error:
            name, _, rest = str(error).partition(" ")
            raise Failed(f"{self._named(name)} {rest}") from None

    def _named(self, name: str) -> str:
        """The field's name as the user wrote it."""
        return f"{self._file}: {name}" if self._file else flag_of(name)

    def _is_foreign(self, name: str, value: Any) -> bool:
        verdict = verdict_on(name, value)
        if verdict is None:
            return False
        if verdict.taken == "refused":
            raise Failed(f"{self._named(name)} {verdict.words}")
        self._print_notes(f"{self._named(name)} {verdict.words}")
        return True

    def _read(self, setting: Setting, name: str, value: Any) -> Any:
        if line := line_about(setting.name, value):
            self._print_notes(f"{self._named(name)} {value}: {line}")
        if not self._file and setting.kind is str and not setting.choices and not _takes_text(setting.hint):
            value = _yaml_value(value)
        try:
            ours = in_our_words(name, setting.name, value)
        except ValueError:
            raise Failed(f"{self._named(name)} is {value!r}: it must be a number") from None
        converted = isinstance(ours, float) and str(ours) != str(value)
        return read_value(setting, ours, self._named(name) + (f" {value}, as {self._ours(setting)}," if converted else ""))

    def _ours(self, setting: Setting) -> str:
        return setting.name if self._file else setting.flag


def read_value(setting: Setting, value: Any, named: str) -> Any:
    """The value converted to the field's type, and checked against its range."""
    import msgspec

    if get_origin(setting.hint) is tuple and isinstance(value, str):
        value = [value]
    if get_origin(setting.hint) is tuple and isinstance(value, list) and setting.name not in SECRET:
        value = [part for each in value for part in _listed(each)]
    if setting.choices and isinstance(value, str) and (wrong := refusal(setting.owner, setting.name, value)):
        raise Failed(f"{named} {wrong}")
    try:
        read = msgspec.convert(value, setting.hint)
    except msgspec.ValidationError as error:
        shown = "" if setting.name in SECRET else f", and it is {value!r}"
        raise Failed(f"{named}: {str(error)[:1].lower()}{str(error)[1:]}{shown}") from None
    if wrong := refusal(setting.owner, setting.name, read):
        raise Failed(f"{named} {wrong}")
    return read


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
    return {_key(key): value for key, value in content.items()}


def _key(key: object) -> str:
    return "on" if key is True else str(key).replace("-", "_")  # YAML reads the word `on` as true


def _listed(value: Any) -> list[Any]:
    """A list value, which may be given as JSON, as in vLLM: '["*"]'."""
    try:
        found = json.loads(value) if isinstance(value, str) and value.startswith("[") else None
    except ValueError:
        found = None
    return found if isinstance(found, list) else [value]


def _takes_text(hint: Any) -> bool:
    return hint is str or (is_union(hint) and str in get_args(hint))


def _yaml_value(text: str) -> Any:
    """The value of a structured field: given as a flag it is YAML (JSON is YAML too)."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def did_you_mean(name: str, known: Iterable[str]) -> str:
    found = closest(name, known)
    ours = BY_ALIAS[found].setting if found in BY_ALIAS else found
    return f"; did you mean {ours}?" if found else "; `baton serve --help-all` lists them all"
