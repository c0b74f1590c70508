"""A worker that the kernel kills for want of memory is known by the kernel's own counts, wherever it keeps them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_loop import finish

from baton.cgroup import KERNEL, Kernel, group_folders, memory_kills
from baton.core.child_loss import cause_of_loss
from baton.runtime.processes.child import Child, Loss
from baton.runtime.processes.memory_kills import MemoryKillLog
from baton.runtime.processes.process_table import ENGINE_CHILDREN

LIMIT_MIB = 96


class FakeKernel:
    """/proc and /sys/fs/cgroup of another machine, in a folder."""

    def __init__(self, folder: Path, groups: str, counts: dict[str, int], machine: int | None = 0) -> None:
        self.kernel = Kernel(folder / "proc", folder / "cgroup")
        self._files = counts
        self._machine = machine
        (self.kernel.proc / "self").mkdir(parents=True)
        (self.kernel.proc / "self/cgroup").write_text(groups)
        self.kernel.groups.mkdir()
        self.write()

    def write(self) -> None:
        for name, kills in self._files.items():
            path = self.kernel.groups / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"low 0\nhigh 0\nmax 7\noom 3\noom_kill {kills}\n")
        if self._machine is not None:
            (self.kernel.proc / "vmstat").write_text(f"pgpgin 1\noom_kill {self._machine}\n")

    def kill_for_memory(self, *, group: bool = True) -> None:
        if group:
            self._files = {name: kills + 1 for name, kills in self._files.items()}
        self._machine = None if self._machine is None else self._machine + 1
        self.write()


MACHINES = {
    "container, version 2": ("0::/\n", {"memory.events": 2}, 9),
    "systemd unit": ("0::/system.slice/baton.service\n", {"system.slice/baton.service/memory.events": 0}, 9),
    "pod without a group of its own": ("0::/kubepods/pod1/app\n", {"kubepods/pod1/memory.events": 4}, None),
    "container, version 1": ("5:memory:/docker/3f2a\n0::/\n", {"memory/memory.oom_control": 1}, 9),
    "unit, version 1": ("5:memory:/system.slice/b.service\n", {"memory/system.slice/b.service/memory.oom_control": 0}, 9),
    "bare metal": ("0::/user.slice\n", {}, 9),
}


def child_of(process: Any, log: MemoryKillLog) -> Child:
    control: Any = SimpleNamespace(close=lambda: None)
    return Child(ENGINE_CHILDREN[0], 1, process, control, None, log)


def end_of_a_killed_child(log: MemoryKillLog, sent: signal.Signals = signal.SIGKILL) -> Loss:
    """A real process, killed by a real signal."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(sent)

    async def main() -> Loss:
        return await child_of(process, log).end(30.0)

    return finish(main())


@pytest.mark.parametrize("machine", MACHINES)
def test_a_kill_for_memory_is_the_child_s_own_fault(machine: str, tmp_path: Path):
    fake = FakeKernel(tmp_path, *MACHINES[machine])
    log = MemoryKillLog(fake.kernel)
    fake.kill_for_memory()
    loss = end_of_a_killed_child(log)
    assert (loss.cause, loss.code) == ("died", -signal.SIGKILL)
    assert "want of memory" in loss.text


@pytest.mark.parametrize("machine", MACHINES)
def test_a_kill_from_outside_is_not(machine: str, tmp_path: Path):
    log = MemoryKillLog(FakeKernel(tmp_path, *MACHINES[machine]).kernel)
    assert end_of_a_killed_child(log) == Loss("was killed by SIGKILL", "killed", -signal.SIGKILL)


def test_another_program_s_kill_on_the_machine_is_no_evidence_where_the_own_group_counts(tmp_path: Path):
    fake = FakeKernel(tmp_path, *MACHINES["systemd unit"])
    log = MemoryKillLog(fake.kernel)
    fake.kill_for_memory(group=False)
    assert end_of_a_killed_child(log).cause == "killed"


