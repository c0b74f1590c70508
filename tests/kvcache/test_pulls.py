"""A pull that fails costs computing and nothing else, so nobody but the operator would notice: it is logged and counted."""

from __future__ import annotations

import logging
import socket

import pytest
from messenger_peer import LAYOUT
from messenger_rig import Rig, finish

from baton.kvcache.messenger import Pulls
from baton.protocol.ids import PoolIncarnation
from baton.repeats import Repeats, printable


def test_the_reason_of_a_failed_pull_is_logged_once_and_counted_each_time(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with Rig("tcp") as rig:
            peer = rig.serve()
            with socket.create_server(("127.0.0.1", 0)) as free:
                nobody = f"tcp://127.0.0.1:{free.getsockname()[1]}"
            for _ in range(3):
                assert (await rig.pull(peer, [1], [1], peer=nobody)).moved == 0
            assert (await rig.pull(peer, [1, 2], [1, 2])).moved == 2
            (line,) = [record for record in caplog.records if "KV blocks cannot be read" in record.message]
            assert line.levelno == logging.WARNING
            assert nobody in line.message
            assert "Connection refused" in line.message or "Connect call failed" in line.message
            assert rig.messenger.pulls.outcomes == {"tcp/unreachable": 3, "tcp/copied": 1}
            assert rig.messenger.pulls.nbytes == {"tcp": 2 * LAYOUT.block_bytes}
            assert rig.messenger.pulls.microseconds["tcp"] > 0

    finish(main())


def test_each_kind_of_failure_has_an_outcome_of_its_own():
    async def main() -> None:
        async with Rig("unix") as rig:
            peer = rig.serve()
            await rig.pull(peer, [1], [1], peer_pool=PoolIncarnation(peer.incarnation + 1))
            await rig.pull(peer, [1], [1], pool=PoolIncarnation(rig.device.incarnation + 1))
            await rig.pull(peer, [10**6], [1])
            await rig.pull(peer, [1], [1], peer="unix:/does/not/exist")
            await rig.pull(peer, [1], [1], peer="rdma:1")
            assert rig.messenger.pulls.outcomes == {
                "unix/refused": 2,
                "none/detached": 1,
                "unix/unreachable": 1,
                "none/unreachable": 1,
            }

    finish(main())


def test_which_of_several_addresses_was_taken_is_logged_and_counted(caplog: pytest.LogCaptureFixture):
    """As between two GPUs of one machine, where one process cannot map the memory of the other."""
    caplog.set_level(logging.INFO)

    async def main() -> None:
        async with Rig("tcp") as rig:
            peer = rig.serve()
            result = await rig.pull(peer, [1], [1], peer=f"unix:/not/there/peer.sock {peer.address}")
            assert (result.moved, result.error) == (1, None)
            (line,) = [record.message for record in caplog.records if "is read at" in record.message]
            assert f"is read at {peer.address}; a better address was not opened: " in line
            assert rig.messenger.pulls.outcomes == {"tcp/copied": 1}

    finish(main())


def test_another_peer_and_another_reason_are_logged_too_and_again_after_a_minute(caplog: pytest.LogCaptureFixture):
    pulls = Pulls()
    told = [("a", "refused", 0.0), ("a", "refused", 1.0), ("b", "refused", 1.0), ("a", "lost", 2.0), ("a", "refused", 61.0)]
    for peer, outcome, now in told:
        pulls.log_failure(peer, "tcp", outcome, "why\nnot", now)
    lines = [record.message for record in caplog.records]
    assert len(lines) == 4
    assert lines[-1].endswith(r"refused: why\nnot (2 times)"), "how often it came, and on one line"


def test_what_is_remembered_of_repeats_is_bounded():
    repeats = Repeats(60.0, keys_max=2)
    assert [repeats.due(key, 0.0) for key in "abcc"] == [1, 1, 1, 0]
    assert repeats.due("a", 1.0) == 1, "it was forgotten"


def test_what_others_send_is_shown_on_one_line():
    assert printable("a\r\n\x1b[31m é") == r"a\r\n\x1b[31m é"
    assert len(printable("x" * 10_000)) == 300
