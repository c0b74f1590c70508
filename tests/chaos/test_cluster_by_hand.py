"""Two times `baton router`, `baton serve --role prefill` and `--role decode`, each started by hand: they find each other,
answer as one server does, obey orders that come through a router, and may be stopped in mid-stream."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chaos_model import make_model
from chaos_server import Reply, Server, ask, free_port, parse_metrics, until
from test_router_command import START_SECONDS, running, status

PROMPT = "Pack my box with five dozen liquor jugs; how vexingly quick daft zebras jump!"
GREEDY = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
LONG = {**GREEDY, "prompt": PROMPT[::-1], "max_tokens": 400, "temperature": 1.0, "seed": 3, "stream": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "drawn, two sequences": {**GREEDY, "n": 2, "temperature": 1.0, "seed": 9, "max_tokens": 10},
    "log-probabilities": {**GREEDY, "logprobs": 1, "echo": True, "max_tokens": 4},
    "streamed": {**LONG, "max_tokens": 40},
}


class ByHand:
    """Two routers, p0 and d0, each a command of its own. What is asked is asked of the first router."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack) -> None:
        self.port, self.second_port, self.folder = free_port(), free_port(), folder
        self._model, self._stack = model, stack
        self._secret = make_secret(folder / "secret", "0123456789abcdef")
        self._common = ("--served-model-name", "tiny", "--drain-seconds-max", 30)
        self._addresses: list[str] = []
        self.router, self.second = self._start_router("router-1", self.port), self._start_router("router-2", self.second_port)
        self.own_ports: dict[str, int] = {}
        self.instances = {name: self.start(name, role) for name, role in (("p0", "prefill"), ("d0", "decode"))}

    def _start_router(self, name: str, port: int) -> subprocess.Popen[bytes]:
        cluster_port = free_port()
        self._addresses.append(f"tcp://127.0.0.1:{cluster_port}")
        ports = ("--port", port, "--cluster-port", cluster_port, "--cluster-secret", self._secret)
        handoff = ("--handoff", "always", "--handoff-tokens-min", 0)
        command = ("router", self._model, *ports, *handoff, *self._common)
        return self._stack.enter_context(running(self.folder / name, *command))

    def start(
        self, name: str, role: str, *more: Any, model: Path | None = None, secret: Path | None = None
    ) -> subprocess.Popen[bytes]:
        self.own_ports[name] = free_port()
        where = ("--router", ",".join(self._addresses), "--cluster-secret", secret or self._secret)
        own = ("--port", self.own_ports[name], "--name", name, "--role", role)
        sizes = ("--threads", 1, "--kv-blocks", 300, "--block-size", 4, "--slots", 4)
        command = ("serve", model or self._model, *where, *own, *sizes, *self._common, *more)
        return self._stack.enter_context(running(self.folder / name, *command))

    def log(self, name: str) -> str:
        return (self.folder / name).read_text(errors="replace")

    def wait_joined(self, *names: str) -> None:
        def joined() -> bool:
            if status(self.port, "/ready") != 200:
                return False
            return {one["name"] for one in self.view()["instances"] if one["state"] == "alive"} == set(names)

        until(joined, f"{names} have joined", START_SECONDS)

    def ask(self, path: str, body: Any = None) -> Reply:
        return asyncio.run(ask(self.port, path, body))

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        reply = self.ask(path, body or {})
        assert reply.status == 200, reply.content
        answer: dict[str, Any] = reply.json
        return answer

    def view(self) -> dict[str, Any]:
        view: dict[str, Any] = self.ask("/v1/cluster").json
        return view

    def count(self, name: str) -> int:
        return int(self.view()["counters"][name])


def make_secret(path: Path, word: str) -> Path:
    path.touch(0o600)
    path.write_text(word * 4)
    return path


@pytest.fixture(scope="module")
def cluster(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHand]:
    with ExitStack() as stack:
        cluster = ByHand(tiny, tmp_path_factory.mktemp("by hand"), stack)
        cluster.wait_joined("p0", "d0")
        yield cluster


def told(reply: Reply) -> Any:
    assert reply.status == 200, reply.content
    if b"data:" not in reply.content:
        return reply.json["choices"]
    assert reply.complete
    return reply.tokens


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REQUESTS)
def test_they_answer_as_one_server_does(cluster: ByHand, alone: Server, name: str):
    request = REQUESTS[name]
    assert told(cluster.ask("/v1/completions", request)) == told(alone.ask("/v1/completions", request))