def test_a_kill_for_memory_long_before_is_no_evidence(tmp_path: Path):
    fake = FakeKernel(tmp_path, *MACHINES["bare metal"])
    log = MemoryKillLog(fake.kernel)
    fake.kill_for_memory()
    log.sample()
    log.sample()
    assert end_of_a_killed_child(log).cause == "killed"


def test_a_kill_that_was_sampled_before_the_child_was_found_dead_is_evidence(tmp_path: Path):
    fake = FakeKernel(tmp_path, *MACHINES["bare metal"])
    log = MemoryKillLog(fake.kernel)
    fake.kill_for_memory()
    log.sample()
    assert end_of_a_killed_child(log).cause == "died"


def test_one_kill_for_memory_explains_one_loss(tmp_path: Path):
    fake = FakeKernel(tmp_path, *MACHINES["container, version 2"])
    log = MemoryKillLog(fake.kernel)
    fake.kill_for_memory()
    assert [end_of_a_killed_child(log).cause for _ in range(2)] == ["died", "killed"]


@pytest.mark.parametrize(
    ("code", "group", "machine", "cause"),
    [
        (-9, 1, 0, "died"),
        (-9, 0, 1, "killed"),
        (-9, None, 1, "died"),
        (-9, None, None, "killed"),
        (-15, 1, 1, "killed"),
        (-11, 0, 0, "died"),
        (1, 0, 0, "died"),
        (0, 0, 0, "died"),
    ],
)
def test_who_did_it(code: int, group: int | None, machine: int | None, cause: str):
    assert cause_of_loss(code, group, machine) == cause


def test_samples_go_on_until_they_are_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("baton.runtime.processes.memory_kills.PERIOD_SECONDS", 0.001)
    fake = FakeKernel(tmp_path, *MACHINES["bare metal"])
    log = MemoryKillLog(fake.kernel)
    fake.kill_for_memory()

    async def main() -> None:
        sampled = asyncio.Event()
        sample, left = log.sample, [3]

        def count() -> None:
            sample()
            left[0] -= 1
            if not left[0]:
                sampled.set()

        monkeypatch.setattr(log, "sample", count)
        task = asyncio.create_task(log.sample_forever())
        await asyncio.wait_for(sampled.wait(), 30)
        task.cancel()

    finish(main())
    assert log.since() == (None, 0)


def test_nothing_is_known_where_the_kernel_says_nothing(tmp_path: Path):
    assert memory_kills(Kernel(tmp_path, tmp_path / "nothing")) == (None, None)


HUNGRY = "x = bytearray(1 << 20)\nkept = []\nwhile True: kept.append(bytes([1]) * (1 << 20))"
SCRIPT = f"""
import subprocess, sys
from baton.runtime.processes.memory_kills import MemoryKillLog
log = MemoryKillLog()
code = subprocess.run([sys.executable, "-c", {HUNGRY!r}], check=False).returncode
print(code, *log.since())
"""


@pytest.fixture
def small_group():
    """A control group of our own with little memory, where we may make one."""
    folders = group_folders("memory", KERNEL)
    if not folders:
        pytest.skip("no control group of memory is visible here")
    folder = folders[0] / f"baton-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a control group cannot be made here: {error}")
    try:
        limit = folder / "memory.max"
        if not limit.exists():
            limit = folder / "memory.limit_in_bytes"
        if not limit.exists():
            pytest.skip("the group has no limit of memory")
        limit.write_text(str(LIMIT_MIB << 20))
        yield folder
    finally:
        folder.rmdir()


def test_a_real_kill_for_memory_is_counted(small_group: Path):
    """The kernel kills a process of a group that has used up its memory; the parent in the same group finds the count grown."""

    def enter() -> None:
        (small_group / "cgroup.procs").write_text(str(os.getpid()))

    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, preexec_fn=enter, check=True)
    code, group, _ = ran.stdout.split()
    assert (code, int(group) >= 1) == (str(-signal.SIGKILL), True)
