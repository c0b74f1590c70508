"""Clients that leave, stall, repeat themselves or come all at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import time
from dataclasses import replace

import httpx
import pytest
from api_fakes import MODEL, FakeEngine, Script, eventually, says, serving

from baton.api.config import ApiConfig
from baton.api.errors import ApiError
from baton.api.generate.live import LiveRequests
from baton.api.http.idempotency import IdempotencyStore
from baton.api.http.json_parts import PART_BYTES
from baton.api.limits import Limits

TEXT = "/v1/completions"


def request_bytes(body: dict, path: str = TEXT, *headers: str) -> bytes:
    content = json.dumps(body).encode()
    own = ["Host: localhost", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    lines = [f"POST {path} HTTP/1.1", *own, *headers, "", ""]
    return "\r\n".join(lines).encode() + content


def connect(server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.settimeout(5)
    return connection


def leave(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def idle(server) -> bool:
    return not server.engine.live and not len(server.app.state.front.live)


# 54 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.99])
def test_54_leaves_before_the_request_is_whole(server, part, reset):
    data = request_bytes({"prompt": "x" * 2000, "stream": True})
    connection = connect(server)
    connection.sendall(data[: int(len(data) * part)])
    time.sleep(0.02)
    leave(connection, reset=reset)
    assert eventually(lambda: idle(server), 1.0)
    assert not server.engine.requests


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_54_leaves_while_queued(server, streamed, reset):
    server.engine.script = Script(silent=True)
    connection = connect(server)
    connection.sendall(request_bytes({"prompt": "x", "stream": streamed}))
    assert eventually(lambda: server.engine.live)
    leave(connection, reset=reset)
    assert eventually(lambda: idle(server), 1.0)
    assert server.engine.aborts


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
def test_54_leaves_while_decoding(server, streamed, reset, prompts):
    server.engine.script = Script(delay_seconds=0.02)
    connection = connect(server)
    body = {"prompt": ["x"] * prompts, "n": 2, "stream": streamed, "max_tokens": 400, "ignore_eos": True}
    connection.sendall(request_bytes(body))
    if streamed:
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    else:
        assert eventually(lambda: len(server.engine.live) == prompts)
    leave(connection, reset=reset)
    assert eventually(lambda: idle(server), 1.0)
    assert {abort[0] for abort in server.engine.aborts} == {request.id for request in server.engine.requests}


def test_54_half_closed_is_left_too(server):
    server.engine.script = Script(delay_seconds=0.02)
    with connect(server) as connection:
        connection.sendall(request_bytes({"prompt": "x", "stream": True, "max_tokens": 400, "ignore_eos": True}))
        connection.recv(100)
        connection.shutdown(socket.SHUT_WR)
        assert eventually(lambda: idle(server), 1.0)


def test_54_leaves_at_every_moment(server):
    """From before the first byte to after the last."""
    server.engine.script = Script(delay_seconds=0.002)
    for step in range(30):
        connection = connect(server)
        connection.sendall(
            request_bytes({"prompt": "x", "stream": bool(step % 2), "max_tokens": 10, "n": 2, "ignore_eos": True})
        )
        time.sleep(step * 0.0015)
        leave(connection, reset=bool(step % 3))
    assert eventually(lambda: idle(server), 2.0)


# 55, 56 ------------------------------------------------------------------------------------------------------------


def slow_connection(server) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    return connection


LONG = {"prompt": "x", "stream": True, "max_tokens": 30_000, "ignore_eos": True, "logprobs": 20}


def test_two_megabytes_in_one_go_are_not_a_slow_reader(text, http):
    """What an engine says at once is not the client's fault: 48 choices with log-probabilities once ended in mid-stream."""
    with serving(text, model=replace(MODEL, context_tokens=40_000)) as server:
        server.engine.script = Script(reply=lambda request, index: [500] * request.sampling.max_tokens, tokens_per_delta=8000)
        told = http.post(server.url + TEXT, json=LONG | {"max_tokens": 8000})
        assert told.text.endswith("data: [DONE]\n\n")
        assert len(told.content) > 1_100_000


