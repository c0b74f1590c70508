"""Limits of control groups: found from the own group up to the root, in both versions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.cgroup import Kernel, group_folders, processor_quota
from baton.config import WorkerConfig
from baton.kvpool import memory
from baton.kvpool.memory import MemoryFacts, main_memory
from baton.native.library import Library
from baton.worker.platforms import cpu
from baton.worker.platforms.cpu import usable_cores


def kernel_with(folder: Path, groups: str, files: dict[str, str]) -> Kernel:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Kernel(folder / "proc", folder / "cgroup")


QUOTAS = {
    "docker --cpus=2": ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
    "no limit": ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    "half a processor": ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
    "the pod's limit is tighter": ("0::/pod/app\n", {"pod/cpu.max": "150000 100000\n", "pod/app/cpu.max": "max 100000\n"}, 1.5),
    "the unit's own is tighter": (
        "0::/slice/unit\n",
        {"slice/cpu.max": "800000 100000", "slice/unit/cpu.max": "300000 100000"},
        3.0,
    ),
    "version 1, in a container": (
        "3:cpu,cpuacct:/docker/3f\n0::/\n",
        {"cpu,cpuacct/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
        2.5,
    ),
    "version 1, a group of its own": (
        "3:cpu:/a/b\n4:memory:/\n",
        {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/b/cpu.cfs_quota_us": "100000", "cpu/a/b/cpu.cfs_period_us": "50000"},
        2.0,
    ),
    "version 1, no limit": ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
    "outside of what can be seen": ("0::/../../other\n", {"cpu.max": "200000 100000\n"}, 2.0),
    "nothing to be read": ("0::/\n", {}, None),
}


@pytest.mark.parametrize("machine", QUOTAS)
def test_the_tightest_quota_counts(machine: str, tmp_path: Path):
    groups, files, quota = QUOTAS[machine]
    assert processor_quota(kernel_with(tmp_path, groups, files)) == quota


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("250000", 3), ("20000", 1), ("900000", 8), ("max", 8)])
def test_threads_keep_to_the_quota_of_a_container(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores(kernel_with(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000\n"})) == cores


@pytest.mark.parametrize(("given", "ranks", "threads"), [(0, 1, 3), (0, 2, 1), (5, 1, 5)])
def test_a_worker_computes_with_as_many_threads(given: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch):
    """All ranks of a set together."""
    seen: list[int] = []

    def loaded(library: object, opened: object, settings: WorkerConfig, *more: object) -> None:
        seen.append(settings.threads)

    monkeypatch.setattr(cpu, "usable_cores", lambda: 3)
    monkeypatch.setattr(cpu, "load_native", loaded)
    monkeypatch.setattr(cpu, "stepwise", lambda forward: forward)
    monkeypatch.setattr(cpu.CpuPlatform, "_native", lambda self, config: object.__new__(Library))
    opened: Any = SimpleNamespace(config=None)
    cpu.CpuPlatform().load(opened, WorkerConfig(threads=given, ranks=ranks))
    assert seen == [threads]


def test_no_proc_at_all(tmp_path: Path):
    assert group_folders("cpu", Kernel(tmp_path / "proc", tmp_path / "cgroup")) == []
    assert processor_quota(Kernel(tmp_path / "proc", tmp_path / "cgroup")) is None


def test_the_memory_limit_of_a_systemd_unit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Not only that of the topmost group that can be seen."""
    files = {
        "memory.max": "max",
        "memory.current": "9000",
        "slice/memory.max": "5000",
        "slice/memory.current": "4000",
        "slice/unit/memory.max": "3000",
        "slice/unit/memory.current": "500",
    }
    kernel = kernel_with(tmp_path, "0::/slice/unit\n", files)
    monkeypatch.setattr(memory, "group_folders", lambda controller: group_folders(controller, kernel))
    assert main_memory() == MemoryFacts(total_bytes=5000, free_bytes=1000)
