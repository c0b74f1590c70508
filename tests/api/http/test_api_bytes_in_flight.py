"""Bytes in flight: unfinished bodies and unread answers stay within one budget, and nobody else waits for them."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import orjson
import pytest
from api_fakes import MODEL, Script, eventually, serving
from hypothesis import given
from hypothesis import strategies as st

from baton.api.config import ApiConfig
from baton.api.errors import ApiError, JsonRows, to_json
from baton.api.http.budget import SMALL_BYTES, ByteBudget
from baton.api.http.json_parts import PART_BYTES, json_parts
from baton.api.http.streaming import ClientGone, SendBuffer
from baton.api.limits import Limits

MIB = 1024 * 1024
HEAD = "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"


def connect(server, receive_buffer: int = 4096) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    return connection


def begin(connection: socket.socket, path: str, length: int, part: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # refused while it was still sending
        connection.sendall(HEAD.format(path=path, length=length).encode() + part)


# The budget


def test_a_lease_takes_and_gives_back():
    budget = ByteBudget(1000)
    with budget.lease() as lease:
        lease.take(600)
        assert (budget.used, lease.held) == (600, 600)
        lease.close()
        assert budget.used == 0
        lease.take(1000)
        with pytest.raises(ApiError) as error:
            lease.take(1)
        assert (error.value.http_status, error.value.code) == (429, "too_many_bytes")
        assert budget.used == 1000
    assert (budget.used, budget.most) == (0, 1000)


def test_large_holders_leave_room_for_small_ones():
    budget = ByteBudget(40 * SMALL_BYTES)
    with contextlib.ExitStack() as stack:
        large = [stack.enter_context(budget.lease()) for _ in range(3)]
        for lease in large[:2]:
            lease.take(15 * SMALL_BYTES)
        with pytest.raises(ApiError):
            large[2].take(2 * SMALL_BYTES)
        large[2].take(SMALL_BYTES)
        with pytest.raises(ApiError):
            large[2].take(1)  # many small pieces are a large holder too
        large[2].close()
        for _ in range(10):
            stack.enter_context(budget.lease()).take(SMALL_BYTES)
    assert budget.used == 0


def test_what_a_client_has_taken_makes_room_for_more():
    """A stream may be longer than the buffer for what waits."""
    buffer = SendBuffer(3 * SMALL_BYTES)
    for _ in range(10):
        buffer.put(b"x" * SMALL_BYTES)
        assert buffer.take() == b"x" * SMALL_BYTES
    for _ in range(3):
        buffer.put(b"x" * SMALL_BYTES)
    with pytest.raises(ClientGone):
        buffer.put(b"x")
    assert buffer.overflowed.is_set()


def test_a_body_is_let_go_when_it_is_prepared(text, http):
    """What is left of it while its answer is made is token ids."""
    with serving(text) as server, ThreadPoolExecutor(1) as thread:
        front = server.app.state.front
        server.engine.script = Script(delay_seconds=0.02)
        body = {"prompt": "word " * 20, "max_tokens": 400, "ignore_eos": True}
        asking = thread.submit(http.post, server.url + "/v1/completions", json=body, headers={"X-Request-Id": "one"})
        assert eventually(lambda: server.engine.live)
        assert front.budget.most > 100
        assert front.budget.used < 100, "but for what there is of the answer"
        assert http.post(server.url + "/v1/abort", json={"request_id": "one"}).json()["aborted"] == 1
        assert asking.result(20).status_code == 200


# Bodies


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_sixty_unfinished_bodies_stay_within_the_budget_and_hold_no_place(text, http, path):
    """Each was held in memory and in a place among the streams, for a minute: 60 x 8 MiB."""
    limits = Limits(bytes_in_flight=16 * MIB, streams=4)
    with serving(text, ApiConfig(limits=limits)) as server, contextlib.ExitStack() as stack:
        front = server.app.state.front
        part = b'{"prompt": "' + b"x" * MIB
        connections = [stack.enter_context(connect(server)) for _ in range(60)]
        for connection in connections:
            begin(connection, path, 8 * MIB, part)
        assert eventually(lambda: front.budget.used > 10 * MIB, 10)
        assert front.budget.most <= 12 * MIB
        assert len(front.live) == 0
        answer = http.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 2})
        assert answer.status_code == 200, "a small request gets through"
        assert front.budget.most <= limits.bytes_in_flight
        refused = [reply for reply in map(reply_of, connections) if reply]
        assert len(refused) >= 45
        assert all(reply.startswith(b"HTTP/1.1 429") and b"retry-after" in reply for reply in refused)
        stack.close()
        assert eventually(lambda: front.budget.used == 0, 10)


def reply_of(connection: socket.socket) -> bytes:
    """What has come so far; nothing where the server still waits."""
    connection.settimeout(0.05)
    try:
        return connection.recv(65536)
    except TimeoutError:
        return b""
    except ConnectionError:
        return b"HTTP/1.1 429 (reset)\r\nretry-after: 1"


def test_an_unfinished_body_has_a_deadline_and_gives_its_bytes_back(text):
    with serving(text, ApiConfig(limits=Limits(body_seconds=0.3))) as server, connect(server) as connection:
        front = server.app.state.front
        begin(connection, "/v1/completions", MIB, b'{"prompt": "' + b"x" * 100_000)
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
        assert eventually(lambda: front.budget.used == 0)
        assert front.budget.most > 100_000


def test_a_slow_body_holds_no_place_among_the_streams(text, http):
    with serving(text, ApiConfig(limits=Limits(streams=1))) as server, connect(server) as connection:
        begin(connection, "/v1/completions", 100, b'{"prompt": ')
        assert eventually(lambda: server.app.state.front.budget.used > 0)
        assert http.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


# Answers


ENTRIES = {"prompt": [5] * 200, "max_tokens": 300, "logprobs": 20, "prompt_logprobs": 20, "ignore_eos": True}


def test_unread_whole_answers_are_counted_until_they_are_dropped(text, http):
    """They lay in the sockets' buffers, uncounted: three of 113 MB each, with no request open."""
    limits = Limits(bytes_in_flight=8 * MIB, write_seconds=0.5)
    with serving(text, ApiConfig(limits=limits)) as server, contextlib.ExitStack() as stack:
        front = server.app.state.front
        server.engine.script = Script(tokens_per_delta=300)
        body = json.dumps(ENTRIES).encode()
        connections = [stack.enter_context(connect(server)) for _ in range(30)]
        for connection in connections:
            begin(connection, "/v1/completions", len(body), body)
        assert eventually(lambda: front.budget.used > MIB, 10)
        assert len(front.live) > 0, "an answer that is being sent is a request that is open"
        assert eventually(lambda: front.budget.used == 0 and len(front.live) == 0, 20)
        assert front.budget.most <= limits.bytes_in_flight
        assert http.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_large_answer_comes_whole_and_the_same(server, http, text):
    server.engine.script = Script(tokens_per_delta=300)
    answer = http.post(server.url + "/v1/completions", json=ENTRIES)
    assert answer.status_code == 200
    assert "content-length" not in answer.headers, "sent in parts"
    assert len(answer.content) > 3 * PART_BYTES
    choice = answer.json()["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"]) == 300
    assert len(choice["prompt_logprobs"]) == 200
    assert orjson.dumps(answer.json()) == answer.content


