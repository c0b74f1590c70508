"""What differs between dialects below their shapes: how an error looks, and how a stream is framed.

A route of app.py names its dialect, so even a request that is refused before anybody read it (a wrong key, a wrong method) is
refused in the words of its client. What has no route is told in the words of the dialect whose paths begin so, a broken request
line as OpenAI does it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

from baton.api.errors import ApiError, to_json

# Ends of lines to many a client (str.splitlines, httpx), though not to server-sent events. JSON may write them as escapes.
_LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))


def one_line(content: Any) -> bytes:
    """As JSON, on one line by anyone's idea of a line."""
    data = to_json(content)
    if not data.isascii():
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return data


def event(content: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + one_line(content) + b"\n\n"


def named_event(content: dict[str, Any]) -> bytes:
    """One server-sent event whose name is the content's type, as Anthropic's and the Responses API have them."""
    return b"event: " + str(content["type"]).encode("ascii") + b"\ndata: " + one_line(content) + b"\n\n"


def line(content: Any) -> bytes:
    """One line of newline-delimited JSON."""
    return one_line(content) + b"\n"


def text_frame(make: Callable[[str], bytes]) -> tuple[bytes, bytes]:
    """What stands before and after the text in an event that has nothing else to say, as most have. Cut out of an event with a
    text that stands nowhere else in it, so that its shape is written in one place."""
    mark = f"<{uuid.uuid4().hex}>"
    before, after = make(mark).split(to_json(mark))
    return before, after


@dataclass(frozen=True, slots=True)
class Dialect:
    name: str
    error_body: Callable[[ApiError, str], dict[str, Any]]
    "The body of an error; the second argument is the request's id."
    error_event: Callable[[dict[str, Any]], bytes] = event
    "An error's body as the last event of a stream that has begun."
    stream_type: str = "text/event-stream"
    untyped_bodies: bool = False
    "Its clients do not say that a body is JSON (http/access.py)."
    keep_alive: bytes = b": keep-alive\n\n"
    "Sent where a stream has no news for long. Clients must be able to skip it."


OPENAI = Dialect("openai", lambda error, request_id: error.body)


def dialect_of(scope: Scope) -> Dialect:
    """Of the route that was found (ApiRoute.handle)."""
    dialect: Dialect = scope.get("state", {}).get("dialect", OPENAI)
    return dialect
