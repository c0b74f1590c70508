"""Streams with another uvicorn than the one we know: what it does not document is missing, and they take the long way."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from api_fakes import Script, Serving, says

from baton.api.dialect import OPENAI
from baton.api.http.server import UvicornBody
from baton.api.http.streaming import EndOfTurn, EventStream, SendBuffer


def streamed(server: Serving, http) -> str:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}
    with http.stream("POST", server.url + "/v1/chat/completions", json=body) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


def missing(*_: object) -> bool:
    raise AttributeError("chunked_encoding")


@pytest.mark.parametrize("way", ["ready", "write"])
def test_a_stream_is_the_same_where_an_attribute_is_missing(server: Serving, http, text, monkeypatch, way: str):
    words = "One two three four five six seven."
    server.engine.script = Script(reply=says(text, words), delay_seconds=0.002)
    assert streamed(server, http) == words
    monkeypatch.setattr(UvicornBody, way, property(missing) if way == "ready" else missing)
    assert streamed(server, http) == words


def test_a_stream_that_cannot_be_written_does_not_hold_up_the_others_of_its_turn(caplog):
    written: list[int] = []

    async def turn() -> None:
        end = EndOfTurn()
        for what in (lambda: written.append(1), missing, lambda: written.append(2)):
            end.run_at_end(what)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(turn())
    assert written == [1, 2]
    assert "a stream could not be written: AttributeError" in caplog.text


def test_what_goes_the_short_way_puts_off_the_next_keep_alive():
    """Else a stream with a token a second would have a comment line every few seconds."""

    class Direct:
        ready, written = True, b""

        def write(self, data: bytes) -> None:
            self.written += data

    async def flush() -> None:
        direct, buffer = Direct(), SendBuffer(1000)
        stream = EventStream(
            {"state": {"direct_body": direct}}, None, None, headers={}, keep_alive_seconds=10.0, write_seconds=10.0,
            turn=EndOfTurn(), dialect=OPENAI, error_event=lambda error: b"",
        )  # fmt: skip
        buffer.put(b"event")
        stream._now = lambda: 12345.0
        stream._flush(buffer)
        assert (direct.written, stream._sent_at) == (b"event", 12345.0)

    asyncio.run(flush())


def test_the_short_way_is_taken_with_the_uvicorn_that_is_here(server: Serving, http, text, monkeypatch):
    written: list[int] = []
    own = UvicornBody.write
    monkeypatch.setattr(UvicornBody, "write", lambda self, data: (written.append(len(data)), own(self, data))[1])
    server.engine.script = Script(reply=says(text, "One two three four five."), delay_seconds=0.002)
    assert streamed(server, http) == "One two three four five."
    assert written


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_of_http_1_0_gets_no_chunks(server: Serving, text, streamed: bool):
    """It does not know them: their lengths would stand in the middle of its answer. Found by an audit."""
    server.engine.script = Script(reply=says(text, "One two three four five."), delay_seconds=0.002)
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": streamed}).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(f"{head}\r\nHost: 127.0.0.1\r\n\r\n".encode() + body)
        received = b"".join(iter(lambda: connection.recv(65536), b""))  # to the end of the connection
    headers, _, answer = received.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    if not streamed:
        assert json.loads(answer)["choices"][0]["message"]["content"] == "One two three four five."
        return
    *events, done = answer.decode().removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    parts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(parts) == "One two three four five."
