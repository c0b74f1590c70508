"""The process that parses large bodies (json_process.py, text/helper_child.py).

Parsing 8 MB of numbers holds the interpreter lock for half a second; in this process no stream waits for it.

    first    [limits as an object, context in tokens]
    then     a body    -> [value, null] or [null, [status, message, param, code]]
"""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec

from baton.api.errors import ApiError, bad, too_long
from baton.api.http.json_body import parse_object
from baton.api.limits import Limits
from baton.text.helper_child import Answer, run

NICENESS: Final = 10
"""Streams have precedence over the parsing of large bodies."""
_TOO_MUCH: Final = [None, [413, "the body takes too much memory to parse", None, "body_too_large"]]


def begin(first: Any) -> Answer:
    os.nice(NICENESS)
    fields, context_tokens = first
    limits = msgspec.convert(fields, Limits)

    def reply(body: bytes) -> list[Any]:
        try:
            value = parse_object(body, limits)
            _require_fitting_prompt(value.get("prompt"), context_tokens)
            _require_few_values(value, limits.json_values)
        except ApiError as error:
            return [None, [error.http_status, str(error), error.param, error.code]]
        return [value, None]

    return reply


def _require_fitting_prompt(prompt: Any, context_tokens: int) -> None:
    """Refuse a token list that exceeds the context, with that error and not the one about too many values."""
    if isinstance(prompt, list) and len(prompt) >= context_tokens and type(prompt[0]) is int:
        raise too_long(len(prompt), context_tokens)


def _require_few_values(body: dict[str, Any], most: int) -> None:
    """Bounds the work of the receiver. The error names the field that exceeds the limit."""
    count = len(body)
    for name, value in body.items():
        waiting = [value] if isinstance(value, dict | list) else []
        while waiting:
            container = waiting.pop()
            count += len(container)
            if count > most:
                raise bad(f"the body has more than {most} values", name[:64], code="too_many_values")
            inside = container.values() if isinstance(container, dict) else container
            waiting += [child for child in inside if isinstance(child, dict | list)]


if __name__ == "__main__":
    run(begin, out_of_memory=_TOO_MUCH)
