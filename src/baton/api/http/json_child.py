"""The process that parses large bodies (json_process.py): a frame with a body in, a frame with its value or an error out.

Parsing 8 MB of numbers keeps the interpreter lock for half a second; in here nobody else waits for it.

    frame    length u32, msgpack
    request  [limits as an object, context in tokens, body]
    reply    [value, null] or [null, [status, message, param, code]]
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any, Final

import msgspec

from baton.api.errors import ApiError, bad
from baton.api.http.json_body import parse_object
from baton.api.limits import Limits
from baton.api.openai.schemas import too_long

LENGTH: Final = struct.Struct("!I")
NICENESS: Final = 10
"""Whoever sends 8 MB can wait; whoever waits for a token should not."""


def serve(sock: socket.socket) -> None:
    while (request := receive(sock)) is not None:
        fields, context_tokens, body = msgspec.msgpack.decode(request)
        sock.sendall(_reply(body, msgspec.convert(fields, Limits), context_tokens))


def receive(sock: socket.socket) -> bytearray | None:
    """One frame's content; None at the end of the connection."""
    head = _exactly(sock, LENGTH.size)
    return None if head is None else _exactly(sock, LENGTH.unpack(head)[0])


def _exactly(sock: socket.socket, size: int) -> bytearray | None:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = sock.recv_into(view[got:])
        if not count:
            return None
        got += count
    return data


def _reply(body: bytes, limits: Limits, context_tokens: int) -> bytes:
    try:
        value = parse_object(body, limits)
        _require_fitting_prompt(value.get("prompt"), context_tokens)
        _require_few_values(value, limits.json_values)
        content = _packed([value, None])
    except ApiError as error:
        content = msgspec.msgpack.encode([None, [error.http_status, str(error), error.param, error.code]])
    return LENGTH.pack(len(content)) + content


def _require_fitting_prompt(prompt: Any, context_tokens: int) -> None:
    """A list of ids that is too long is told so, and not that the body has too many values."""
    if isinstance(prompt, list) and len(prompt) >= context_tokens and type(prompt[0]) is int:
        raise too_long(len(prompt), context_tokens)


def _require_few_values(body: dict[str, Any], most: int) -> None:
    """So that the receiver has little to make of it. Names the field with which they are too many."""
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


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except OverflowError:  # an int of more than 64 bits, which no field takes: as a float it is refused in the same way
        return msgspec.msgpack.encode(_with_floats(value))


def _with_floats(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_floats(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_floats(entry) for entry in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return 1e300 if value > 0 else -1e300
    return value


def main() -> None:
    os.nice(NICENESS)
    with socket.socket(fileno=0) as sock, contextlib.suppress(ConnectionError):  # the parent is gone
        serve(sock)


if __name__ == "__main__":
    main()
