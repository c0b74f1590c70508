"""Available main memory: the machine's, or the container's limit if that is less."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.cgroup import group_folders, read_field, read_number

GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    total_bytes: int
    "Total memory of the device, or this process's limit."
    free_bytes: int


def main_memory() -> MemoryFacts:
    groups = [group for folder in group_folders("memory") if (group := _group_memory(folder)) is not None]
    return min(_machine_memory(), *groups, key=lambda facts: facts.free_bytes) if groups else _machine_memory()


def _machine_memory() -> MemoryFacts:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return MemoryFacts(kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024)
    except (OSError, KeyError, ValueError):
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        return MemoryFacts(total, total // 2)  # free memory is unknown; half is a guess with room for error


def _group_memory(folder: Path) -> MemoryFacts | None:
    """A control group's limit (version 2, else 1), if it has one. Clean file pages count as free: the kernel reclaims them."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = read_number(folder / limit_name), read_number(folder / used_name)
        if limit is not None and used is not None and limit < 2**60:
            cached = read_field(folder / "memory.stat", cache_name) or 0
            return MemoryFacts(limit, max(0, limit - used + cached))
    return None


def transient_bytes(run: Callable[[], object]) -> int:
    """Run the function, and return by how much the peak of this process's memory exceeded its memory afterwards."""
    with contextlib.suppress(OSError):  # writing 5 resets the peak
        Path("/proc/self/clear_refs").write_text("5")
    run()
    try:
        status = Path("/proc/self/status").read_text()
        peak, now = (int(status.partition(f"{name}:")[2].split()[0]) for name in ("VmHWM", "VmRSS"))
    except (OSError, IndexError, ValueError):
        return 0  # unknown
    return max(0, peak - now) * 1024