def test_a_small_answer_says_its_length(server, http):
    answer = http.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 3, "logprobs": 2})
    assert int(answer.headers["content-length"]) == len(answer.content)


def test_an_answer_larger_than_the_budget_is_refused_and_aborted(text, http):
    with serving(text, ApiConfig(limits=Limits(bytes_in_flight=MIB))) as server:
        server.engine.script = Script(tokens_per_delta=10)
        answer = http.post(server.url + "/v1/completions", json=ENTRIES | {"max_tokens": 300, "n": 8})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_bytes")
        assert eventually(lambda: not server.engine.live and server.app.state.front.budget.used == 0)


def test_what_streams_have_unread_counts_too(text, http):
    """A place in the budget for every byte beyond what a client that keeps up has waiting."""
    limits = Limits(bytes_in_flight=MIB, write_seconds=30)
    with serving(text, ApiConfig(limits=limits), model=replace(MODEL, context_tokens=40_000)) as server:
        front = server.app.state.front
        server.engine.script = Script(reply=lambda request, index: [500] * request.sampling.max_tokens, tokens_per_delta=20)
        body = json.dumps(ENTRIES | {"max_tokens": 10_000, "prompt_logprobs": None, "stream": True}).encode()
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(connect(server)) for _ in range(10)]
            for connection in connections:
                begin(connection, "/v1/completions", len(body), body)
            assert eventually(lambda: front.budget.most > MIB // 2, 20)
            assert eventually(lambda: front.budget.used == 0 and len(front.live) == 0, 30), "all were dropped"
        assert front.budget.most <= limits.bytes_in_flight


def test_an_ordinary_prompt_does_not_wait_for_large_ones(text, http):
    with serving(text) as server:
        front, gate = server.app.state.front, threading.Event()
        waiting = [front._large_threads.submit(gate.wait, 30) for _ in range(8)]
        prompt = "a few words " * 1000
        try:
            answer = http.post(server.url + "/tokenize", json={"prompt": prompt})
            assert answer.status_code == 200
            assert not any(future.done() for future in waiting)
        finally:
            gate.set()


# Parts

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)


@given(value=VALUES, size=st.integers(1, 50))
def test_parts_joined_are_the_json(value, size):
    assert b"".join(json_parts(value, size)) == to_json(value)
    rows = {"a": JsonRows(lambda entry: entry, [value] * 3), "b": JsonRows(str, [])}
    assert b"".join(json_parts(rows, size)) == to_json({"a": [value] * 3, "b": []}) == to_json(rows)


def test_rows_are_made_when_their_part_is_asked_for():
    made = []
    parts = json_parts({"rows": JsonRows(lambda entry: made.append(entry) or {"entry": entry}, range(100_000))})
    next(parts)
    assert 0 < len(made) < 10_000