def test_prompts_are_handed_over_and_every_page_says_so(cluster: ByHand):
    def handed_over() -> bool:
        cluster.ask("/v1/completions", {**GREEDY, "prompt": f"{cluster.count('requests')} {PROMPT}"})
        return cluster.count("handoff_adopted") > 0

    until(handed_over, "a prompt is handed over")
    own = {name: asyncio.run(ask(port, "/metrics")).content.decode() for name, port in cluster.own_ports.items()}
    assert parse_metrics(own["p0"])['baton:instance_handoffs_total{what="handed_over"}'] > 0
    assert parse_metrics(own["d0"])['baton:instance_handoffs_total{what="adopted"}'] > 0
    assert parse_metrics(own["d0"])["baton:instance_routers"] == 2
    router = parse_metrics(cluster.ask("/metrics").content.decode())
    assert router['baton:router_sessions_total{event="opened"}'] == 2
    assert router['baton:router_handoff_ends_total{outcome="adopted"}'] > 0


def test_pause_and_sleep_reach_all_and_answers_are_the_same_afterwards(cluster: ByHand):
    before = told(cluster.ask("/v1/completions", GREEDY))
    assert cluster.post("/v1/pause", {"drain_seconds": 20}) == {"mode": "paused"}
    assert cluster.ask("/v1/completions", GREEDY).status == 503
    assert cluster.post("/v1/resume") == {"mode": "serving"}
    assert told(cluster.ask("/v1/completions", GREEDY)) == before
    assert cluster.post("/v1/sleep", {"drain_seconds": 20})["mode"] == "asleep"
    assert {one["stats"]["mode"] for one in cluster.view()["instances"]} <= {"asleep", "paused"}
    assert cluster.ask("/v1/completions", GREEDY).status == 503
    assert cluster.post("/v1/wake")["mode"] == "serving"
    cluster.wait_joined("p0", "d0")
    assert told(cluster.ask("/v1/completions", GREEDY)) == before


def test_other_weights_reach_all_and_those_that_cannot_be_loaded_change_nothing(cluster: ByHand, tiny: Path, tmp_path: Path):
    first = told(cluster.ask("/v1/completions", GREEDY))
    other = make_model(tmp_path / "other", seed=8)
    cluster.post("/v1/weights", {"path": str(other), "drain_seconds": 20})
    cluster.wait_joined("p0", "d0")
    second = told(cluster.ask("/v1/completions", GREEDY))
    assert second != first
    bad = cluster.ask("/v1/weights", {"path": str(tmp_path / "nothing"), "drain_seconds": 20})
    assert bad.status == 400
    cluster.wait_joined("p0", "d0")
    assert told(cluster.ask("/v1/completions", GREEDY)) == second
    cluster.post("/v1/weights", {"path": str(tiny), "drain_seconds": 20})
    cluster.wait_joined("p0", "d0")
    assert told(cluster.ask("/v1/completions", GREEDY)) == first


def test_who_does_not_fit_or_has_another_secret_is_told_so(cluster: ByHand, tmp_path: Path):
    """Nobody else notices, but in the logs."""
    unfit = cluster.start("unfit", "decode", model=make_model(tmp_path / "other", seed=8))
    stranger = cluster.start("stranger", "decode", secret=make_secret(tmp_path / "secret", "fedcba9876543210"))

    def counted() -> dict[str, float]:
        return parse_metrics(cluster.ask("/metrics").content.decode())

    try:
        until(lambda: "unfit does not fit" in cluster.log("unfit"), "it is told why", START_SECONDS)
        until(lambda: "instance unfit is refused: " in cluster.log("router-1"), "the router says it too")
        until(lambda: [one["name"] for one in cluster.view()["refused"]] == ["unfit"], "its view has it")
        (refused,) = cluster.view()["refused"]
        assert refused["reason"].partition(": weights ")[0].startswith("unfit does not fit "), refused
        assert "instead of" in refused["reason"]
        until(lambda: "secret" in cluster.log("stranger"), "the other one too", START_SECONDS)
        until(lambda: counted()["baton:router_instances_refused_total"] > 0, "it is counted")
        until(lambda: counted()['baton:router_sessions_total{event="secret"}'] > 0, "that too")
        cluster.wait_joined("p0", "d0")
        # They dial routers before their own start is over; one that is ended before that says so by its exit status.
        until(lambda: all("Ctrl-C ends it." in cluster.log(name) for name in ("unfit", "stranger")), "both have started")
    finally:  # also where it is tried again: who is left over would be the cluster when the others are gone
        for serve in (unfit, stranger):
            serve.terminate()
        ends = [serve.wait(60) for serve in (unfit, stranger)]
    assert ends == [0, 0]


