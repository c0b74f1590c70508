"""A large answer as JSON, built and sent in parts: other streams do not wait for it, and an unread answer takes little memory.

dict -> json_parts: about 64 KiB at a time -> send -> drain: waits for the client, never longer than write_seconds
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

from starlette.types import Message, Send

from baton.api.errors import JsonRows, to_json
from baton.api.http.streaming import ClientGone

PART_BYTES: Final = 64 * 1024
_ROWS_AT_ONCE: Final = 256


def json_parts(content: Any, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """Parts whose concatenation is `to_json(content)`. Rows are built when their part is requested."""
    waiting = bytearray()
    for crumb in _crumbs(content):
        waiting += crumb
        if len(waiting) >= part_bytes:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)


def _crumbs(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        mark = b"{"
        for key, entry in value.items():
            yield mark + to_json(key) + b":"
            yield from _crumbs(entry)
            mark = b","
        yield b"{}" if not value else b"}"
    elif isinstance(value, JsonRows) or (isinstance(value, list) and value and isinstance(value[0], dict | list)):
        yield from _list_crumbs(iter(value), whole=isinstance(value, JsonRows))
    else:
        yield to_json(value)


def _list_crumbs(entries: Iterator[Any], whole: bool) -> Iterator[bytes]:
    """Yield a list entry by entry. `whole`: entries are small, so many are encoded at once."""
    mark = b"["
    while some := list(islice(entries, _ROWS_AT_ONCE if whole else 1)):
        yield mark
        if whole:
            yield to_json(some)[1:-1]
        else:
            yield from _crumbs(some[0])
        mark = b","
    yield b"[]" if mark == b"[" else b"]"


async def send_json(
    send: Send,
    content: Any,
    *,
    headers: dict[str, str],
    write_seconds: float,
    before: Callable[[bytes, bool], None] = lambda part, last: None,
) -> None:
    """Sends a 200. Raises ClientGone("slow") if the client reads nothing for `write_seconds`.

    before   called with each part before it is sent, and whether it is the last
    """
    parts = json_parts(content)
    part: bytes | None = next(parts)
    following = next(parts, None)
    sent = {"content-type": "application/json", **headers}
    if following is None:
        sent["content-length"] = str(len(part or b""))
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()]
    message: Message | None = {"type": "http.response.start", "status": 200, "headers": raw}
    while message is not None:
        try:
            async with asyncio.timeout(write_seconds):
                await send(message)
        except TimeoutError:
            raise ClientGone("slow") from None
        await asyncio.sleep(0)  # without a pause, a client that reads fast would delay the others
        message = None
        if part is not None:
            before(part, following is None)
            message = {"type": "http.response.body", "body": part, "more_body": following is not None}
            part, following = following, next(parts, None)
