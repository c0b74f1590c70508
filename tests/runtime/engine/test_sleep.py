"""Sleep, wake and other weights, with real processes that have no model."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from chaos_server import Process
from engine_rig import Rig
from fake_worker import expected
from run_loop import finish

from baton.protocol.control import (
    ModelChanged,
    OrderAnswer,
    PauseInstance,
    Ping,
    Pong,
    ResumeInstance,
    SleepInstance,
    WakeInstance,
)
from baton.runtime.engine.worker_supervisor import WeightReload

pytestmark = pytest.mark.usefixtures("child_path")


async def ordered(rig: Rig, order: Any) -> OrderAnswer:
    rig.front.send(order)

    def answers() -> list[OrderAnswer]:
        return [m for m in rig.messages if type(m) is OrderAnswer and m.number == order.number]

    await rig.until(lambda: bool(answers()))
    return answers()[0]


def test_a_sleeping_engine_has_no_worker_and_a_woken_one_goes_on():
    async def main() -> None:
        async with Rig() as rig:
            await rig.answer("a")
            first = Process(rig.engine._worker.process.pid)
            assert (await ordered(rig, PauseInstance(1))).outcome == "done"
            assert (await ordered(rig, SleepInstance(2))).outcome == "done"
            assert not first.alive
            assert rig.engine._worker is None
            await rig.until(lambda: rig.stats.mode == "asleep")
            rig.front.send(Ping(77))
            await rig.until(lambda: Pong(77) in rig.messages)  # well: it sleeps because it was told to
            assert (await ordered(rig, WakeInstance(3))).outcome == "done"
            assert (await ordered(rig, ResumeInstance(4))).outcome == "done"
            assert await rig.answer("b") == expected(5, 12)
            assert rig.stats.worker_losses == 0

    finish(main())


def test_other_weights_are_loaded_and_the_keys_have_another_root():
    async def main() -> None:
        async with Rig({"identities": ["first"]}) as rig:
            await rig.answer("a")
            other = json.dumps({"identities": ["other"]})
            for order in (PauseInstance(1), SleepInstance(2), WakeInstance(3, other), ResumeInstance(4)):
                assert (await ordered(rig, order)).outcome == "done"
            assert rig.engine._instance.fingerprint == b"other"
            assert ModelChanged(other, b"other") in rig.messages
            async with asyncio.timeout(20):  # it starts the next engine with them
                while await rig.supervisor.receive() != ModelChanged(other, b"other"):
                    pass
            assert await rig.answer("b") == expected(5, 12)
            assert rig.ended["b"].cached_tokens == 0

    finish(main())


@pytest.mark.parametrize(
    "other", ["not a model", json.dumps({"hello": {"vocab_size": 51}}), json.dumps({"hello": {"context_tokens": 9}})]
)
def test_weights_that_cannot_be_served_leave_the_old_ones(other):
    async def main() -> None:
        async with Rig({"identities": ["first"]}) as rig:
            for order in (PauseInstance(1), SleepInstance(2)):
                assert (await ordered(rig, order)).outcome == "done"
            answer = await ordered(rig, WakeInstance(3, other))
            assert answer.outcome == "refused"
            assert answer.detail.startswith(other)
            assert (await ordered(rig, ResumeInstance(4))).outcome == "done"
            assert await rig.answer("b") == expected(5, 12)
            assert rig.engine._instance.fingerprint == b"first"
            assert not rig.saw(ModelChanged)

    finish(main())


def test_weights_are_not_changed_under_a_running_worker():
    async def main() -> None:
        async with Rig() as rig:
            assert (await ordered(rig, WakeInstance(3, "another"))).outcome == "refused"
            assert await rig.answer("b") == expected(5, 12)

    finish(main())


def test_a_worker_killed_from_outside_is_no_reason_against_new_weights_but_two_are():
    for second, said in (("killed", "was killed by SIGKILL"), ("died", "exited with status 1")):
        reload = WeightReload(1, "/old", "/new")
        assert reload.worker_starts("the instance is woken", "killed")
        assert reload.worker_starts("was killed by SIGKILL", "killed")
        assert not reload.worker_starts(said, second)
        assert reload.failure == f"/new: {said}"
    broken = WeightReload(1, "/old", "/new")
    assert broken.worker_starts("the instance is woken", "killed")
    assert not broken.worker_starts("/new: neither a config.json nor a .gguf file is there", "died")
