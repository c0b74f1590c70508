"""One rank costs nothing: between a plan and its result, and for moves of blocks, the engine calls nothing that is meant for
several. Two ranks show that the calls would be counted."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_rig import Rig
from fake_worker import expected
from run_loop import finish

from baton.config import TiersConfig
from calls_for_several import calls_for_several

pytestmark = pytest.mark.usefixtures("child_path")

TOKENS = 30


def calls_of(ranks: int) -> Counter[str]:
    found: Counter[str] = Counter()

    async def main() -> None:
        async with Rig(ranks=ranks, engine={"tiers": TiersConfig(kv_host_gib=0.001)}) as rig:
            with calls_for_several() as calls:
                assert await rig.answer("a", prompt=40, max_tokens=TOKENS) == expected(40, TOKENS)
                await rig.until(lambda: rig.stats.tiers.get("stored", 0) > 0)
            found.update(calls)

    finish(main())
    return found


def test_an_engine_with_one_rank_combines_nothing():
    assert calls_of(1) == {}


def test_calls_of_two_ranks_are_counted():
    calls = calls_of(2)
    assert calls["ToAll.send"] >= TOKENS, "a plan goes to all"
    assert calls["StepDigests.add_result"] >= TOKENS
    assert calls["StepDigests.add_digest"] >= TOKENS
    assert calls["for_rank"] > 0, "parts of a move"
    assert calls["least_move"] > 0
