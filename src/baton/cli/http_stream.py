"""A small HTTP/1.1 client for OpenAI-style servers: JSON in, JSON or server-sent events out, standard library only.

The client shares the machine with the server that it measures, so it must be cheap; and it must see the raw stream, which large
client libraries hide: the time of every event, and whether the stream ended properly. A connection serves one request. The
caller sets deadlines (asyncio.timeout); closing the iterator closes the connection, which cancels the request.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

LINE_BYTES_MAX = 1 << 22
ERROR_BYTES_MAX = 2000
PLAIN_CHARACTERS_MAX = 200


class HttpError(Exception):
    """The request failed: no connection, a status other than 200, or bytes that are not HTTP."""

    def __init__(self, message: str, status: int = 0, *, explained: bool = True) -> None:
        super().__init__(message)
        self.status = status
        self.explained = explained
        "Whether the message is the server's own, in JSON. False: it is not an OpenAI-style server."


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """URL and key of a server."""

    url: str
    "URL, for example http://127.0.0.1:8000, with or without /v1."
    api_key: str | None = None

    def at(self, path: str) -> str:
        """URL of a path, which starts with /v1 or is the server's own, like /health."""
        return self.url.rstrip("/").removesuffix("/v1") + path


async def get_text(server: ServerAddress, path: str) -> str:
    return b"".join([chunk async for chunk in _exchange(server, "GET", path, None)]).decode("utf-8", "replace")


async def get_json(server: ServerAddress, path: str) -> Any:
    body = await get_text(server, path)
    try:
        return json.loads(body) if body.strip() else None
    except ValueError:
        raise HttpError(f"{server.at(path)}: the answer is not JSON, so this is no OpenAI-style server") from None


async def stream_events(server: ServerAddress, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
    """The content of each `data:` line, [DONE] included."""
    rest = b""
    async with aclosing(_exchange(server, "POST", path, json.dumps(body).encode())) as chunks:
        async for chunk in chunks:
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()


def _has_valid_port(url: SplitResult) -> bool:
    try:
        return url.port is None or url.port > 0
    except ValueError:  # out of range, or not a number
        return False


async def _exchange(server: ServerAddress, method: str, path: str, body: bytes | None) -> AsyncGenerator[bytes, None]:
    """The body of a 200 answer, in pieces as they arrive. Raises HttpError."""
    url = urlsplit(server.at(path))
    if url.scheme not in ("http", "https") or not url.hostname or not _has_valid_port(url):
        raise HttpError(f"{server.url}: not an address; write http://HOST:PORT")
    secure = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (443 if secure else 80)
    try:
        reader, writer = await asyncio.open_connection(url.hostname, port, ssl=secure, limit=LINE_BYTES_MAX)
    except OSError as error:
        raise HttpError(f"no server answers at {server.url} ({error.strerror or error})") from None
    try:
        writer.write(_head(server, method, url.netloc, url.path, body) + (body or b""))
        await writer.drain()
        status, headers = await _read_head(reader)
        pieces = _read_body(reader, headers)
        if status != 200:
            reply = b"".join([piece async for piece in pieces])[:ERROR_BYTES_MAX].decode("utf-8", "replace")
            message = _message_in(reply)
            words = f"{method} {path}: {status}" + (f" {message}" if message else f", which {server.url} does not explain")
            raise HttpError(words, status, explained=bool(message))
        async for piece in pieces:
            yield piece
    except asyncio.IncompleteReadError:
        raise HttpError(f"{method} {path}: the connection ended before the answer did") from None
    except (OSError, ValueError) as error:
        raise HttpError(f"{method} {path}: the connection broke ({type(error).__name__}: {error})") from None
    finally:
        writer.close()


def _head(server: ServerAddress, method: str, host: str, path: str, body: bytes | None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", "Accept: */*"]
    if server.api_key:
        lines.append(f"Authorization: Bearer {server.api_key}")
    if body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = (await reader.readline()).split(maxsplit=2)
    if len(first) < 2 or not first[0].startswith(b"HTTP/"):
        raise HttpError("the server closed the connection, or does not speak HTTP")
    headers = {}
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.decode().lower()] = value.strip().decode("latin-1")
    return int(first[1]), headers


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    if "chunked" in headers.get("transfer-encoding", ""):
        while size := int((await _line(reader)).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readline()
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


async def _line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line:
        raise asyncio.IncompleteReadError(b"", None)
    return line


def _message_in(text: str) -> str:
    """The message of a JSON error body, or a short plain text. Empty: a web page, or nothing."""
    try:
        content = json.loads(text)
        error = content.get("error", content.get("detail", content))
        return str(error.get("message", text) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        plain = " ".join(text.split())
        return "" if plain.startswith("<") else plain[:PLAIN_CHARACTERS_MAX]
