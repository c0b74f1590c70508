"""A request that is preempted is seen: a line in the log, at most one per ten seconds, with how many there were."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from engine_rig import Rig
from run_loop import finish

from baton.config import InstanceConfig
from baton.core.events import PreemptSome
from baton.core.instance import Instance
from baton.runtime.engine.reporting import PreemptionLog

pytestmark = pytest.mark.usefixtures("child_path")

LINE = "preempted ("


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if LINE in record.getMessage()]


def test_preemptions_are_logged_and_counted_in_the_end(caplog: pytest.LogCaptureFixture, tmp_path: Path):
    caplog.set_level(logging.WARNING, "baton.engine")
    go_on = tmp_path / "done"

    async def main() -> None:
        async with Rig({"works_at": 3, "done": str(go_on)}) as rig:  # the third step lasts until the file is there
            rig.ask("a")
            await rig.until(lambda: bool(rig.tokens.get("a")))
            rig.engine.dispatch(PreemptSome(1))
            go_on.touch()
            await rig.until(lambda: "a" in rig.ended)
            assert rig.ended["a"].preemptions == 1

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


def test_there_is_at_most_one_line_per_ten_seconds_and_it_has_all_of_them(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "baton.engine")
    instance, log = Instance(InstanceConfig()), PreemptionLog()
    for now, preemptions in ((0.0, 1), (5.0, 3), (11.0, 4)):
        instance.stats.preemptions = preemptions
        log.record(instance, now)
    assert [line.partition(",")[0] for line in lines(caplog)] == [
        "1 sequences preempted (1 in all)",
        "3 sequences preempted (4 in all)",
    ]
