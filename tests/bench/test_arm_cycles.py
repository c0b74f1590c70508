"""Code for ARM, read without an ARM machine: what is in the inner loops, and that nothing of it is on the stack."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from arm_cycles import COMPILER, HERE, Loop, assembly, loops_of
from baton.native.variants import VARIANTS

SOME_CODE = """
outer:
.L1:
\tmov\tx1, 0
.L2:
{work}
\tstr\tq0, [sp, 16]
\tbne\t.L2
\tbne\t.L1
\tret
"""


def needs_compiler() -> None:
    if not shutil.which(COMPILER):
        pytest.skip(f"no {COMPILER}")


def test_the_inner_loop_is_found_with_its_work_and_its_spills():
    work = "\n".join("\tsdot\tv0.4s, v1.16b, v2.4b[0]" for _ in range(12))
    (loop,) = loops_of(SOME_CODE.format(work=work))
    assert (loop.function, loop.count("sdot"), loop.spills) == ("outer", 12, 1)


@pytest.mark.slow
def test_tiles_of_four_rows_stay_in_registers():
    needs_compiler()
    flags = next(variant.compiler_flags for variant in VARIANTS if variant.name == "dotprod")
    tiles = [loop for loop in loops_of(assembly(HERE.parent, flags)) if loop.count("sdot") == 64]
    assert len(tiles) >= 4
    few = [loop for loop in tiles if len(loop.lines) <= 140]  # more instructions: few rows, which unpack nibbles as they go
    assert few
    assert [(loop.function, loop.spills) for loop in few if loop.spills] == []


def test_the_limit_of_float32_is_measured_in_registers():
    needs_compiler()
    command = [COMPILER, "-O3", "-march=armv8.2-a+dotprod", "-S", "-o", "-", str(HERE / "peers/limits.c")]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    loops: dict[str, Loop] = {name: loop for loop in loops_of(text) for name in ("fmla", "sdot") if loop.count(name)}
    for name, loop in loops.items():
        assert loop.count(name) == 12
        assert len(loop.lines) == 14  # and a counter, and a branch
    assert set(loops) == {"fmla", "sdot"}
