"""The refused instances that a router shows: the latest ones, each once."""

from __future__ import annotations

import pytest
from link_rig import SECRET, Door
from run_loop import finish

from baton.errors import LinkFailed
from baton.protocol.versions import VERSIONS, Versions
from baton.runtime.router.refusals import FORGOTTEN_SECONDS, REFUSALS_MAX, Refusals
from baton.runtime.wire.link import dial


def shown(refusals: Refusals, now: float) -> list[tuple[str, str, int, float]]:
    return [(one.name, one.reason, one.times, one.seconds_ago) for one in refusals.view(now)]


def test_each_is_shown_once_with_its_last_reason():
    refusals = Refusals()
    refusals.note("a", "other weights", 1.0)
    refusals.note("b", "other kernels", 2.0)
    refusals.note("a", "other\nblock size", 3.0)
    assert shown(refusals, 5.0) == [("b", "other kernels", 1, 3.0), ("a", r"other\nblock size", 2, 2.0)]
    refusals.forget("b")
    assert [name for name, *_ in shown(refusals, 5.0)] == ["a"]


def test_those_that_have_stopped_dialling_are_forgotten():
    refusals = Refusals()
    refusals.note("a", "other weights", 1.0)
    refusals.note("b", "other weights", 100.0)
    assert [name for name, *_ in shown(refusals, FORGOTTEN_SECONDS + 1.0)] == ["b"]


def test_their_number_is_bounded_and_the_latest_stay():
    refusals = Refusals()
    for number in range(REFUSALS_MAX + 5):
        refusals.note(str(number), "other weights", float(number))
    assert [name for name, *_ in shown(refusals, 40.0)] == [str(number) for number in range(5, REFUSALS_MAX + 5)]


def test_a_peer_of_another_version_is_named_by_its_address():
    refused: list[tuple[str, str]] = []

    async def main() -> None:
        async with Door() as door:
            door.server.on_refused = lambda host, reason: refused.append((host, reason))
            newer = Versions(VERSIONS.newest + 1, VERSIONS.newest + 2)
            with pytest.raises(LinkFailed, match="speaks version"):
                await dial(door.address, SECRET, versions=newer)
            await door.until(lambda: bool(refused))

    finish(main())
    assert refused == [
        (
            "127.0.0.1",
            f"the router speaks version {VERSIONS} and the instance {VERSIONS.newest + 1} to {VERSIONS.newest + 2}: "
            "update the older one",
        )
    ]
