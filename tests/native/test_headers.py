"""Every header of the kernels compiles alone: what it uses it includes. (A template is included several times, by its user.)"""

from __future__ import annotations

import re
import subprocess

import pytest

from baton.native.build import SOURCES, NoCompiler, find_compiler
from baton.native.variants import supported_variants

HEADERS = sorted(path.name for path in SOURCES.glob("*.h") if "template" not in path.name)
OF_ARM = ("matmul_neon.h", "attention_int8_neon.h", "neon_dot.h")
THRESHOLD = re.compile(r"^#define (\w+_FROM|\w+_AHEAD|\w+_NANOSECONDS)\b", re.MULTILINE)


def test_thresholds_are_in_one_file():
    found = {path.name for path in SOURCES.glob("*.h") if THRESHOLD.search(path.read_text())}
    assert found == {"tuning.h"}


def test_intels_tiles_are_in_files_of_their_own():
    instructions = {path.name for path in SOURCES.glob("*.[ch]") if re.search(r"\b_tile_\w+\(", path.read_text())}
    assert instructions
    assert all("amx" in name for name in instructions), instructions


@pytest.mark.slow
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_stands_alone(header):
    best = supported_variants()[0]
    if header in OF_ARM and best.machine != "aarch64":
        pytest.skip("of another processor")
    if header in ("matmul_q4.h", "matmul_q4_amx.h") and (best.name == "amx") != ("amx" in header):
        pytest.skip("a build has one of these two")
    try:
        compiler = find_compiler()
    except NoCompiler as error:
        pytest.skip(str(error))
    command = [*compiler, "-std=gnu11", *best.compiler_flags, "-fsyntax-only", f"-I{SOURCES}", "-x", "c", "-"]
    done = subprocess.run(command, input=f'#include "{header}"\n', capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
