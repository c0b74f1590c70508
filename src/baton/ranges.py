"""Allowed values of a setting, read from its type: `Annotated[int, Range(0, 65_535)]`, `Literal["lru", "lfu"]`, `Annotated[str,
Names(("cpu", "cuda"), "baton.platforms")]`."""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from baton.errors import InvalidConfig


@dataclass(frozen=True, slots=True)
class Range:
    """A range of numbers. With `above=True` `low` itself is excluded."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        """Whether the number is allowed. NaN compares false with everything, so it is in no range."""
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        return f"{f'more than {self.low:,} and at most' if self.above else f'from {self.low:,} to'} {self.high:,}"


@dataclass(frozen=True, slots=True)
class Names:
    """A set of names: `own`, the installed entry points of `group`, and what begins as one of `forms`."""

    own: tuple[str, ...]
    group: str = ""
    "Entry point group of further names. Empty: none."
    forms: tuple[str, ...] = ()
    "Forms of further names: a prefix with a colon and a word for what follows it, draft:MODEL."

    def __contains__(self, value: object) -> bool:
        return value in self.own or self.has_form(value) or value in self.installed()

    def has_form(self, value: object) -> bool:
        prefix, colon, rest = value.partition(":") if isinstance(value, str) else ("", "", "")
        return bool(colon and rest.strip()) and prefix in [form.partition(":")[0] for form in self.forms]

    def installed(self) -> list[str]:
        """Names of installed entry points. Slow, as it searches all installed packages: only for names outside of `own`."""
        if not self.group:
            return []
        from importlib.metadata import entry_points

        return sorted({entry.name for entry in entry_points(group=self.group)} - set(self.own))

    def __str__(self) -> str:
        words = f"one of {', '.join((*self.own, *self.forms))}"
        if not self.group:
            return words
        return f"{words} (by entry points of {self.group}: {', '.join(self.installed()) or 'none installed'})"


class Allowed(NamedTuple):
    kind: Any
    "The type without None and Annotated."
    bounds: Range | None
    optional: bool
    "Whether None is allowed too."
    names: Names | None


@cache
def allowed_values(cls: type) -> dict[str, Allowed]:
    """Allowed values by field of a dataclass."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        optional = get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)
        if optional:
            (hint,) = [part for part in get_args(hint) if part is not type(None)]
        extras = getattr(hint, "__metadata__", ())
        bounds = next((each for each in extras if isinstance(each, Range)), None)
        names = next((each for each in extras if isinstance(each, Names)), None)
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        found[name] = Allowed(bare, bounds, optional, names)
    return found


def refusal(cls: type, name: str, value: object) -> str:
    """The error in a value, to follow the name of its setting; empty if it is allowed."""
    kind, bounds, optional, names = allowed_values(cls)[name]
    if value is None and optional:
        return ""
    if get_origin(kind) is Literal and value not in get_args(kind):
        return f"is {value!r}: it must be one of {', '.join(map(str, get_args(kind)))}"
    if names is not None and value not in names:
        return f"is {value!r}: it must be {names}"
    if bounds is None:
        return ""
    whole = kind is int
    if isinstance(value, int if whole else int | float) and not isinstance(value, bool) and value in bounds:
        return ""
    return f"is {value!r}: it must be {'a whole number ' if whole else ''}{bounds}"


def check_values(config: object) -> None:
    """Raises InvalidConfig for the first field whose value is not allowed."""
    cls: type = type(config)
    for name in allowed_values(cls):
        if wrong := refusal(cls, name, getattr(config, name)):
            raise InvalidConfig(f"{name} {wrong}")
