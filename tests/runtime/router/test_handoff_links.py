"""A hand-off between two engines with real cache services, passed on by hand: what the router's machine will do."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_rig import Rig
from fake_router import FakeRouter, Visit
from fake_worker import expected
from link_rig import SECRET
from msgspec.structs import replace
from run_loop import finish

from baton.protocol.handoff import Adopted, Forget, Offer, PeerOffer, Prefill, Release, Released, Reserve, Reserved
from baton.protocol.ids import RequestId
from baton.protocol.request import GenerateRequest, SamplingParams

pytestmark = pytest.mark.usefixtures("child_path")

REQUEST = GenerateRequest(id=RequestId("r"), prompt=(1,) * 21, sampling=SamplingParams(max_tokens=12))


def rig_of(role: str, router: FakeRouter, folder: Path, orders: dict[str, Any] | None = None, ranks: int = 1) -> Rig:
    secret = folder / "secret"
    if not secret.exists():
        secret.touch(0o600)
        secret.write_bytes(SECRET.key)
    member = {"routers": (str(router.address),), "cluster_secret": str(secret), "name": role, "role": role}
    return Rig(orders, engine=member, ranks=ranks)


@asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[FakeRouter, Rig, Rig]]:
    async with FakeRouter(SECRET) as router, rig_of("prefill", router, folder) as p, rig_of("decode", router, folder) as d:
        yield router, p, d


async def visit_of(router: FakeRouter, role: str) -> Visit:
    found: list[Visit] = []
    async with asyncio.timeout(40):
        while not found:
            await asyncio.sleep(0.01)
            found = [visit for visit in router.open if visit.beats and visit.hello and visit.hello.role == role]
    return found[-1]


async def said(visit: Visit, kind: type[Any]) -> Any:
    async with asyncio.timeout(40):
        while not visit.all(kind):
            await asyncio.sleep(0.01)
    return visit.all(kind)[-1]


async def last_offer(prefill: Visit) -> list[Offer]:
    async with asyncio.timeout(40):
        while not any(offer.last for offer in prefill.all(Offer)):
            await asyncio.sleep(0.01)
    return prefill.all(Offer)


async def prefilled(prefill: Visit, decode: Visit) -> None:
    """Up to the last offer, passed on."""
    decode.link.send(Reserve(REQUEST, 10.0))
    assert (await said(decode, Reserved)).request == "r"
    one_token = replace(REQUEST, sampling=replace(REQUEST.sampling, max_tokens=1), indices=(0,))
    prefill.link.send(Prefill(one_token, 10.0))
    assert prefill.hello is not None
    for offer in await last_offer(prefill):
        outputs = tuple(prefill.tokens["r"]) if offer.last else ()
        decode.link.send(PeerOffer(offer, prefill.hello.peers, outputs))


def test_a_prompt_computed_by_one_goes_on_in_the_other(tmp_path: Path):
    async def main() -> None:
        async with (
            FakeRouter(SECRET) as router,
            rig_of("prefill", router, tmp_path) as p,
            rig_of("decode", router, tmp_path) as d,
        ):
            prefill, decode = await visit_of(router, "prefill"), await visit_of(router, "decode")
            assert prefill.hello.peers[0].startswith("unix:")
            assert prefill.hello.layout == decode.hello.layout != b""
            await prefilled(prefill, decode)
            assert prefill.tokens["r"] == expected(21, 1)
            asked = await said(decode, Release)
            assert (asked.request, asked.attempt) == ("r", 1)
            prefill.link.send(asked)
            released = await said(prefill, Released)
            assert released == Released(RequestId("r"), 1, kept=True)
            decode.link.send(released)
            assert await said(decode, Adopted) == Adopted(RequestId("r"), 1, tokens=21)
            await d.until(lambda: "r" in decode.ended)
            assert decode.tokens_from("r", 1) == expected(21, 12)[1:]
            assert not prefill.ended
            for rig in (p, d):
                await rig.until(lambda rig=rig: not (rig.stats.requests_open or rig.stats.blocks_held))
            decode.link.send(Forget(RequestId("r"), 1))
            prefill.link.send(Forget(RequestId("r"), 1))
            assert d.stats.prompt_tokens <= 22, "what was pulled was not computed"

    finish(main())


@pytest.mark.slow  # with the real worker: tests/chaos/test_rank_handoff_over_network.py
def test_two_ranks_continue_a_prompt_of_two_also_after_one_was_killed(tmp_path: Path):
    """Each rank copies its part from the same rank; then a rank of the second set is killed while it decodes."""

    async def main() -> None:
        async with (
            FakeRouter(SECRET) as router,
            rig_of("prefill", router, tmp_path, ranks=2),
            rig_of("decode", router, tmp_path, {"rank_orders": {"1": {"stalls_at": 4}}, "in_epochs": [1]}, ranks=2) as d,
        ):
            prefill, decode = await visit_of(router, "prefill"), await visit_of(router, "decode")
            assert len(prefill.hello.peers) == 2
            await prefilled(prefill, decode)
            prefill.link.send(await said(decode, Release))
            decode.link.send(await said(prefill, Released))
            assert await said(decode, Adopted) == Adopted(RequestId("r"), 1, tokens=21)
            await d.until(lambda: len(decode.tokens_from("r", 1)) == 3)
            os.kill(d.engine._worker.ranks[1].process.pid, signal.SIGKILL)
            await d.until(lambda: "r" in decode.ended)
            assert decode.tokens_from("r", 1) == expected(21, 12)[1:]
            await d.until(lambda: d.stats.worker_losses == 1)

    finish(main())


def test_what_a_session_has_reserved_or_kept_ends_with_it(tmp_path: Path):
    async def main() -> None:
        async with (
            FakeRouter(SECRET) as router,
            rig_of("prefill", router, tmp_path) as p,
            rig_of("decode", router, tmp_path) as d,
        ):
            prefill, decode = await visit_of(router, "prefill"), await visit_of(router, "decode")
            await prefilled(prefill, decode)
            await said(decode, Release)  # and nobody answers
            await p.until(lambda: p.stats.blocks_held > 0)
            prefill.link.close()
            decode.link.close()
            for rig in (p, d):
                await rig.until(lambda rig=rig: not (rig.stats.requests_open or rig.stats.blocks_held))
                assert rig.engine.open_requests() == []
            again = await visit_of(router, "decode")
            again.link.send(Reserve(REQUEST, 10.0))  # the same attempt, in another session: it is new here
            assert await said(again, Reserved)

    finish(main())
