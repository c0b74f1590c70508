"""The order of things around a worker's end and the next one's start, without processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from run_loop import finish

from baton.core.effects import RestartWorker, StopWorker
from baton.core.engine.worker_watch import WorkerState
from baton.core.events import Wake, WorkerStopped
from baton.protocol.control import InstanceReady, ModelChanged, OrderAnswer, WorkerHello
from baton.protocol.ids import WorkerEpoch
from baton.runtime.engine.worker_supervisor import WeightReload, WorkerSupervisor

HELLO = WorkerHello(WorkerEpoch(2), 8, 16, 300, 512, b"new")
READY = InstanceReady(8, 16, 4, 300, 512, identity=b"old")


class Rig:
    """What happens, in order, is in `log`."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.wanted: Callable[[], Awaitable[bool]] | None = None
        self.instance = SimpleNamespace(
            worker=SimpleNamespace(epoch=WorkerEpoch(2), state=WorkerState.ASLEEP), fingerprint=b"old", in_flight=False
        )
        self.child: Any = SimpleNamespace(life=2, ranks=(None,), kill=lambda: self.log.append("killed"))
        children = SimpleNamespace(get=lambda name: self.child, stop=self._stop, replace=self._replace)
        pool = SimpleNamespace(release=self._release)
        machine = SimpleNamespace(instance=self.instance, dispatch=self.log.append, begun=True)
        callers = SimpleNamespace(
            answer_pings=lambda fault: self.log.append(("pings", fault)),
            answer=self.log.append,
            caller_of_order=lambda number: None,
        )
        self.reporting = SimpleNamespace(
            ready=READY,
            on_next_worker=lambda hello: None,
            files_changed=self.log.append,
            weights_changed=lambda changed, by: self.log.append(changed),
        )
        self.tasks: list[asyncio.Task[None]] = []
        self.keeper = WorkerSupervisor("/old", children, pool, machine, callers, self.reporting, self._spawn)  # type: ignore[arg-type]

    def _spawn(self, work: Any) -> None:
        self.tasks.append(asyncio.create_task(work))

    async def _stop(self, child: Any) -> None:
        await asyncio.sleep(0)
        self.log.append("stopped")

    async def _release(self, name: str) -> None:
        await asyncio.sleep(0)
        self.log.append("unmapped")

    def _replace(self, name: str, life: int, wanted: Callable[[], Awaitable[bool]]) -> None:
        self.log.append(("replaced", life))
        self.wanted = wanted


def restart(epoch: int, reason: str = "it died") -> RestartWorker:
    return RestartWorker(WorkerEpoch(epoch), "died", reason)


def test_importers_let_go_of_a_pool_before_the_worker_that_made_it_ends():
    async def main() -> None:
        rig = Rig()
        rig.keeper.stop(StopWorker(WorkerEpoch(2)))
        await asyncio.gather(*rig.tasks)
        assert rig.log == ["unmapped", "stopped", ("pings", ""), WorkerStopped()]

    finish(main())


def test_the_next_worker_comes_when_the_pool_is_given_back_and_only_if_it_is_still_wanted():
    async def main() -> None:
        rig = Rig()
        rig.keeper.restart(restart(2))
        assert rig.log == [("pings", "the worker was lost and is being started again"), ("replaced", 2)]
        assert rig.wanted is not None
        assert await rig.wanted()
        assert rig.log[-1] == "unmapped"
        rig.instance.worker.epoch = WorkerEpoch(3)  # lost while it was waited for: the machine has ordered another
        assert not await rig.wanted()

    finish(main())


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"vocab_size": 301}, "/new: its vocabulary has 301 tokens"),
        ({"context_tokens": 511}, "/new: its context is 511 tokens"),
        ({"generates": False}, "/new: the model is of another kind"),
        ({"labels": ("bad", "good")}, "/new: the model is of another kind"),
    ],
)
def test_weights_that_do_not_fit_are_followed_by_the_old_ones_and_a_refusal(facts, words):
    async def main() -> None:
        rig = Rig()
        rig.keeper.wake(7, "/new")
        assert (rig.keeper.model, rig.log) == ("/new", [Wake(7)])
        rig.keeper.restart(restart(2, "wake"))
        hello = structs.replace(WorkerHello(WorkerEpoch(2), 8, 16, 300, 512, b"new"), **facts)
        rig.keeper.on_hello(rig.child, hello)  # type: ignore[arg-type]
        assert rig.log[-1] == "killed"
        rig.keeper.restart(restart(3))
        assert rig.keeper.model == "/old"
        rig.keeper.answer_order(OrderAnswer(7, "done"))
        assert rig.log[-1].outcome == "refused"
        assert words in rig.log[-1].detail

    finish(main())


@pytest.mark.parametrize("reason", ["/new: 9 query heads", "rank 1: /new: 9 query heads"])
def test_a_refusal_names_the_weights_once(reason: str):
    reload = WeightReload(7, "/old", "/new")
    assert reload.worker_starts("wake", "died")
    assert not reload.worker_starts(reason, "died")
    assert reload.failure == reason


def test_weights_that_are_loaded_are_told_before_the_order_is_answered():
    async def main() -> None:
        rig = Rig()
        rig.keeper.wake(7, "/new")
        rig.keeper.wake(8, "/other")
        refused = rig.log[-1]
        rig.instance.fingerprint = b"new"
        rig.keeper.answer_order(OrderAnswer(7, "done"))
        assert (refused.number, refused.outcome) == (8, "refused")
        assert rig.log[-2:] == [ModelChanged("/new", b"new"), OrderAnswer(7, "done")]
        assert rig.keeper.model == "/new"

    finish(main())


def test_files_that_were_replaced_are_told_and_those_of_an_order_are_not_told_twice():
    async def main() -> None:
        rig = Rig()
        rig.keeper.on_hello(rig.child, HELLO)  # type: ignore[arg-type]
        assert rig.log[-1] == ModelChanged("/old", b"new")
        ordered = Rig()
        ordered.keeper.wake(7, "/new")
        ordered.keeper.on_hello(ordered.child, HELLO)  # type: ignore[arg-type]
        assert not any(isinstance(said, ModelChanged) for said in ordered.log)

    finish(main())
