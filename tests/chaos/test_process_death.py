"""Every process of a server, killed at every phase of its life: what is left, and who is told.

starting   the process exists, and has not done anything yet
loading    the worker reads the model
serving    a request is on the worker
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos_server import Reply, Server, ask, children, request_bytes, until

ROLES = ("supervisor", "front", "templates", "engine", "worker")
STREAM = {"prompt": "abcdefgh", "max_tokens": 8, "temperature": 0, "return_token_ids": True, "stream": True}


class Asked(threading.Thread):
    """A request whose answer is waited for elsewhere."""

    def __init__(self, server: Server, body: dict, on_bytes: Callable[[bytes], None] = lambda data: None) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._body = body
        self._on_bytes = on_bytes
        self.reply: Reply | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.reply = asyncio.run(ask(self._server.port, "/v1/completions", self._body, on_bytes=self._on_bytes))
        except (OSError, asyncio.IncompleteReadError) as error:
            self.error = error

    def wait(self) -> Reply | None:
        self.join(90)
        assert not self.is_alive(), "a client still waits"
        return self.reply


def gated(tiny: Path, scratch: Path, phase: str, **settings) -> tuple[Server, list[Asked]]:
    """A server that stands still in that phase, and the requests that are open there."""
    place = {"starting": "start", "loading": "loading", "serving": "plan"}[phase]
    server = Server(tiny, scratch, orders={"gate": {"at": place, "folder": str(scratch)}}, **settings)
    asked: list[Asked] = []
    try:
        for role in ROLES:
            server.process(role)
        if phase == "serving":
            server.wait_ready()
            asked = [Asked(server, STREAM), Asked(server, {**STREAM, "stream": False})]
        until((scratch / "reached").exists, f"the worker is {phase}")
    except BaseException:
        server.__exit__(AssertionError, None, None)
        raise
    return server, asked


PHASES_BY_ROLE = [(role, phase) for role in ("supervisor", "front", "engine") for phase in ("starting", "loading", "serving")]
PHASES_BY_ROLE.remove(("engine", "serving"))  # that one is started again: test_engine_loss.py
FIRST = {("front", "serving"), ("engine", "loading")}
"""make chaos runs all pairs. The supervisor is killed while it starts in test_no_process_inherits_what_is_not_its_own, and
while it serves in test_start_again.py."""
KILLS = [pair if pair in FIRST else pytest.param(*pair, marks=pytest.mark.slow) for pair in PHASES_BY_ROLE]


@pytest.mark.parametrize(("role", "phase"), KILLS)
def test_a_killed_process_takes_all_others_with_it(tiny: Path, tmp_path: Path, role: str, phase: str):
    server, _ = gated(tiny, tmp_path, phase)
    with server:
        server.process(role).send(signal.SIGKILL)
        status = server.wait_ended()
        server.require_all_gone()
        if role == "supervisor":
            assert status == -signal.SIGKILL
        else:
            assert status == 1
            assert f"ERROR the {role} process was killed by SIGKILL" in server.errors


@pytest.mark.slow  # while it loads: test_start_again.py
@pytest.mark.parametrize("phase", ["starting", "loading"])
def test_a_worker_that_is_killed_before_it_is_ready_ends_the_start(tiny: Path, tmp_path: Path, phase: str):
    server, _ = gated(tiny, tmp_path, phase)
    with server:
        server.process("worker").send(signal.SIGKILL)
        assert server.wait_ended() == 1
        assert "ERROR the worker process was killed by SIGKILL before it was ready" in server.errors


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("loading", signal.SIGTERM),
        pytest.param("starting", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("starting", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("loading", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_a_start_can_be_stopped(tiny: Path, tmp_path: Path, phase: str, number: int):
    server, _ = gated(tiny, tmp_path, phase)
    with server:
        server.popen.send_signal(number)
        assert server.wait_ended() == 0
        assert "Traceback" not in server.errors


def test_a_signal_in_the_very_first_moments_leaves_nothing(tiny: Path, tmp_path: Path):
    """The supervisor is told to stop, or killed, as soon as there is a child, which is still importing its modules."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with Server(tiny, tmp_path / str(number)) as server:
            until(lambda server=server: children(server.popen.pid), "there is a child")
            server._remember()
            server.popen.send_signal(number)
            assert server.wait_ended() == (0 if number == signal.SIGTERM else -number)


