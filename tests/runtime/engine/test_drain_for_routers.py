"""An instance that is told to end: its routers hear of it, what they have there may finish, and the rest is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_rig import Rig
from fake_router import FakeRouter
from fake_worker import expected
from link_rig import SECRET
from run_loop import finish

from baton.protocol.control import ModeReport
from baton.protocol.request import FinishReason

pytestmark = pytest.mark.usefixtures("child_path")


def rig_of(folder: Path, router: FakeRouter, seconds: float, **orders: object) -> Rig:
    secret = folder / "secret"
    secret.touch(0o600)
    secret.write_bytes(SECRET.key)
    engine = {"routers": (str(router.address),), "cluster_secret": str(secret), "name": "node-1", "drain_seconds_max": seconds}
    return Rig(dict(orders), engine=engine)


@pytest.mark.parametrize("how", ["SIGTERM", "its front ends"])
def test_what_is_open_ends_and_nothing_new_is_taken(tmp_path: Path, how: str):
    async def main() -> None:
        async with (
            FakeRouter(SECRET) as router,
            rig_of(tmp_path, router, 30.0, works_at=4, done=str(tmp_path / "done")) as rig,
        ):
            visit = await router.visit()
            visit.ask("a")
            await rig.until(lambda: len(visit.tokens.get("a", ())) >= 2)
            if how == "SIGTERM":
                rig.engine.on_terminated()
            else:
                rig.front.close()
            await rig.until(lambda: any(beat.fault == "it is draining" for beat in visit.beats))
            assert ModeReport("draining") in visit.messages
            visit.ask("late")
            await rig.until(lambda: visit.refused.get("late") == "draining")
            assert not rig.running.done()
            (tmp_path / "done").touch()
            await rig.until(rig.running.done)
            await rig.until(lambda: visit.over)
            assert visit.tokens["a"] == expected(5, 12)
            assert visit.ended["a"].reason is FinishReason.LENGTH
        assert rig.running.exception() is None

    finish(main())


def test_what_takes_too_long_is_given_back(tmp_path: Path):
    """Aborted by nobody: the router goes on with it elsewhere (core/cluster/delivery.py)."""

    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(tmp_path, router, 0.3, works_at=4, done=str(tmp_path / "done")) as rig:
            visit = await router.visit()
            visit.ask("a")
            await rig.until(lambda: len(visit.tokens.get("a", ())) >= 2)
            rig.engine.on_terminated()
            await rig.until(lambda: "a" in visit.ended)
            assert visit.ended["a"].reason is FinishReason.ABORT
            await rig.until(rig.running.done)
        assert rig.running.exception() is None

    finish(main())


def test_the_second_signal_ends_it_at_once(tmp_path: Path):
    async def main() -> None:
        async with (
            FakeRouter(SECRET) as router,
            rig_of(tmp_path, router, 3600.0, works_at=4, done=str(tmp_path / "done")) as rig,
        ):
            visit = await router.visit()
            visit.ask("a")
            await rig.until(lambda: len(visit.tokens.get("a", ())) >= 2)
            for _ in range(2):
                rig.engine.on_terminated()
                await rig.until(lambda: rig.engine._leaving.begun)
            await rig.until(rig.running.done)
        assert rig.running.exception() is None

    finish(main())


def test_one_that_has_nothing_ends_at_once(tmp_path: Path):
    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(tmp_path, router, 3600.0) as rig:
            await router.visit()
            rig.engine.on_terminated()
            await rig.until(rig.running.done)
        assert rig.running.exception() is None

    finish(main())


def test_without_a_router_nobody_is_waited_for(tmp_path: Path):
    """Its worker never answers the drop of what was aborted with the session: that is no reason to stay."""

    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(tmp_path, router, 3600.0, stalls_at=4) as rig:
            visit = await router.visit()
            visit.ask("a")
            await rig.until(lambda: len(visit.tokens.get("a", ())) >= 2)
            rig.engine.on_terminated()
            await rig.until(lambda: rig.engine._leaving.begun)
            visit.link.close()
            await rig.until(rig.running.done)
        assert rig.running.exception() is None

    finish(main())