@pytest.mark.parametrize(
    "limits",
    [Limits(send_buffer_bytes=50_000, write_seconds=60), Limits(send_buffer_bytes=1 << 30, write_seconds=0.3)],
    ids=["buffer", "write-timeout"],
)
def test_55_slow_reader_is_cancelled_and_holds_up_nobody(text, http, limits):
    with serving(text, ApiConfig(limits=limits), model=replace(MODEL, context_tokens=40_000)) as server:
        server.engine.script = Script(
            reply=lambda request, index: [500] * request.sampling.max_tokens,
            tokens_per_delta=50,
            delay_seconds=0.002,  # 1.2 s for all of it: it must not be complete before write_seconds are over
        )
        with slow_connection(server) as connection:
            connection.sendall(request_bytes(LONG))
            assert eventually(lambda: server.engine.live)
            slow = server.engine.requests[0].id
            while not any(abort[0] == slow for abort in server.engine.aborts):
                began = time.monotonic()
                assert http.post(server.url + TEXT, json={"prompt": "x", "max_tokens": 1}).status_code == 200
                assert time.monotonic() - began < 4, "another client had to wait"
            assert eventually(lambda: idle(server))
        # Within write_seconds the kernel gives up on the peer too; either may be first.
        told = re.compile(r'answers_broken_total{how="(slow|disconnected)"} 1.0')
        assert eventually(lambda: told.search(http.get(server.url + "/metrics").text))


