"""The client's trace of a request: the header `traceparent` of W3C Trace Context."""

from __future__ import annotations

import re
from typing import Final

from starlette.types import Scope

from baton.protocol.request import TRACEPARENT_PATTERN

_FORMAT: Final = re.compile(TRACEPARENT_PATTERN)
_NO_TRACE: Final = "0" * 32
_NO_PARENT: Final = "0" * 16


def traceparent_of(scope: Scope) -> str:
    """The client's `traceparent`. Empty if there is none, several, or an invalid one, which the standard says to ignore."""
    given = [value for name, value in scope["headers"] if name == b"traceparent"]
    if len(given) != 1:
        return ""
    text: str = given[0].decode("latin-1").strip()
    if _FORMAT.fullmatch(text) is None:
        return ""
    version, trace, parent, _ = text.split("-")
    return "" if version == "ff" or trace == _NO_TRACE or parent == _NO_PARENT else text