@pytest.mark.slow
def test_an_instance_with_another_number_of_ranks_is_refused_with_the_reason(cluster: ByHand):
    ranks = cluster.start("ranks", "decode", "--tensor-parallel-size", 2)

    def refused() -> dict[str, str]:
        return {one["name"]: one["reason"] for one in cluster.view()["refused"]}

    try:
        until(lambda: "ranks" in refused(), "it is refused", START_SECONDS)
        assert "tensor parallel size 2 instead of 1" in refused()["ranks"]
        until(lambda: "tensor parallel size 2 instead of 1" in cluster.log("ranks"), "it is told why")
        cluster.wait_joined("p0", "d0")
    finally:
        ranks.send_signal(signal.SIGINT)
        ranks.wait(60)


def test_a_router_that_is_killed_takes_only_its_own_streams_along(cluster: ByHand, alone: Server):
    """Both serve the same instances, whose other router has given them other weights twice by now."""
    until(lambda: status(cluster.second_port, "/ready") == 200, "the second router has instances")
    mine, theirs = ({**LONG, "seed": seed} for seed in (11, 12))
    expected = told(alone.ask("/v1/completions", mine))
    short = {**GREEDY, "max_tokens": 5}
    assert told(asyncio.run(ask(cluster.second_port, "/v1/completions", short))) == told(alone.ask("/v1/completions", short))

    def kill(data: bytes) -> None:
        """At its first token."""
        cluster.second.kill()

    async def killed_amid() -> list[Reply | BaseException]:
        streams = ask(cluster.port, "/v1/completions", mine), ask(cluster.second_port, "/v1/completions", theirs, on_bytes=kill)
        return await asyncio.gather(*streams, return_exceptions=True)

    went_on, broken = asyncio.run(killed_amid())
    assert told(went_on) == expected
    assert isinstance(broken, (OSError, EOFError)), broken
    until(lambda: not any(one["stats"]["requests_open"] for one in cluster.view()["instances"]), "nothing is left of it")
    assert told(cluster.ask("/v1/completions", mine)) == expected


def test_an_instance_that_is_told_to_end_finishes_its_streams(cluster: ByHand, alone: Server):
    """Decode is gone afterwards, and prefill answers by itself."""
    expected, replays = told(alone.ask("/v1/completions", LONG)), cluster.count("replays")

    async def stopped_amid() -> Reply:
        asked = asyncio.create_task(ask(cluster.port, "/v1/completions", LONG))
        await asyncio.to_thread(until, lambda: decoding(cluster) or asked.done(), "decode has it")
        cluster.instances["d0"].send_signal(signal.SIGTERM)
        return await asked

    assert told(asyncio.run(stopped_amid())) == expected
    assert cluster.instances["d0"].wait(60) == 0
    assert cluster.count("replays") == replays, "what could end in time is not begun anew"
    until(lambda: len(cluster.view()["instances"]) == 1, "the router knows")
    assert cluster.count("lost_left") == 1
    assert told(cluster.ask("/v1/completions", GREEDY)) == told(alone.ask("/v1/completions", GREEDY))


def test_when_nobody_is_left_there_is_one_clean_error_and_no_token_is_lost(cluster: ByHand, alone: Server):
    """The last one: the instance is killed at the first token of a stream, with all of its processes, and nobody comes back."""

    def kill(data: bytes) -> None:
        cluster.instances["p0"].kill()

    reply = asyncio.run(ask(cluster.port, "/v1/completions", LONG, on_bytes=kill))
    assert reply.status == 200, "it had begun"
    *chunks, last = reply.events
    assert last["error"]["type"] == "service_unavailable_error"
    assert not any("error" in chunk for chunk in chunks)
    tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert tokens == told(alone.ask("/v1/completions", LONG))[0][: len(tokens)]
    refused = cluster.ask("/v1/completions", GREEDY)
    assert refused.status == 503
    assert status(cluster.port, "/ready") == 503
    assert "Traceback" not in "".join(map(cluster.log, ("router-1", "router-2", "p0", "d0")))


def decoding(cluster: ByHand) -> bool:
    return any(one["name"] == "d0" and one["stats"]["running"] for one in cluster.view()["instances"])
