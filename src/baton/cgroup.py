"""Control groups of this process (Linux): limits of memory and CPU time, and counts of OOM kills.

A limit may be set on the group itself (a container, a systemd unit) or on any group above it (a slice, a pod), so all groups
from the own one up to the root are read. Version 2 has one tree, version 1 one per controller; a machine may have both.

    /proc/self/cgroup    0::/system.slice/baton.service          version 2, below /sys/fs/cgroup (or its folder `unified`)
                         4:memory:/docker/3f2a...                version 1, below /sys/fs/cgroup/memory
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Kernel:
    """Paths of the kernel's file systems. Tests use their own trees."""

    proc: Path = Path("/proc")
    groups: Path = Path("/sys/fs/cgroup")


KERNEL = Kernel()


class MemoryKills(NamedTuple):
    """Number of OOM kills so far. None: the kernel does not report it."""

    group: int | None
    "Kills in this process's control group, regardless of who set the limit."
    machine: int | None
    "Kills on the whole machine."


def group_folders(controller: str, kernel: Kernel = KERNEL) -> list[Path]:
    """The folders of the own group and its parents for this controller, nearest first. Only visible ones: in a container the
    topmost is the container's."""
    try:
        lines = (kernel.proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    unified = ""
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            mounts = [kernel.groups / controllers, kernel.groups / controller]
            return next((found for mount in mounts if (found := _from_own_to_root(mount, path))), [])
        if number == "0":
            unified = path
    mounts = [kernel.groups / "unified", kernel.groups]
    return next((found for mount in mounts if (found := _from_own_to_root(mount, unified))), [])


def _from_own_to_root(mount: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # the group is outside of the visible tree
        parts = []
    folders = [mount.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]
    return [folder for folder in folders if folder.is_dir()]


def processor_quota(kernel: Kernel = KERNEL) -> float | None:
    """CPUs that the groups may use at once, by the tightest limit. None: no limit."""
    quotas = [quota for folder in group_folders("cpu", kernel) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _quota(folder: Path) -> float | None:
    text = read_text(folder / "cpu.max").split()  # version 2: "max 100000", or "150000 100000"
    if len(text) != 2:
        text = [read_text(folder / "cpu.cfs_quota_us").strip(), read_text(folder / "cpu.cfs_period_us").strip()]
    try:
        quota, period = int(text[0]), int(text[1])
    except ValueError:
        return None  # "max", or no such file
    return quota / period if quota > 0 and period > 0 else None


def memory_kills(kernel: Kernel = KERNEL) -> MemoryKills:
    """Reads the nearest group that counts kills. On bare metal the root of version 2 does not: there only the machine's count
    exists."""
    group = None
    for folder in group_folders("memory", kernel):
        group = read_field(folder / "memory.events", "oom_kill")
        if group is None:
            group = read_field(folder / "memory.oom_control", "oom_kill")  # version 1
        if group is not None:
            break
    return MemoryKills(group, read_field(kernel.proc / "vmstat", "oom_kill"))


def read_text(path: Path) -> str:
    """The file's content; empty if it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def read_number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None  # "max" means no limit


def read_field(path: Path, name: str) -> int | None:
    """The number in the line `name number` of a file."""
    for line in read_text(path).splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdecimal():
            return int(words[1])
    return None
