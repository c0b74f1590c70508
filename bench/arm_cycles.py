"""Cycles of the inner loops on a Neoverse-N1, without one: gcc's cross compiler makes the code, llvm-mca reads it.

    python bench/arm_cycles.py [--against CHECKOUT] [--cpu neoverse-n1]

Needs aarch64-linux-gnu-gcc and an llvm-mca that knows the processor (LLVM 17 and later; Debian: gcc-aarch64-linux-gnu,
llvm-19). A row is one turn of a loop. `of the peak`: `sdot` instructions against the two that a Neoverse-N1 can begin per
cycle. `stack`: loads and stores of what did not fit into registers. The model begins three micro-operations per cycle and has
every load in the first cache: a prediction that compares two versions, not a measurement.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.native.build import FLAGS
from baton.native.variants import VARIANTS
from measuring.goals import markdown

HERE = Path(__file__).resolve().parent
SOURCES = Path("src/baton/native/csrc")
COMPILER, ANALYSERS = "aarch64-linux-gnu-gcc", ("llvm-mca", *(f"llvm-mca-{number}" for number in range(30, 16, -1)))
SDOT_A_CYCLE = 2
TURNS = 100
LEAST_WORK = 12
"""`sdot` or `fmla` instructions: shorter loops are not the inner ones."""

LABEL = re.compile(r"^(\.L\d+):")
BRANCH = re.compile(r"^\t(?:b\.?\w*|cbn?z\t\w+,|tbn?z\t\w+, \d+,)\s*(\.L\d+)")
FUNCTION = re.compile(r"^([a-zA-Z_]\w*)(?:\.\w+)*:")


@dataclass(frozen=True, slots=True)
class Loop:
    function: str
    lines: tuple[str, ...]

    def count(self, *names: str) -> int:
        return sum(line.split("\t")[1] in names for line in self.lines)

    @property
    def spills(self) -> int:
        return sum("[sp" in line for line in self.lines)


def assembly(checkout: Path, flags: tuple[str, ...]) -> str:
    """The library as text."""
    plain = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "decoder.s"
        source = checkout / SOURCES / "decoder.c"
        subprocess.run([COMPILER, *plain, *flags, "-S", "-o", str(to), str(source)], check=True, timeout=600)
        return to.read_text()


def loops_of(text: str) -> Iterator[Loop]:
    """Loops without another one in them, and with work to do."""
    starts: dict[str, int] = {}
    function, ended = "", 0
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if found := FUNCTION.match(line):
            function, starts, ended = found[1], {}, number
        elif found := LABEL.match(line):
            starts[found[1]] = number
        elif (found := BRANCH.match(line)) and (start := starts.get(found[1], -1)) >= ended:
            ended = number
            body = [each.split("//")[0].rstrip() for each in lines[start : number + 1]]
            loop = Loop(function, tuple(each for each in body if each.startswith("\t") and not each.startswith("\t.")))
            if loop.count("sdot") + loop.count("fmla") >= LEAST_WORK:
                yield loop


def cycles(loop: Loop, analyser: str, cpu: str) -> float:
    """Of one turn."""
    body = "\n".join(line for line in loop.lines if not BRANCH.match(line)) + "\n"
    command = [
        analyser,
        "-mtriple=aarch64",
        f"-mcpu={cpu}",
        "-mattr=+dotprod",
        f"-iterations={TURNS}",
        "-resource-pressure=false",
    ]
    done = subprocess.run(
        [*command, "-instruction-info=false"], input=body, capture_output=True, text=True, check=True, timeout=60
    )
    found = re.search(r"^Total Cycles:\s+(\d+)", done.stdout, re.MULTILINE)
    assert found, done.stdout[:500]
    return int(found[1]) / TURNS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, whose loops are printed first")
    parser.add_argument("--cpu", default="neoverse-n1")
    parser.add_argument("--variant", default="dotprod")
    options = parser.parse_args()
    analyser = next((name for name in reversed(ANALYSERS) if shutil.which(name)), None)
    if analyser is None or not shutil.which(COMPILER):
        parser.error(f"needs {COMPILER} and llvm-mca")
    flags = next(each for each in VARIANTS if each.name == options.variant).compiler_flags
    for checkout in filter(None, (options.against, HERE.parent)):
        rows = []
        for loop in loops_of(assembly(checkout, flags)):
            turn, dots = cycles(loop, analyser, options.cpu), loop.count("sdot")
            share = f"{dots / SDOT_A_CYCLE / turn:.0%}" if dots else ""
            counts = (dots, loop.count("fmla"), len(loop.lines), loop.spills)
            rows.append([loop.function, *map(str, counts), f"{turn:.1f}", share])
        print(f"{checkout}\n")
        print(markdown(["function", "sdot", "fmla", "instructions", "stack", "cycles", "of the peak"], rows))


if __name__ == "__main__":
    main()
