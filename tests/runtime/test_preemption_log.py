"""A request that is preempted is seen: a line in the log, at most one per ten seconds, with how many there were."""

from __future__ import annotations

import logging

import pytest
from engine_rig import Rig
from run_loop import finish

from baton.core.events import PreemptSome

pytestmark = pytest.mark.usefixtures("child_path")

LINE = "preempted ("


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if LINE in record.getMessage()]


def test_preemptions_are_logged_and_counted_in_the_end(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "baton.engine")

    async def main() -> None:
        async with Rig() as rig:
            rig.ask("a", max_tokens=100)
            await rig.until(lambda: bool(rig.tokens.get("a")))
            for _ in range(2):
                rig.engine.tell(PreemptSome(1))
                told = len(rig.tokens["a"])
                await rig.until(lambda told=told: len(rig.tokens["a"]) > told + 5)
            await rig.until(lambda: "a" in rig.ended)
            assert rig.ended["a"].preemptions == 2

    finish(main())
    (line,) = lines(caplog)
    assert line.startswith("1 sequences preempted (1 in all), for want of KV blocks:")
    assert "of 64 free or idle" in line
    assert line.endswith("requests: a")


def test_where_nothing_is_preempted_nothing_is_logged(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with Rig() as rig:
            rig.ask("a")
            await rig.until(lambda: "a" in rig.ended)

    finish(main())
    assert not lines(caplog)
