"""Children: what they inherit, that nobody waits for them, and that they do not outlive their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from chaos_server import Process, until
from run_loop import finish

from baton.runtime.processes.children import exit_text, has_ended, start_child
from baton.runtime.wire.channel import BlockingChannel

pytestmark = pytest.mark.usefixtures("child_path")


def start(size: int = 10, **settings) -> tuple[subprocess.Popen, BlockingChannel, socket.socket]:
    ours, theirs = socket.socketpair()
    process = start_child("child_echo", {"text": "k" * size, **settings}, {"control": theirs})
    assert theirs.fileno() == -1, "the child's end must not stay open here: its death would go unseen"
    return process, BlockingChannel(ours), ours


def end(process: subprocess.Popen, sock: socket.socket, channel: BlockingChannel) -> None:
    sock.close()
    process.wait(30)


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_settings_and_sockets_arrive_and_nothing_else(size: int):
    with socket.socket() as unrelated:
        unrelated.set_inheritable(True)
        process, channel, ours = start(size)
        message = channel.receive()
        assert message is not None
        got, sockets, fds, inheritable, own_session, *argv = message.message.split(" ")
        assert (got, sockets, inheritable, own_session) == (str(size), "1", "[]", "True")
        assert int(fds) == 3 + 1 + 1, "standard streams, the socket, and the folder being listed"
        assert "kkk" not in " ".join(argv)
        end(process, ours, channel)
        assert process.returncode == 0


def test_large_settings_hold_up_nobody_even_if_the_child_does_not_read(monkeypatch: pytest.MonkeyPatch):
    """With a pipe the parent would wait for ever in its write."""
    monkeypatch.setenv("CHILD_ORDERS", "stop_early")
    process, channel, ours = start(3_000_000)
    process.kill()
    end(process, ours, channel)
    assert exit_text(process.returncode) == "was killed by SIGKILL"


@pytest.mark.parametrize("moment", ["early", "late"])
def test_a_child_does_not_outlive_its_parent(tmp_path: Path, moment: str):
    """Killed while the child still imports, and when it is well under way."""
    script = (
        "import socket, sys, time\n"
        "from baton.runtime.processes.children import start_child\n"
        "a, b = socket.socketpair()\n"
        "print(start_child('child_echo', {'text': 'x'}, {'control': b}).pid, flush=True)\n"
        "a.recv(1) if sys.argv[1] == 'late' else None\n"
        "print('heard', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, moment], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Process(int(parent.stdout.readline()))
        assert parent.stdout.readline() == "heard\n"
        parent.kill()
        parent.wait(30)
        until(lambda: not child.alive, "the child is gone", 30)


def test_a_child_that_cannot_start_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    with pytest.raises(FileNotFoundError):
        start_child("child_echo", {}, {"control": theirs})
    ours.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_for_a_child_never_holds_up_the_loop_and_leaves_no_zombie():
    process, channel, ours = start()

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticking = asyncio.create_task(tick())
        assert not await has_ended(process, 0.1)
        assert ticks > 2
        assert not await has_ended(process, 60, unless=lambda: True)
        process.send_signal(signal.SIGTERM)
        assert await has_ended(process, 60)
        assert await has_ended(process, 0)
        ticking.cancel()

    finish(main())
    assert exit_text(process.returncode) == "was killed by SIGTERM"
    assert not Path(f"/proc/{process.pid}").exists()
    end(process, ours, channel)


def test_exit_statuses_in_words():
    assert exit_text(None) == "does not end"
    assert exit_text(0) == "exited with status 0"
    assert exit_text(-11) == "was killed by SIGSEGV"
    assert exit_text(-50) == "was killed by signal 50"
