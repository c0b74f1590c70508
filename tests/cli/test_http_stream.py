"""The client of `baton chat` and `baton bench`, against bytes that a server might send."""

from __future__ import annotations

import asyncio

import pytest

from baton.cli.http_stream import HttpError, ServerAddress, get_json, stream_events
from baton.cli.private_server import models_at

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def served(answer: bytes, ask, url: str = "") -> tuple[object, bytes]:
    """What `ask` got of a server that sends these bytes; and the first line that it sent itself."""
    lines: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines.append(await reader.readline())
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, asyncio.timeout(20):
        port = server.sockets[0].getsockname()[1]
        return await ask(ServerAddress(f"http://127.0.0.1:{port}{url}")), lines[0]


async def events(server: ServerAddress) -> list[bytes]:
    return [event async for event in stream_events(server, "/v1/completions", {"prompt": "x"})]


def test_events_are_whole_however_the_bytes_are_cut():
    sent = b': comment\n\ndata: {"a": 1}\n\ndata: {"b": 2}\n\ndata: [DONE]\n\n'
    for size in (1, 7, 20, len(sent)):
        pieces = b"".join(chunk(sent[at : at + size]) for at in range(0, len(sent), size))
        got, _ = asyncio.run(served(CHUNKED + pieces + chunk(b""), events))
        assert got == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


def test_a_stream_that_breaks_off_is_no_answer():
    with pytest.raises(HttpError, match="the connection ended before the answer did"):
        asyncio.run(served(CHUNKED + chunk(b"data: 1\n\n"), events))


@pytest.mark.parametrize("url", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_in_v1(url: str):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    got, line = asyncio.run(served(answer, lambda server: get_json(server, "/v1/models"), url))
    assert (got, line) == ({}, b"GET /v1/models HTTP/1.1\r\n")


def test_an_error_is_told_in_the_server_s_words():
    answer = b'HTTP/1.1 429 Too Many\r\n\r\n{"error": {"message": "come back later"}}'
    with pytest.raises(HttpError, match="429 come back later") as error:
        asyncio.run(served(answer, events))
    assert error.value.status == 429


@pytest.mark.parametrize("status", ["404 Not Found", "200 OK", "403 Forbidden", "500 Broken", "302 Found"])
def test_a_server_of_something_else_is_called_that(status):
    page = b"<!DOCTYPE html><title>Not here</title>" * 20
    answer = b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(page), page)

    async def look(server: ServerAddress) -> object:
        return await asyncio.to_thread(models_at, server)

    said, _ = asyncio.run(served(answer, look))
    assert "no OpenAI-style server" in said
    assert "html" not in said
