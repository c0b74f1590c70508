"""Times whole steps of the C library, phase by phase, without Python around them; two versions of it in turns.

    python bench/kernel_times.py [--steps 1x1@150,32x1@200,1x256@768] [--bits 8,4] [--against CHECKOUT] [--zig]

A step is SEQUENCESxROWS@CONTEXT: 32x1@200 is 32 sequences that decode behind 200 tokens each, 1x256@768 a chunk of 256 tokens
of a prompt. The model has the shape of SmolLM2-135M and random weights. Milliseconds: the least, and in brackets the median, of
all repeats of all rounds; phases as in csrc/decoder.c. With --against, another checkout's library is timed in turns with this
one, each by its own bench/kernel_times.c. With --zig, this checkout's library as the compiler of the wheels makes it
(tools/wheel.py) is timed in turns, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from baton.native.build import COMPILE_SECONDS_MAX, FLAGS, find_compiler
from baton.native.variants import VARIANTS, supported_variants
from measuring.goals import markdown
from measuring.machine import CORES

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tools"))

from wheel import zig_compiler, zig_flags  # noqa: E402

SOURCES = Path("src/baton/native/csrc")
RUN_SECONDS_MAX = 600.0

Times = dict[str, tuple[list[float], list[float]]]
"""By phase: least and median of every run."""


def build(checkout: Path, variant: str, to: Path, more: list[str], *, zig: bool = False) -> Path:
    chosen = next(each for each in VARIANTS if each.name == variant)
    flags = zig_flags(chosen) if zig else chosen.compiler_flags
    compiler = zig_compiler(platform.machine()) if zig else find_compiler()
    program = to / f"kernel-times-{len(list(to.iterdir()))}"
    plain = [*(flag for flag in FLAGS if flag not in ("-shared", "-fPIC")), *more]
    command = [*compiler, *plain, *flags, "-I", str(checkout / SOURCES), str(checkout / "bench/kernel_times.c")]
    subprocess.run([*command, "-o", str(program), "-lm", "-lpthread"], check=True, timeout=COMPILE_SECONDS_MAX)
    return program


def run(program: Path, bits: str, options: argparse.Namespace, found: dict[tuple[str, str], Times], name: str) -> None:
    words = [bits, str(options.threads), options.kv, str(options.repeats), *options.steps.split(",")]
    done = subprocess.run([str(program), *words], check=True, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)
    for line in done.stdout.splitlines():
        answer = json.loads(line)
        times = found[f"{answer.pop('step')}, {bits} bits", name]
        for phase, (least, middle) in answer.items():
            times[phase][0].append(least)
            times[phase][1].append(middle)


def main() -> None:
    options = read_options()
    found: dict[tuple[str, str], Times] = defaultdict(lambda: defaultdict(lambda: ([], [])))
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"here": HERE.parent} | ({"there": options.against} if options.against else {})
        more = ["-include", str(HERE / "processor_time.h")] if options.processor_time else []
        programs = {name: build(path, options.variant, Path(folder), more) for name, path in checkouts.items()}
        if options.zig:
            programs["here, zig"] = build(HERE.parent, options.variant, Path(folder), more, zig=True)
        for number in range(options.rounds):
            for name in list(programs)[:: 1 if number % 2 == 0 else -1]:
                for bits in options.bits.split(","):
                    run(programs[name], bits, options, found, name)
    phases = list(next(iter(found.values())))
    rows = [
        [step, name, *(f"{min(times[phase][0]):.2f} ({median(times[phase][1]):.2f})" for phase in phases[::-1])]
        for (step, name), times in sorted(found.items())
    ]
    print(markdown(["step", "", *phases[::-1]], rows))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="1x1@150,8x1@200,32x1@200,1x1024@0", help="SEQUENCESxROWS@CONTEXT, comma separated")
    parser.add_argument("--bits", default="8,4", help="of the weights")
    served = "half" if supported_variants()[0].name == "plain" else "bytes"
    parser.add_argument("--kv", default=served, choices=["half", "bytes"], help="as the server chooses here, if not said")
    parser.add_argument("--variant", default=supported_variants()[0].name, choices=[each.name for each in supported_variants()])
    parser.add_argument("--threads", type=int, default=CORES)
    parser.add_argument("--repeats", type=int, default=20, help="of a step, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--zig", action="store_true", help="beside this machine's compiler; needs ziglang")
    parser.add_argument("--processor-time", action="store_true", help="of one thread: on a machine with neighbours")
    options = parser.parse_args()
    return argparse.Namespace(**{**vars(options), "threads": 1 if options.processor_time else options.threads})


if __name__ == "__main__":
    main()
