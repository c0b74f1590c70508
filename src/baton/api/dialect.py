"""A dialect below its shapes: the form of an error, and the framing of a stream.

A route of app.py names its dialect, so even a request that is refused unread (a wrong key, a wrong method) gets an error in its
client's form. A path without a route gets the dialect with the same path prefix; a broken request line gets OpenAI's form.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from baton.api.errors import ApiError, to_json

# Characters that many clients take for line ends (str.splitlines, httpx), though not in server-sent events. JSON may write them
# as escapes.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def one_line(content: Any) -> bytes:
    """JSON without any character that a client might take for a line end."""
    data = to_json(content)
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + one_line(content) + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """One server-sent event with the content's type as its name, as in Anthropic's API and the Responses API."""
    return b"event: " + str(content["type"]).encode("ascii") + b"\ndata: " + one_line(content) + b"\n\n"


def line(content: Any) -> bytes:
    """One line of newline-delimited JSON."""
    return one_line(content) + b"\n"


def text_frame(make: Callable[[str], bytes]) -> tuple[bytes, bytes]:
    """Bytes before and after the text in an event that carries only text, as most events do. The frame is found by a unique
    placeholder, so that the event's shape is written in one place."""
    mark = f"<{uuid.uuid4().hex}>"
    before, after = make(mark).split(to_json(mark))
    return before, after


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    error_body: Callable[[ApiError, str], dict[str, Any]]
    "The body of an error; the second argument is the request's id."
    error_event: Callable[[dict[str, Any]], bytes] = event
    "An error's body as the last event of a begun stream."
    stream_type: str = "text/event-stream"
    untyped_bodies: bool = False
    "Whether clients of this dialect send JSON without a content type (http/access.py)."
    keep_alive: bytes = b": keep-alive\n\n"
    "Line sent after a long time without output. Clients must be able to skip it."


OPENAI = Dialect("openai", lambda error, request_id: error.body)


def dialect_of(scope: Scope) -> Dialect:
    """Dialect of the matched route (ApiRoute.handle); OpenAI's where none matched."""
    dialect: Dialect = scope.get("state", {}).get("dialect", OPENAI)
    return dialect