@pytest.mark.parametrize("again", [False, True])
def test_stopping_lets_requests_finish_and_a_second_signal_does_not(tiny: Path, tmp_path: Path, again: bool):
    server, asked = gated(tiny, tmp_path, "serving")
    with server:
        server.popen.send_signal(signal.SIGTERM)
        until(lambda: "STOPPING" in server.output, "the supervisor stops")
        if again:
            server.popen.send_signal(signal.SIGINT)
        else:
            (tmp_path / "open").touch()
        assert server.wait_ended() == 0
        replies = [one.wait() for one in asked]
        if again:
            for reply in replies:
                assert_shut_down(reply)
        else:
            assert [reply and reply.status for reply in replies] == [200, 200]
            assert replies[0].complete
            assert len(replies[0].tokens[0]) == 8


@pytest.mark.slow  # also in test_requests_that_do_not_finish_end_with_an_openai_error
def test_draining_ends_at_its_deadline(tiny: Path, tmp_path: Path):
    server, asked = gated(tiny, tmp_path, "serving", drain_seconds_max=1.0)
    with server:
        server.popen.send_signal(signal.SIGTERM)
        assert server.wait_ended() == 0
        for one in asked:  # neither has a token yet, so both get a status
            assert_shut_down(one.wait())


def assert_shut_down(reply: Reply | None) -> None:
    assert reply is not None
    assert reply.status == 503, reply.content
    assert reply.json["error"]["code"] == "shutting_down"
    assert reply.json["error"]["type"] == "service_unavailable_error"


@pytest.mark.parametrize("how", ["the deadline", pytest.param("a second signal", marks=pytest.mark.slow)])
def test_requests_that_do_not_finish_end_with_an_openai_error(tiny: Path, tmp_path: Path, how: str):
    """A stream with an error event, a whole answer and a body that never comes with status 503; nobody with a traceback."""
    drain = {"the deadline": 1.0, "a second signal": 60.0}[how]
    endless = {**STREAM, "max_tokens": 900, "ignore_eos": True}
    with Server(tiny, tmp_path, orders={"delay": [1, 0.3]}, drain_seconds_max=drain).wait_ready() as server:
        begun = threading.Event()
        stream = Asked(server, endless, lambda data: begun.set())
        whole = Asked(server, {**endless, "stream": False})
        slow = socket.create_connection(("127.0.0.1", server.port))
        slow.sendall(request_bytes("/v1/completions", b"{" + b" " * 100)[:-50])
        assert begun.wait(60)
        until(lambda: server.metrics()["baton:http_requests_open"] == 2, "both that have a body are open")
        server.popen.send_signal(signal.SIGTERM)
        until(lambda: "STOPPING" in server.output, "the supervisor stops")
        if how == "a second signal":
            server.popen.send_signal(signal.SIGTERM)
        assert server.wait_ended() == 0
        cut = stream.wait()
        assert cut is not None, f"the stream was cut off: {stream.error!r}"
        assert cut.status == 200
        assert not cut.complete
        assert cut.events[-1]["error"]["code"] == "shutting_down"
        assert_shut_down(whole.wait())
        slow.settimeout(30)
        head, _, body = b"".join(iter(lambda: slow.recv(65536), b"")).partition(b"\r\n\r\n")
        slow.close()
        assert b" 503 " in head.split(b"\r\n")[0]
        assert_shut_down(Reply(503, body))
        assert "Traceback" not in server.errors


def test_a_lost_template_process_is_replaced(alone: Server):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    first = alone.process("templates")
    first.send(signal.SIGKILL)
    assert alone.ask("/v1/chat/completions", body).status == 200
    assert alone.process("templates").pid != first.pid
    assert "Traceback" not in alone.errors


@pytest.mark.slow
def test_a_front_that_was_told_to_end_behind_the_supervisors_back(tiny: Path, tmp_path: Path):
    with Server(tiny, tmp_path).wait_ready() as server:
        server.process("front").send(signal.SIGTERM)
        assert server.wait_ended() == 1
        assert "ERROR the front process exited with status 0" in server.errors


