"""A router whose requests are well formed and mean nothing: their own sequences fail or end, and nothing else does.

The instance is a real server, which dials two routers. One sends a request at the edges of what the wire types allow, then the
other one an ordinary request, whose answer must be the same each time, by the same worker.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chaos_model import make_model
from chaos_server import PATIENCE_SECONDS, Server
from fake_router import FakeRouter, Visit
from msgspec.structs import replace

from baton.protocol.grammar import Grammar
from baton.protocol.handoff import Forget, Prefill, Reserve
from baton.protocol.ids import RequestId
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.trust.secret import create_secret

LARGEST = 2**31 - 1
HONEST = GenerateRequest(id=RequestId("honest"), prompt=tuple(range(30, 60)), sampling=SamplingParams(max_tokens=10))


def drawn(**settings: Any) -> dict[str, Any]:
    return {"sampling": SamplingParams(**{"max_tokens": 4, "temperature": 1.0, **settings})}


ODD: list[dict[str, Any]] = [
    *(drawn(min_tokens=each) for each in (2**63, 2**64 - 1)),
    *(drawn(top_k=each) for each in (2**31, 2**64 - 1)),
    *(drawn(logit_bias=((3, each), (LARGEST, each))) for each in (math.nan, math.inf, -math.inf, 1e308)),
    drawn(stop_token_ids=(LARGEST, 300)),
    drawn(bad_words=((LARGEST,), (), (300, 5))),
    drawn(bad_words=tuple((each,) for each in range(258))),
    drawn(max_tokens=1, pooling="last", label_ids=(LARGEST,)),
    drawn(pooling="mean", prompt_logprobs=3, logprobs=20),
    drawn(temperature=5e-324),
    drawn(top_p=5e-324, min_p=1.0),
    drawn(repetition_penalty=5e-324),
    drawn(seed=-(2**63)),
    drawn(drafts_max=LARGEST),
    drawn(max_tokens=LARGEST),
    *(drawn(grammar=Grammar(*each)) for each in (("regex", "(" * 1000), ("json", "{"), ("lark", 'start: s\ns: s s | "a"'))),
    {**drawn(repetition_penalty=1.3, presence_penalty=1.0), "prompt": (LARGEST, 5, 6)},
    *({"outputs": (each,)} for each in ((LARGEST,), (5,) * 600, (5,) * 4)),
    *({"priority": each} for each in (2**64 - 1, -(2**63))),
    *({"timeout_seconds": each} for each in (math.inf, 1e308, 5e-324)),
    {"age_seconds": math.inf, "timeout_seconds": math.inf},
    *({"id": each} for each in ("", "a|b|c", "\n\x00", "i" * 10**6)),
    {"salt": b"x" * 10**6},
    {"extras": ((LARGEST, b"x"),)},
    {"attempt": LARGEST},
    {"n": 128, "indices": (127,)},
    {"prompt": (0,) * 100_000},
]


async def until(question: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (answer := question()):
            await asyncio.sleep(0.005)
        return answer


def open_session(router: FakeRouter) -> Visit | None:
    return next((visit for visit in router.visits if visit.hello is not None and not visit.over), None)


async def rehearse(folder: Path, wrap: Callable[[GenerateRequest], Any]) -> None:
    secret = create_secret(folder / "secret")
    async with FakeRouter(secret, "", 30.0, "odd") as odd, FakeRouter(secret, "", 30.0, "honest") as honest:
        routers = [f"tcp://{each.address.host}:{each.address.port}" for each in (odd, honest)]
        settings = {"router": routers, "cluster_secret": str(folder / "secret"), "name": "instance"}
        with Server(make_model(folder / "model"), folder / "server", **settings) as server:
            asked = await until(lambda: open_session(honest))
            worker, tokens = server._found()["worker"], None
            for number, changes in enumerate(ODD):
                request = replace(GenerateRequest(id=RequestId(f"odd-{number}"), prompt=tuple(range(10, 24))), **changes)
                sender = await until(lambda: open_session(odd))
                sender.link.send(wrap(request))
                name = f"honest-{number}"
                asked.link.send(replace(HONEST, id=RequestId(name)))
                await until(lambda name=name: name in asked.ended or name in asked.refused or asked.over)
                assert not asked.over, changes
                assert asked.refused == {}, changes
                tokens = tokens or asked.tokens[name]
                assert asked.tokens[name] == tokens, changes
                sender.link.send(Forget(request.id, request.attempt))
            assert server._found()["worker"] == worker
            assert asked.stats.worker_losses == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["whole", "reserved", "prefilled"])
def test_an_odd_request_of_one_router_harms_no_request_of_another(tmp_path: Path, how: str):
    wraps: dict[str, Callable[[GenerateRequest], Any]] = {
        "whole": lambda request: request,
        "reserved": lambda request: Reserve(request, 1e9, 1e9),
        "prefilled": lambda request: Prefill(request, 1e9),
    }
    asyncio.run(rehearse(tmp_path, wraps[how]))
