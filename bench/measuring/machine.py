"""The machine under the engines: who used its cores, what a process tree holds, and what it can do at best.

A measurement notes two disturbances. `pressure` is the share of time in which some task waited for a core (/proc/pressure/cpu):
an engine with more threads than cores, or a client beside it, makes some of it itself. `foreign` is the share of all cores'
time that neither the engine nor this process used: other people's work and the hypervisor's. Only that says that the
measurement was disturbed from outside, so that is what repetitions are chosen by.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
FOREIGN_MAX = 0.05
"""More than this, and a measurement counts as disturbed."""
LIMITS_SOURCE = Path(__file__).parent.parent / "peers/limits.c"


# Processes as the kernel sees them


@dataclass(frozen=True, slots=True)
class Stat:
    parent: int
    cpu_seconds: float
    "Its own, and of its children that ended."


def stat_of(text: str) -> Stat:
    """/proc/PID/stat. The name in brackets may hold anything, so fields are counted from its end."""
    fields = text.rsplit(")", 1)[1].split()
    return Stat(int(fields[1]), sum(map(int, fields[11:15])) / TICKS)


def all_stats() -> dict[int, Stat]:
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                found[int(folder.name)] = stat_of((folder / "stat").read_text())
            except OSError:
                continue
    return found


def tree(roots: Iterable[int], stats: dict[int, Stat]) -> set[int]:
    """The roots and all below them."""
    children: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        children.setdefault(stat.parent, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        if (pid := todo.pop()) not in found:
            found.add(pid)
            todo += children.get(pid, [])
    return found


def memory_mib(root: int) -> float:
    """PSS of a process and all below it: a page that two of them share counts once."""
    total = 0
    for pid in tree([root], all_stats()):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return total / 1024


# Disturbance


@dataclass(frozen=True, slots=True)
class Reading:
    at: float
    waited: float
    busy: float
    ours: float


def pressure_seconds() -> float:
    """Seconds so far in which some task waited for a core; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().splitlines()[0].rsplit("total=", 1)[1]) / 1e6
    except OSError:
        return 0.0


def busy_seconds(text: str) -> float:
    """/proc/stat: what all cores did apart from waiting, and what the hypervisor took."""
    user, nice, system, _, _, irq, softirq, steal = map(int, text.splitlines()[0].split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS


def read(roots: Sequence[int]) -> Reading:
    """Now. `roots` are the processes measured, besides this one."""
    stats = all_stats()
    ours = sum(stats[pid].cpu_seconds for pid in tree(roots, stats) if pid in stats)
    ours += sum(os.times()[:4])  # this process, and what it started and saw end: the busy neighbour
    return Reading(time.perf_counter(), pressure_seconds(), busy_seconds(Path("/proc/stat").read_text()), ours)


@dataclass(frozen=True, slots=True)
class Disturbance:
    pressure: float
    foreign: float

    @classmethod
    def between(cls, early: Reading, late: Reading, cores: int = CORES) -> Disturbance:
        seconds = late.at - early.at
        foreign = (late.busy - early.busy) - (late.ours - early.ours)
        return cls((late.waited - early.waited) / seconds, max(0.0, foreign / seconds / cores))

    @property
    def quiet(self) -> bool:
        return self.foreign < FOREIGN_MAX


# What the machine is, and what it can do


def name() -> str:
    """Figures of different machines look alike in a table; this line tells them apart."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    known = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set(known.get("flags", known.get("Features", "")).split())
    words = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve", "bf16")
    model = known.get("model name", "unnamed")
    return f"{platform.machine()}, {CORES} cores, {model} ({', '.join(w for w in words if w in flags) or 'no extensions'})"


def limits(scratch: Path, threads: int) -> dict[str, Any]:
    """What peers/limits.c measures; empty, with the reason, where there is no compiler."""
    scratch.mkdir(parents=True, exist_ok=True)
    program = scratch / "limits"
    build = ["cc", "-O3", "-march=native", "-pthread", "-o", str(program), str(LIMITS_SOURCE)]
    try:
        subprocess.run(build, check=True, capture_output=True, text=True)
        said = subprocess.run([str(program), str(threads)], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return {"missing": str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]}
    return dict(json.loads(said.stdout))
