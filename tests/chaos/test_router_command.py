"""`baton router` and `baton serve --router`, started by hand: who waits for whom, and what clients are told meanwhile."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from chaos_server import Reply, ask, free_port, python_path, until

ENVIRONMENT = {**os.environ, "PYTHONPATH": python_path()}
BODY = {"prompt": "Over and over again the same prompt", "max_tokens": 6, "temperature": 0, "return_token_ids": True}
START_SECONDS = 180.0


@contextmanager
def running(log: Path, *arguments: object) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        command = [sys.executable, "-m", "baton.cli.main", *map(str, arguments)]
        popen = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        yield popen
    finally:
        if popen.poll() is None:
            popen.terminate()
        try:
            popen.wait(60)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait(30)
            raise


def get(port: int, path: str, body: object = None) -> Reply | None:
    """None: nobody listens yet."""
    try:
        return asyncio.run(ask(port, path, body))
    except (OSError, EOFError):
        return None


def status(port: int, path: str, body: object = None) -> int | None:
    reply = get(port, path, body)
    return None if reply is None else reply.status


def require_waiting(port: int) -> None:
    """A router that nobody has joined."""
    until(lambda: status(port, "/live") == 200, "the router lives", START_SECONDS)
    early = get(port, "/v1/completions", BODY)
    assert early is not None
    assert (early.status, early.json["error"]["code"]) == (503, "not_ready")
    assert status(port, "/ready") == 503


def require_no_clients(own_port: int) -> None:
    until(lambda: status(own_port, "/ready") == 200, "its own HTTP is there, which may be later")
    assert status(own_port, "/v1/completions", BODY) in (403, 404), "an instance of a cluster answers no clients"


@pytest.mark.slow  # it outlives them in test_cluster_by_hand.py too
def test_a_router_waits_for_instances_and_outlives_them(tiny: Path, tmp_path: Path):
    secret, port, cluster_port, own_port = tmp_path / "secret", free_port(), free_port(), free_port()
    secret.touch(0o600)
    secret.write_text("0123456789abcdef" * 4)
    common = ("--cluster-secret", secret, "--served-model-name", "tiny")
    slow = ("--start-seconds-max", 1)  # nobody comes within that: it waits on
    member = ("--router", f"tcp://127.0.0.1:{cluster_port}", "--name", "one", "--threads", 1, "--kv-blocks", 64)
    with running(tmp_path / "router", "router", tiny, "--port", port, "--cluster-port", cluster_port, *slow, *common) as router:
        require_waiting(port)
        with running(tmp_path / "serve", "serve", tiny, "--port", own_port, *member, *common) as serve:
            until(lambda: status(port, "/ready") == 200, "the instance has joined", START_SECONDS)
            answer = get(port, "/v1/completions", BODY)
            assert answer is not None
            assert len(answer.tokens[0]) == 6
            require_no_clients(own_port)
            serve.terminate()
            assert serve.wait(60) == 0
        until(lambda: status(port, "/ready") == 503, "nobody is left")
        assert status(port, "/live") == 200
        router.send_signal(signal.SIGINT)
        assert router.wait(60) == 0
    said = (tmp_path / "router").read_text()
    assert "one has left the cluster" in said or "instance one is gone" in said
    assert "Traceback" not in said


def test_a_stopped_server_is_red_and_accepts_for_a_while(tiny: Path, tmp_path: Path):
    port = free_port()
    with running(
        tmp_path / "log", "serve", tiny, "--port", port, "--threads", 1, "--kv-blocks", 64, "--shutdown-delay", 29
    ) as serve:
        until(lambda: status(port, "/ready") == 200, "it serves", START_SECONDS)
        serve.terminate()
        until(lambda: status(port, "/ready") == 503, "it is red")
        assert [status(port, path) for path in ("/live", "/health")] == [200, 200]
        answer = get(port, "/v1/completions", BODY)
        assert answer is not None
        assert len(answer.tokens[0]) == 6
        serve.terminate()  # the second signal waits for nothing
        assert serve.wait(25) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_router_waits_for_instances_and_is_red_and_accepts_for_a_while_when_it_is_stopped(tiny: Path, tmp_path: Path):
    secret, port, cluster_port, own_port = tmp_path / "secret", free_port(), free_port(), free_port()
    secret.touch(0o600)
    secret.write_text("0123456789abcdef" * 4)
    common = ("--cluster-secret", secret, "--served-model-name", "tiny")
    member = ("--router", f"tcp://127.0.0.1:{cluster_port}", "--name", "one", "--threads", 1, "--kv-blocks", 64)
    stays = ("--cluster-port", cluster_port, "--start-seconds-max", 1, "--shutdown-delay", 29)
    with running(tmp_path / "router", "router", tiny, "--port", port, *stays, *common) as router:
        require_waiting(port)
        with running(tmp_path / "serve", "serve", tiny, "--port", own_port, *member, *common):
            until(lambda: status(port, "/ready") == 200, "the instance has joined", START_SECONDS)
            require_no_clients(own_port)
            router.terminate()
            until(lambda: status(port, "/ready") == 503, "it is red")
            assert status(port, "/live") == 200
            answer = get(port, "/v1/completions", BODY)
            assert answer is not None
            assert len(answer.tokens[0]) == 6
            router.terminate()  # the second signal waits for nothing
            assert router.wait(25) == 0
    assert "Traceback" not in (tmp_path / "router").read_text()


@pytest.mark.slow
def test_an_instance_answers_health_and_metrics_while_it_drains_for_its_router(tiny: Path, tmp_path: Path):
    """It stays for as long as its router's requests take: 40 answers of 480 tokens."""
    secret, port, cluster_port, own_port = tmp_path / "secret", free_port(), free_port(), free_port()
    secret.touch(0o600)
    secret.write_text("0123456789abcdef" * 4)
    routers = tmp_path / "routers"
    routers.write_text(f"127.0.0.1:{cluster_port}\n")
    common = ("--cluster-secret", secret, "--served-model-name", "tiny")
    member = ("--router", f"file:{routers}", "--name", "one", "--threads", 1, "--kv-blocks", 1400)
    with (
        running(tmp_path / "router", "router", tiny, "--port", port, "--cluster-port", cluster_port, *common) as router,
        running(tmp_path / "serve", "serve", tiny, "--port", own_port, *member, *common) as serve,
        ThreadPoolExecutor(1) as threads,
    ):
        until(lambda: status(port, "/ready") == 200, "the instance has joined", START_SECONDS)
        until(lambda: status(own_port, "/ready") == 200, "its own HTTP is there")
        long = {"prompt": ["x"] * 40, "max_tokens": 480, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        asked = threads.submit(get, port, "/v1/completions", long)
        until(lambda: b"baton:requests_running 40" in metrics(own_port), "it runs")
        serve.terminate()
        until(lambda: status(own_port, "/ready") == 503, "it drains")
        assert not asked.done()
        assert status(own_port, "/live") == 200
        assert b'baton:engine_mode{mode="draining"} 1' in metrics(own_port)
        reply = asked.result(120)
        assert reply is not None
        assert {len(tokens) for tokens in reply.tokens.values()} == {480}
        assert serve.wait(60) == 0
        router.terminate()
    assert "Traceback" not in (tmp_path / "serve").read_text()


def metrics(port: int) -> bytes:
    reply = get(port, "/metrics")
    return b"" if reply is None else reply.content
