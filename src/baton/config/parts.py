"""Builds the owners' classes from settings: by field names, or from a table of the YAML file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

from baton.errors import InvalidConfig

T = TypeVar("T")


def part_of(settings: object, owner: type[T], names: Mapping[str, str] | None = None, /, **others: Any) -> T:
    """The owner's configuration from settings with its field names, or with those in `names` (field: setting). `others` are
    computed values. Other fields keep their defaults."""
    found = {each.name: getattr(settings, each.name) for each in fields(owner) if hasattr(settings, each.name)}  # type: ignore[arg-type]
    found |= {name: getattr(settings, setting) for name, setting in (names or {}).items()}
    return owner(**{**found, **others})


def with_changes(owner: type[T], changes: Mapping[str, Any], table: str, page: str, leave_out: Collection[str] = ()) -> T:
    """The owner's defaults with `changes` applied: a table of the YAML file, documented on `page`. Raises InvalidConfig."""
    known = [field.name for field in fields(owner) if field.name not in leave_out]  # type: ignore[arg-type]
    for name in changes:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            raise InvalidConfig(f"{table} has no {name}" + (f"; did you mean {close[0]}?" if close else f": see {page}"))
    try:
        return owner(**changes)
    except InvalidConfig as error:
        raise InvalidConfig(str(error) if str(error).startswith(f"{table}.") else f"{table}: {error}") from None
