"""Values of options without pydantic. Typer builds a validator for every parameter that a command has, given or not; with the
options of a server that takes as long as all the rest of a start. Plain values need none, and an unusual one gets typer's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args, get_origin

INT = re.compile(r"[0-9]{1,18}", re.ASCII)
FLOAT = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?", re.ASCII)
UNUSUAL = object()


class QuickParam:
    """Stands for typer's RuntimeParam, which is built when a value needs it."""

    def __init__(self, kind: Any, build: Callable[[], Any]) -> None:
        self._kind = kind
        self._build = build

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        read = plain_value(self._kind, value)
        return self._build().coerce(value, param=param, ctx=ctx) if read is UNUSUAL else read


def plain_value(kind: Any, value: Any) -> Any:
    """Returns what typer makes of the value, or UNUSUAL."""
    if kind == list[str] and isinstance(value, (list, tuple)) and all(type(each) is str for each in value):
        return list(value)
    if get_origin(kind) is Literal and type(value) is str and value in get_args(kind):
        return value
    if kind in (str, int, float) and type(value) is kind:
        return value
    if type(value) is str and kind in (int, float) and (INT if kind is int else FLOAT).fullmatch(value):
        return kind(value)
    return UNUSUAL


def read_quickly(params: list[Any]) -> list[Any]:
    """The same parameters, which now build no validator for a plain value."""
    for param in params:
        try:
            described, build = param.type_descriptor, param.get_runtime_param
            info = described.parameter_info
            is_plain = info.parser is None and info.min is None and info.max is None and not info.path_type
        except AttributeError:  # another version of typer
            continue
        if is_plain and "get_runtime_param" not in vars(param):
            param.get_runtime_param = partial(_same, QuickParam(described.annotation, build))
    return params


def _same(quick: QuickParam) -> QuickParam:
    return quick