class TestStartsThatFail:
    """The reason reaches the operator, and nothing is left."""

    def test_the_port_is_taken(self, tiny: Path, tmp_path: Path):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            server = Server(
                tiny, tmp_path, port=taken.getsockname()[1], orders={"gate": {"at": "start", "folder": str(tmp_path)}}
            )
            assert server.wait_ended() == 1
            assert "cannot listen on 127.0.0.1" in server.errors
            taken.close()
            server.require_all_gone()

    @pytest.mark.slow
    def test_another_server_takes_the_port_while_this_one_loads(self, tiny: Path, tmp_path: Path):
        """Found by an audit: two servers that were started at once, and a traceback in place of the reason."""
        server, _ = gated(tiny, tmp_path, "loading")
        with server, socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", server.port))  # nobody listens there yet
            other.listen()
            (tmp_path / "open").touch()
            assert server.wait_ended() == 1
            assert f"ERROR cannot listen on 127.0.0.1:{server.port} (Address already in use)" in server.errors
            assert "Traceback" not in server.errors
            other.close()

    @pytest.mark.slow
    def test_there_is_no_model(self, tmp_path: Path):
        with Server(tmp_path / "nothing", tmp_path / "scratch") as server:
            assert server.wait_ended() == 1
            assert "ERROR" in server.errors
            assert "nothing" in server.errors
            assert "Traceback" not in server.errors

    @pytest.mark.slow
    def test_the_weights_are_cut_short(self, tiny: Path, tmp_path: Path):
        broken = tmp_path / "broken"
        broken.mkdir()
        for path in tiny.iterdir():
            (broken / path.name).write_bytes(path.read_bytes())
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        with Server(broken, tmp_path / "scratch") as server:
            assert server.wait_ended() == 1
            assert "model.safetensors" in server.errors.partition("ERROR")[2]

    @pytest.mark.parametrize(
        "problem",
        [
            "tensors missing",
            *(pytest.param(name, marks=pytest.mark.slow) for name in ("cut short", "wrong shape", "no tokenizer", "no pool")),
        ],
    )
    def test_before_any_weights_are_read(self, tiny: Path, tmp_path: Path, problem: str):
        """What headers and settings show is not found out after minutes of loading."""
        broken = tmp_path / "broken"
        shutil.copytree(tiny, broken)
        config = json.loads((broken / "config.json").read_text())
        weights, settings, words = broken / "model.safetensors", {}, "model.safetensors"
        match problem:
            case "cut short":
                weights.write_bytes(weights.read_bytes()[:-1000])
            case "tensors missing":
                config["num_hidden_layers"] += 1
                words = "tensors are missing"
            case "wrong shape":
                config["vocab_size"] += 1
            case "no tokenizer":
                (broken / "tokenizer.json").unlink()
                words = "tokenizer.json"
            case "no pool":
                settings, words = {"kv_blocks": None, "kv_memory_gib": 1e-9}, "raise kv_memory_gib"
        (broken / "config.json").write_text(json.dumps(config))
        with Server(broken, tmp_path / "scratch", **settings) as server:
            assert server.wait_ended() == 1
            assert words in server.errors.partition("ERROR")[2]
            assert "Traceback" not in server.errors
            if problem != "no tokenizer":  # the front reads it, while the worker loads
                assert "LOADED" not in server.output

    def test_it_takes_too_long(self, tiny: Path, tmp_path: Path):
        orders = {"gate": {"at": "start", "folder": str(tmp_path)}}
        with Server(tiny, tmp_path, orders=orders, start_seconds_max=1.0) as server:
            assert server.wait_ended() == 1
            assert "not ready within 1 s" in server.errors


def test_no_process_inherits_what_is_not_its_own(tiny: Path, tmp_path: Path):
    """Sockets: the templates' process has one, the worker two, the engine four, the front five (one of them listens)."""

    def sockets(pid: int) -> int:
        links = []
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
            except FileNotFoundError:
                continue
        return sum(link.startswith("socket:") for link in links)

    server, _ = gated(tiny, tmp_path, "starting")
    with server:
        assert sockets(server.process("worker").pid) == 2
        until(lambda: sockets(server.process("engine").pid) == 2 + 2 + 2, "the engine has its channels, and its loop's pair")
        until(lambda: sockets(server.process("front").pid) == 4 + 1 + 2, "the front has its channels, its listener, the pair")
        until(lambda: sockets(server.process("templates").pid) == 1, "the templates' process has its socket")
        assert os.environ.get("BATON_CHAOS") is None
        server.process("supervisor").send(signal.SIGKILL)
        assert server.wait_ended() == -signal.SIGKILL
