"""Compare two versions of Baton: is the new one slower?

    python bench/compare.py OLD NEW                                   the cases below, processor time
    python bench/compare.py main HEAD --case scheduler --pairs 11
    python bench/compare.py ../old . -- python bench/host.py --http 16 --offline 32 --step-ms 2.5 --output 64
    python bench/compare.py OLD NEW --limit 1 --value 'device_ms ([0-9.]+)' -- python bench/gpu.py --only decode

OLD and NEW are folders with a checkout, or git revisions, for which a temporary worktree is made. The two versions run in
turns (old, new, new, old), so that a slow drift of the machine cancels out. Each command runs in its own checkout, with that
checkout's `src` first on the path.

The measured quantity is the processor time of the command and of the children it waited for: other programs on the machine
hardly change it. A command must do a fixed amount of work. With --value the numbers that the pattern finds in the output are
compared instead, lower is better; use it on a GPU, whose work the processor does not see. The result is the median of the
ratios new / old. "Not slower" means at most 3 % on a CPU and 1 % on the H200. Exit status 1: a case is slower than the limit.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).resolve().parents[1]
CASES = {
    "scheduler": "python bench/scheduler.py --steps 300",
    "prefix_cache": "python bench/prefix_cache.py --sizes 100000 --repeats 10",
    "host": "python bench/host.py --http 16 --offline 32 --step-ms 2.5 --output 96",
    "kernels": "python bench/decoder_steps.py --steps 60",
    "simulate": "python -m baton.cli.main simulate --seeds 0:20 --jobs 1",
}
"""Each does the same amount of work in every run, in some seconds."""
COMMAND_SECONDS_MAX = 900.0


@dataclass(frozen=True)
class Comparison:
    """Ratios new / old, one per pair of runs. Above 1: the new version takes longer."""

    name: str
    ratios: tuple[float, ...]

    @property
    def middle(self) -> float:
        return median(self.ratios)

    def is_slower(self, limit_percent: float) -> bool:
        return self.middle > 1.0 + limit_percent / 100.0

    def __str__(self) -> str:
        low, _, high = quantiles(self.ratios, n=4) if len(self.ratios) > 1 else (self.middle,) * 3
        change = 100.0 * (self.middle - 1.0)
        spread = f"quartiles {100 * (low - 1):+.1f} to {100 * (high - 1):+.1f} %, {len(self.ratios)} pairs"
        return f"{self.name:<28} {change:+6.1f} %   ({spread})"


def compare(name: str, pairs: list[tuple[list[float], list[float]]]) -> list[Comparison]:
    """One comparison per measured number. Each run of one command must give equally many numbers."""
    counts = {len(numbers) for pair in pairs for numbers in pair}
    if len(counts) != 1 or counts == {0}:
        raise SystemExit(f"{name}: the runs gave {sorted(counts)} numbers; each must give the same count, at least one")
    count = counts.pop()
    names = [name] if count == 1 else [f"{name} [{number}]" for number in range(count)]
    return [Comparison(label, tuple(new[at] / old[at] for old, new in pairs)) for at, label in enumerate(names)]


def run(command: list[str], checkout: Path, value: str | None) -> list[float]:
    """The processor seconds of the command, or the numbers that `value` finds in its output."""
    path = os.pathsep.join([str(checkout / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # Bytecode is kept: else every run compiles all sources, and more lines would count as slower.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": ""}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            status, usage = _wait(process)
        finally:
            process.kill()  # it does nothing to a process that ended
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status != 0:
        raise SystemExit(f"{shlex.join(command)} in {checkout} ended with {status}:\n{text[-3000:]}")
    if value is None:
        return [usage.ru_utime + usage.ru_stime]
    return [float(number) for number in re.findall(value, text)]


def _wait(process: subprocess.Popen[bytes]) -> tuple[int, resource.struct_rusage]:
    """wait4 tells what this child used, with the children that it waited for."""

    def expire(*_: object) -> None:
        raise SystemExit(f"the command did not end within {COMMAND_SECONDS_MAX:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, COMMAND_SECONDS_MAX)
    try:
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage


def pairs_of(command: list[str], old: Path, new: Path, count: int, value: str | None) -> list[tuple[list[float], list[float]]]:
    run(command, old, value), run(command, new, value)  # compiles, fills caches; not counted
    pairs = []
    for number in range(count):
        if number % 2 == 0:
            first, second = run(command, old, value), run(command, new, value)
        else:
            second, first = run(command, new, value), run(command, old, value)
        pairs.append((first, second))
    return pairs


@contextmanager
def checkout_of(name: str) -> Iterator[Path]:
    """A folder as it is, or a temporary worktree of a revision."""
    if Path(name).is_dir():
        yield Path(name).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="baton-compare-") as folder:
        place = Path(folder) / "tree"
        made = subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", place, name], capture_output=True, text=True)
        if made.returncode:
            raise SystemExit(f"{name}: neither a folder nor a revision: {made.stderr.strip()}")
        try:
            yield place
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", place], capture_output=True)


def read_options(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    ours, command = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="a folder or a git revision")
    parser.add_argument("new", help="a folder or a git revision")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be repeated (default: all)")
    parser.add_argument("--pairs", type=int, default=7, help="runs of each version (default %(default)s)")
    parser.add_argument("--limit", type=float, default=3.0, help="percent that count as slower (default %(default)s)")
    parser.add_argument("--value", help="a pattern with one group: numbers in the output, instead of processor time")
    return parser.parse_args(ours), command


def _without(words: list[str], *checkouts: Path) -> str:
    """The checkout that lacks the program of the case. Empty: all have it."""
    program = words[1]
    lacking = [place for place in checkouts if program.endswith(".py") and not (place / program).is_file()]
    return str(lacking[0]) if lacking else ""


def main(arguments: list[str]) -> int:
    options, command = read_options(arguments)
    chosen = {"command": command} if command else {name: shlex.split(CASES[name]) for name in options.case or CASES}
    slower = False
    with ExitStack() as stack:
        old, new = stack.enter_context(checkout_of(options.old)), stack.enter_context(checkout_of(options.new))
        for name, words in chosen.items():
            if not command and not options.case and (lacking := _without(words, old, new)):
                print(f"{name}: not compared, {lacking} has no {words[1]}", flush=True)
                continue
            words = [sys.executable if word == "python" else word for word in words]
            for comparison in compare(name, pairs_of(words, old, new, options.pairs, options.value)):
                verdict = "SLOWER" if comparison.is_slower(options.limit) else "ok"
                slower = slower or verdict == "SLOWER"
                print(f"{comparison}   {verdict}", flush=True)
    return int(slower)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
