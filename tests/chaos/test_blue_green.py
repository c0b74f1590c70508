"""An update by two routers behind one balancer (docs/deploy.md, Upgrades): instances with other weights join the green router,
the balancer moves, blue drains. No client gets an error, and no answer has tokens of both."""

from __future__ import annotations

import asyncio
import itertools
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from chaos_model import make_model
from chaos_server import Reply, ask, free_port, until
from test_cluster_by_hand import make_secret, told
from test_router_command import START_SECONDS, running, status

PROMPTS = [f"{number} Sphinx of black quartz, judge my vow" for number in range(5)]
CLIENTS = 3
AFTER = 6
"""Answers that each client gets from green before it ends."""


def body(number: int, **changes: Any) -> dict[str, Any]:
    settings = {"max_tokens": 60, "temperature": 1.0, "seed": number, "stream": True, "return_token_ids": True}
    return {"prompt": PROMPTS[number], "ignore_eos": True, **settings, **changes}


class Balancer:
    """A TCP proxy. A connection goes to the router that was the target when it came, and stays there."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.unanswered: dict[int, int] = {}
        "Connections without a byte of an answer yet, by router."

    async def __aenter__(self) -> Balancer:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target, waits = self.target, True
        self.unanswered[target] = self.unanswered.get(target, 0) + 1
        back, forth = await asyncio.open_connection("127.0.0.1", target)

        async def there() -> None:
            while piece := await reader.read(1 << 16):
                forth.write(piece)

        sending = asyncio.create_task(there())
        while piece := await back.read(1 << 16):
            self.unanswered[target] -= waits
            waits = False
            writer.write(piece)
        self.unanswered[target] -= waits
        sending.cancel()
        for end in (writer, forth):
            end.close()


class Colour:
    """A router and an instance."""

    def __init__(self, name: str, model: Path, folder: Path, stack: ExitStack, *others: str) -> None:
        self.port, cluster_port = free_port(), free_port()
        self.address = f"tcp://127.0.0.1:{cluster_port}"
        self.router_log, self.instance_log = folder / f"router-{name}", folder / name
        common = ("--cluster-secret", folder / "secret", "--served-model-name", "tiny", "--drain-seconds-max", 60)
        ports = ("--port", self.port, "--cluster-port", cluster_port)
        self.router = stack.enter_context(running(self.router_log, "router", model, *ports, *common))
        routers = ("--router", ",".join((*others, self.address)), "--name", name, "--port", free_port())
        sizes = ("--threads", 1, "--kv-blocks", 300, "--block-size", 4, "--slots", 4)
        self.instance = stack.enter_context(running(self.instance_log, "serve", model, *routers, *sizes, *common))

    def wait_ready(self) -> Colour:
        until(lambda: status(self.port, "/ready") == 200, "it is ready", START_SECONDS)
        return self

    def answers(self) -> list[Any]:
        return [told(asyncio.run(ask(self.port, "/v1/completions", body(number)))) for number in range(len(PROMPTS))]

    @property
    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in (self.router_log, self.instance_log))


class Clients:
    """They ask without end, each one thing after the other."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self.replies: list[tuple[int, int, Reply]] = []
        "The target when it was asked, the number of the request, the answer."
        self.ended = False

    async def run(self, first: int) -> None:
        for number in itertools.count(first):
            target = self._balancer.target
            reply = await ask(self._balancer.port, "/v1/completions", body(number % len(PROMPTS)))
            self.replies.append((target, number % len(PROMPTS), reply))
            if self.ended:
                return


def stopped(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    return process.wait(120)


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_new_weights_come_by_a_second_router_without_an_error_or_a_mixed_answer(tiny: Path, tmp_path: Path):
    make_secret(tmp_path / "secret", "0123456789abcdef")
    with ExitStack() as stack:
        blue = Colour("blue", tiny, tmp_path, stack).wait_ready()
        expected = {blue.port: blue.answers()}

        async def main() -> list[tuple[int, int, Reply]]:
            async with Balancer(blue.port) as balancer:
                clients = Clients(balancer)
                tasks = [asyncio.create_task(clients.run(number)) for number in range(CLIENTS)]
                green = await asyncio.to_thread(
                    lambda: Colour("green", make_model(tmp_path / "new", seed=8), tmp_path, stack, blue.address).wait_ready()
                )
                expected[green.port] = await asyncio.to_thread(green.answers)
                view = (await ask(blue.port, "/v1/cluster")).json
                assert [one["name"] for one in view["instances"]] == ["blue"], "green's instance dials blue too"
                assert "weights " in view["refused"][0]["reason"], view["refused"]
                balancer.target = green.port
                # A balancer sends nothing new there; requests on their way are waited for, as --shutdown-delay does by time.
                while balancer.unanswered[blue.port]:
                    await asyncio.sleep(0.01)
                assert await asyncio.to_thread(stopped, blue.router) == 0
                assert await asyncio.to_thread(stopped, blue.instance) == 0
                done = len(clients.replies)
                while len(clients.replies) < done + CLIENTS * AFTER:
                    assert not any(task.done() for task in tasks), "a client has failed"
                    await asyncio.sleep(0.01)
                clients.ended = True
                await asyncio.gather(*tasks)
                assert "Traceback" not in blue.log + green.log
                return clients.replies

        replies = asyncio.run(main())
    blues, greens = (expected[port] for port in expected)
    assert all(one != other for one, other in zip(blues, greens, strict=True)), "the weights differ, and so do the answers"
    for target, number, reply in replies:
        may_be = [greens[number]] if expected[target] is greens else [blues[number], greens[number]]
        assert told(reply) in may_be, "whole, of one of the two, and of green once the balancer has moved"
    seen = [told(reply) == greens[number] for _, number, reply in replies]
    assert False in seen
    assert True in seen