def test_56_peer_that_vanished_is_noticed_by_the_kernel(server):
    """TCP_USER_TIMEOUT bounds how long unacknowledged bytes wait; keep-alive comments make sure that there are some."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        pytest.skip("this system has no TCP_USER_TIMEOUT")
    from baton.api.http.server import _watch_peer

    with connect(server) as connection:

        class Transport:
            def get_extra_info(self, name: str) -> socket.socket:
                return connection

        _watch_peer(Transport(), Limits(write_seconds=7))
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000


# Slow senders, 57 --------------------------------------------------------------------------------------------------


def test_headers_that_do_not_come_are_not_waited_for(text):
    with serving(text, ApiConfig(limits=Limits(header_seconds=0.2))) as server:
        for beginning in (b"", b"GET /live HT", b"GET /live HTTP/1.1\r\nHost: localhost\r\n"):
            with connect(server) as connection:
                connection.sendall(beginning)
                assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        with connect(server) as connection:  # on a kept connection, too
            assert ask(connection, "/live").startswith(b"HTTP/1.1 200 ")
            time.sleep(0.3)
            connection.sendall(b"GET /live HT")
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_body_that_does_not_come_is_not_waited_for(text):
    with serving(text, ApiConfig(limits=Limits(body_seconds=0.2))) as server, connect(server) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408 ")
        assert eventually(lambda: idle(server))


def test_57_pipelined_requests_are_answered_in_order(server):
    with connect(server) as connection:
        paths = [f"/v1/models/m{number}" for number in range(30)]
        connection.sendall("".join(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in paths).encode())
        received = b""
        while b"'m29'" not in received:
            received += connection.recv(65536)
    places = [received.index(f"'m{number}'".encode()) for number in range(30)]
    assert places == sorted(places)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_57_a_client_that_pipelines_and_leaves_stops_the_running_request(server, reset, streamed):
    server.engine.script = Script(delay_seconds=0.01)
    connection = connect(server)
    connection.sendall(request_bytes({"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": streamed}) * 3)
    assert eventually(lambda: server.engine.live)
    leave(connection, reset=reset)
    assert eventually(lambda: idle(server), 3.0)
    assert len(server.engine.requests) == 1, "those behind it were not begun"


def test_57_an_upgrade_is_ignored_without_advice_to_install_something(text, caplog):
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(text))
        caplog.set_level("WARNING", "uvicorn.error")  # serving() silences it
        connection = stack.enter_context(connect(server))
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + upgrade)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
        assert "WebSocket" not in caplog.text


def ask(connection: socket.socket, path: str) -> bytes:
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    answer = b""
    while not answer.endswith(b"}"):
        answer += connection.recv(65536)
    return answer


@pytest.mark.parametrize(
    ("limits", "status"),
    [(Limits(connections=10), b"503"), (Limits(connections_per_address=10), b"429")],
    ids=["in all", "from one address"],
)
def test_57_too_many_connections_are_told_so_and_health_still_answers(text, limits, status):
    with serving(text, ApiConfig(limits=limits)) as server:
        kept = [connect(server) for _ in range(10)]
        assert eventually(lambda: len(server.state.connections) == 10)
        with connect(server) as connection:
            assert ask(connection, "/health").startswith(b"HTTP/1.1 200 ")
            answer = ask(connection, "/v1/models")
            assert answer.startswith(b"HTTP/1.1 " + status)
            assert b"retry-after: 1\r\n" in answer
            assert b'"code":"too_many_connections"' in answer
        assert ask(kept[0], "/v1/models").startswith(b"HTTP/1.1 200 ")  # those that were there before are served
        for connection in kept:
            connection.close()
        assert eventually(lambda: httpx.get(server.url + "/v1/models").status_code == 200)


def test_57_connections_far_over_the_bound_are_closed(text):
    with serving(text, ApiConfig(limits=Limits(connections=5))) as server:
        kept = [connect(server) for _ in range(5 + 64)]
        assert eventually(lambda: len(server.state.connections) == 69)
        with connect(server) as connection, contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
        for connection in kept:
            connection.close()


def test_57_the_bounds_of_all_requests_and_of_a_key_are_exact():
    config = ApiConfig(limits=Limits(streams=3), api_keys=("a", "b"), streams_per_key_max=2)
    live = LiveRequests(FakeEngine(), config)
    with live.admitted(b"a", ()), live.admitted(b"a", ()):
        with pytest.raises(ApiError, match="2 requests of this key are open"), live.admitted(b"a", ()):
            pass
        with (
            live.admitted(b"b", ()),
            pytest.raises(ApiError, match="3 requests are open"),
            live.admitted(b"b", ()),
        ):
            pass
    assert len(live) == 0


def test_57_too_many_streams_are_429(text, http):
    with serving(text, ApiConfig(limits=Limits(streams=3))) as server:
        server.engine.script = Script(silent=True)
        kept = [connect(server) for _ in range(3)]
        for connection in kept:
            connection.sendall(request_bytes({"prompt": "x", "stream": True}))
        assert eventually(lambda: len(server.engine.live) == 3)
        answer = http.post(server.url + TEXT, json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_streams")
        assert answer.headers["retry-after"] == "1"
        assert http.get(server.url + "/v1/models").status_code == 200
        for connection in kept:
            connection.close()
        assert eventually(lambda: idle(server), 1.0)
        server.engine.script = Script()
        assert http.post(server.url + TEXT, json={"prompt": "x"}).status_code == 200


# 58 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
def test_58_same_key_is_generated_once(server, http, streamed):
    body, headers = {"prompt": "x", "stream": streamed}, {"Idempotency-Key": f"once-{streamed}"}
    first = http.post(server.url + TEXT, json=body, headers=headers)
    second = http.post(server.url + TEXT, json=body, headers=headers)
    assert first.content == second.content
    assert first.headers["content-type"] == second.headers["content-type"]
    assert len(server.engine.requests) == 1
    other = http.post(server.url + TEXT, json={**body, "prompt": "y"}, headers=headers)
    assert other.status_code == 409


def test_58_while_it_runs_409(server, http):
    server.engine.script = Script(delay_seconds=0.05)
    data = request_bytes({"prompt": "x"}, TEXT, "Idempotency-Key: running")
    with connect(server) as connection:
        connection.sendall(data)
        assert eventually(lambda: server.engine.live)
        again = {"Idempotency-Key": "running", "Content-Type": "application/json"}
        answer = http.post(server.url + TEXT, content=data.split(b"\r\n\r\n", 1)[1], headers=again)
        assert answer.status_code == 409
    assert len(server.engine.requests) == 1


def test_58_failed_and_left_requests_may_be_tried_again(server, http):
    headers = {"Idempotency-Key": "again"}
    server.engine.script = Script(end_error_after=1)
    assert http.post(server.url + TEXT, json={"prompt": "x"}, headers=headers).status_code == 500
    with http.stream("POST", server.url + TEXT, json={"prompt": "x", "stream": True}, headers=headers) as answer:
        assert "error" in answer.read().decode()
    server.engine.script = Script()
    assert http.post(server.url + TEXT, json={"prompt": "x"}, headers=headers).status_code == 200


def kept_bytes(store):
    return sum(len(entry.answer or b"") for share in store._shares.values() for entry in share.entries.values())


def test_58_store_is_bounded():
    store = IdempotencyStore(Limits(idempotency_bytes=100, idempotency_entries=5))
    store.begin(b"t", "running", "chat", b"body")
    for number in range(50):
        store.finish(store.begin(b"t", f"k{number}", "chat", b"body"), b"x" * 30, "text/plain")
    assert kept_bytes(store) <= 100
    assert sum(len(share.entries) for share in store._shares.values()) <= 5
    with pytest.raises(Exception, match="still running"):
        store.begin(b"t", "running", "chat", b"body")
    assert store.begin(b"other", "running", "chat", b"body").answer is None


def test_58_one_tenant_does_not_push_out_the_answers_of_another():
    store = IdempotencyStore(Limits(idempotency_bytes=1000, idempotency_entries=10))
    store.finish(store.begin(b"calm", "k", "chat", b"body"), b"x" * 100, "text/plain")
    for number in range(100):
        store.finish(store.begin(b"flood", f"k{number}", "chat", b"body"), b"x" * 90, "text/plain")
        store.finish(store.begin(b"flood", f"small{number}", "chat", b"body"), b"", "text/plain")
    assert store.begin(b"calm", "k", "chat", b"body").answer == b"x" * 100
    assert kept_bytes(store) <= 1000


def test_58_the_same_key_on_another_route_is_another_request(server, http):
    headers = {"Idempotency-Key": "both-routes"}
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    assert http.post(server.url + "/v1/chat/completions", json=body, headers=headers).json()["object"] == "chat.completion"
    answer = http.post(server.url + TEXT, json=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_key_reused")


def test_58_the_same_key_of_another_tenant_is_another_request(text, http):
    with serving(text, ApiConfig(api_keys=("one", "two"))) as server:
        for tenant, generated in (("one", 1), ("two", 2), ("one", 2)):
            headers = {"Idempotency-Key": "same", "Authorization": f"Bearer {tenant}"}
            assert http.post(server.url + TEXT, json={"prompt": "x"}, headers=headers).status_code == 200
            assert len(server.engine.requests) == generated


def test_58_a_large_answer_is_kept_once_and_counts_when_it_is_sent_again(server, http):
    """It is sent in parts, and remembered with the last of them."""
    front, headers = server.app.state.front, {"Idempotency-Key": "in-parts"}
    body = {"prompt": "x", "max_tokens": 300, "logprobs": 20, "ignore_eos": True}
    first = http.post(server.url + TEXT, json=body, headers=headers).content
    assert len(first) > PART_BYTES
    share = front.idempotency._shares[b""]
    assert share.answer_bytes == sum(len(entry.answer) for entry in share.entries.values())
    front.budget.most = 0
    assert http.post(server.url + TEXT, json=body, headers=headers).content == first
    assert front.budget.most >= len(first)


def test_58_what_was_asked_for_last_stays_longest():
    store = IdempotencyStore(Limits(idempotency_bytes=100))
    for name in ("old", "young"):
        store.finish(store.begin(b"t", name, "chat", b"body"), b"x" * 40, "text/plain")
    assert store.begin(b"t", "old", "chat", b"body").answer
    store.finish(store.begin(b"t", "new", "chat", b"body"), b"x" * 40, "text/plain")
    assert store.begin(b"t", "old", "chat", b"body").answer
    assert store.begin(b"t", "young", "chat", b"body").answer is None


def test_58_a_request_that_was_given_up_does_not_take_its_retry_along():
    store = IdempotencyStore(Limits())
    first = store.begin(b"t", "k", "chat", b"body")
    store.drop(b"t", "k", first)
    second = store.begin(b"t", "k", "chat", b"body")
    store.drop(b"t", "k", first)
    store.finish(second, b"answer", "text/plain")
    assert store.begin(b"t", "k", "chat", b"body").answer == b"answer"


def test_58_streams_that_are_kept_are_bounded(text, http):
    limits = Limits(idempotency_answer_bytes=1000, idempotency_bytes=2000)
    with serving(text, ApiConfig(limits=limits)) as server:
        store = server.app.state.front.idempotency
        for tokens, generated in ((2, 1), (200, 2)):
            server.engine.requests.clear()
            body = {"prompt": "x", "stream": True, "max_tokens": tokens, "ignore_eos": True}
            for _ in range(2):
                answer = http.post(server.url + TEXT, json=body, headers={"Idempotency-Key": f"k{tokens}"})
                assert answer.text.endswith("data: [DONE]\n\n")
            assert len(server.engine.requests) == generated
        assert store.recording_bytes == 0
        assert kept_bytes(store) <= 2000


def test_58_all_recordings_together_are_bounded():
    store = IdempotencyStore(Limits(idempotency_answer_bytes=100, idempotency_bytes=250))
    recordings = [store.recording() for _ in range(10)]
    for _ in range(9):
        for recording in recordings:
            recording.add(b"x" * 10)
            assert store.recording_bytes <= 250
    kept = [recording for recording in recordings if recording.content is not None]
    assert [len(recording.content) for recording in kept] == [90] * len(kept)
    assert len(kept) == 2
    for recording in recordings:
        recording.close()
        recording.close()
    assert store.recording_bytes == 0


# 59 ----------------------------------------------------------------------------------------------------------------


def test_59_cancel_racing_with_the_last_token_has_one_end(server, text):
    server.engine.script = Script(reply=says(text, "a b c d"), delay_seconds=0.002)

    async def one(client: httpx.AsyncClient, wait: float) -> list[str]:
        name = f"race-{wait}"

        async def cancel() -> None:
            await asyncio.sleep(wait)
            await client.post(server.url + "/v1/abort", json={"request_id": name})

        body = {"prompt": "x", "stream": True}
        asking = client.post(server.url + TEXT, json=body, headers={"X-Request-Id": name})
        answer, _ = await asyncio.gather(asking, cancel())
        events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        return [word for event in events for c in event["choices"] if (word := c.get("ended_by") or c["finish_reason"])]

    async def race() -> list[list[str]]:
        async with httpx.AsyncClient() as client:
            return [await one(client, step * 0.001) for step in range(40)]

    ends = asyncio.run(race())
    assert all(len(words) == 1 and words[0] in ("stop", "abort") for words in ends), ends


# 60 ----------------------------------------------------------------------------------------------------------------


def test_60_many_at_once_are_bounded_and_fair(text):
    """Scaled down from 10 000: one key floods, another still gets its share."""
    limits = Limits(streams=40)
    with serving(text, ApiConfig(limits=limits, api_keys=("flood", "calm"))) as server:
        server.engine.script = Script(delay_seconds=0.01)
        most = 0

        async def ask(key: str) -> int:
            nonlocal most
            body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request_bytes(body, TEXT, f"Authorization: Bearer {key}", "Connection: close"))
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            most = max(most, len(server.engine.live))
            return int(answer[9:12])

        async def storm() -> tuple[list[int], list[int]]:
            flood = [asyncio.create_task(ask("flood")) for _ in range(600)]
            await asyncio.sleep(0.1)
            calm = [await ask("calm") for _ in range(10)]
            return await asyncio.gather(*flood), calm

        flood, calm = asyncio.run(storm())
        assert set(flood) == {200, 429}
        assert calm == [200] * 10
        assert most <= 40
        assert eventually(lambda: idle(server))
