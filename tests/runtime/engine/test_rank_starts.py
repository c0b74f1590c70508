"""A rank of a real model is killed, or hangs, in every phase of the start: the start ends with its name, and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from chaos_server import Process
from engine_rig import Rig
from run_loop import finish
from test_sleep import ordered

from baton.protocol.control import PauseInstance, ResumeInstance, SleepInstance, WakeInstance
from baton.runtime.engine.process import Engine
from baton.runtime.processes.process_table import ENGINE_CHILDREN, with_modules

pytest.importorskip("safetensors", reason="a model to load needs pip install -e '.[dev,oracle]'")
from chaos_model import make_model

pytestmark = pytest.mark.usefixtures("child_path")

EXACT = {"quantization": "none", "kv_dtype": "float32"}
PLACES = {
    "rendezvous": {},
    "load": {},
    "size": {},
    "create": {},
    "attach": {"role": "decode"},
    "record": {},
}
"""And in what role an engine comes there."""
START_SECONDS = 20.0


class GatedEngine(Engine):
    rows = with_modules(ENGINE_CHILDREN, worker="gated_worker")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("tiny")))


def gated_rig(model: str, place: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setenv("BATON_GATE", json.dumps({"rank": 1, "at": place, "folder": str(folder)}))
    blocks = None if place == "size" else 64
    rig = Rig(
        model=model,
        ranks=2,
        blocks=blocks,
        engine=PLACES[place],
        worker={**EXACT, "start_seconds_max": START_SECONDS, "kv_memory_gib": 0.001 if blocks is None else None},
        worker_start_seconds_max=START_SECONDS,
    )
    rig._engine_type = GatedEngine
    rig.waits = False
    return rig


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("what", ["killed", "hangs"])
def test_a_rank_that_ends_or_hangs_in_a_phase_of_the_start_is_named(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, what: str
):
    async def main() -> str:
        async with gated_rig(tiny, place, tmp_path, monkeypatch) as rig:
            await rig.until((tmp_path / "reached").exists)
            ranks = [Process(rank.process.pid) for rank in rig.engine._worker.ranks]
            folder = Path(rig.engine.config.worker.rendezvous)
            assert folder.is_dir()
            if what == "killed":
                os.kill(ranks[1].pid, signal.SIGKILL)
            await asyncio.wait([rig.running], timeout=60)
            assert not any(rank.alive for rank in ranks)
            assert not folder.exists(), "the directory of the rendezvous"
            assert "baton-" not in Path("/proc/self/maps").read_text(), "no pool is mapped"
            return str(rig.running.exception())

    error = finish_with(main())
    if what == "killed":
        assert error == "rank 1 of the worker was killed by SIGKILL before it was ready"
    else:
        assert re.search(r"rank 1 did not answer rank 0 within 10 seconds|waited for rank 1 of the worker to ", error), error


def test_a_rank_that_has_loaded_other_weights_ends_the_start_with_its_name(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Only then does it compute a digest of its own: the files of the others are in another state."""
    other = str(make_model(tmp_path / "other", seed=9))

    async def main() -> str:
        rig = Rig(model=tiny, ranks=2, blocks=64, worker=EXACT, worker_start_seconds_max=50.0)
        monkeypatch.setenv("BATON_GATE", json.dumps({"rank": 1, "at": "nowhere", "model": other}))
        rig._engine_type, rig.waits = GatedEngine, False
        async with rig:
            await asyncio.wait([rig.running], timeout=60)
            return str(rig.running.exception())

    assert re.match(r"rank 1 has other weights than rank 0: \w+ instead of \w+ \(weights\)", finish_with(main()))


def finish_with(work: Any) -> Any:
    found: list[Any] = []

    async def main() -> None:
        found.append(await work)

    finish(main())
    return found[0]


@pytest.mark.slow
def test_other_weights_are_loaded_by_all_ranks_and_a_model_that_they_cannot_divide_is_refused(tiny: str, tmp_path: Path):
    other, uneven = (
        str(make_model(tmp_path / "other", seed=9)),
        make_model(tmp_path / "uneven", num_attention_heads=3, num_key_value_heads=3),
    )

    async def tokens_of(model: str) -> list[int]:
        async with Rig(model=model, blocks=64, worker=EXACT) as rig:
            return await rig.answer("a", prompt=40, max_tokens=30)

    async def main() -> None:
        of_old, of_other = await tokens_of(tiny), await tokens_of(other)
        assert of_old != of_other
        async with Rig(model=tiny, ranks=2, blocks=64, worker=EXACT) as rig:
            assert await rig.answer("a", prompt=40, max_tokens=30) == of_old
            for order in (PauseInstance(1), SleepInstance(2)):
                assert (await ordered(rig, order)).outcome == "done"
            refused = await ordered(rig, WakeInstance(3, str(uneven)))
            assert refused.outcome == "refused"
            assert "3 query heads, which 2 ranks cannot share evenly" in refused.detail
            assert (await ordered(rig, ResumeInstance(4))).outcome == "done"
            assert await rig.answer("b", prompt=40, max_tokens=30) == of_old
            for order in (PauseInstance(5), SleepInstance(6), WakeInstance(7, other), ResumeInstance(8)):
                assert (await ordered(rig, order)).outcome == "done"
            assert await rig.answer("c", prompt=40, max_tokens=30) == of_other
            assert len(rig.engine._worker.ranks) == 2

    finish(main())
