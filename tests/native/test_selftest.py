"""The library by itself, in C (selftest.c): for the variants of this processor, in an emulator for those of ARM, and for
Intel's tiles with tiles written in C (tiles_in_c.h), where the processor has AVX-512.

Both print checksums, and so a machine that nobody here has is compared with the one that the tests run on.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.native.build import FLAGS, SOURCES, NoCompiler, find_compiler
from baton.native.variants import VARIANTS, Variant, supported_variants

SELFTEST = Path(__file__).parent / "selftest.c"
TILES_IN_C = SELFTEST.with_name("tiles_in_c.h")
NOT_ALLOWED = 2  # what it ends with
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
EMULATED = () if platform.machine() in ("aarch64", "arm64") else ("i8mm", "dotprod", "plain")
OF_LANES = ("attention", "model")
"""What goes through as many lanes as a vector has: the same where vectors are equally long."""

pytestmark = pytest.mark.timeout(1500)  # an emulator is slow, and slower beside a busy neighbour


@dataclass(frozen=True, slots=True)
class Build:
    variant: Variant
    emulated: bool = False
    tiles_in_c: bool = False

    def __str__(self) -> str:
        return f"{self.variant.name}{'-emulated' * self.emulated}{'-tiles-in-c' * self.tiles_in_c}"

    @property
    def flags(self) -> list[str]:
        return [*self.variant.compiler_flags, *(["-include", str(TILES_IN_C)] if self.tiles_in_c else [])]

    @property
    def compiler(self) -> list[str]:
        return [CROSS_COMPILER, "-static"] if self.emulated else find_compiler()

    @property
    def missing(self) -> str:
        """What there is not, or nothing."""
        if self.emulated and "BATON_EMULATE" not in os.environ:
            return "BATON_EMULATE, which make chaos sets: an emulated variant takes minutes"
        if self.emulated:
            return ", ".join(tool for tool in (CROSS_COMPILER, EMULATOR) if not shutil.which(tool))
        if self.tiles_in_c and "BATON_SLOW" not in os.environ:
            return "BATON_SLOW, which make chaos sets"
        try:
            find_compiler()
        except NoCompiler as error:
            return str(error)
        return ""


BUILDS = (
    *(Build(variant) for variant in supported_variants()),
    *(Build(variant, tiles_in_c=True) for variant in supported_variants() if variant.name == "avx512"),
    *(Build(variant, emulated=True) for variant in VARIANTS if variant.name in EMULATED),
)

Lines = dict[str, str]
"""What it says of each thing that it computes."""


@pytest.fixture(scope="session")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Build], Lines]:
    """Each runs once in a session, whoever asks first. Nothing where the system does not allow the instructions."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "selftests"
    folder.mkdir(exist_ok=True)

    def lines(build: Build) -> Lines:
        kept = folder / f"{build}.txt"
        if not kept.exists():
            own = folder / f"{build}-{os.getpid()}"
            text = own.with_suffix(".txt")
            text.write_text(run(build, own))
            text.replace(kept)
        words = (line.rsplit(maxsplit=1) for line in kept.read_text().splitlines())
        return {what.strip(): value for what, value in words}

    return lines


def run(build: Build, program: Path) -> str:
    flags = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC")]
    command = [*build.compiler, *flags, *build.flags, f"-I{SOURCES}", str(SELFTEST), "-o", str(program)]
    compiled = subprocess.run([*command, "-lm", "-lpthread"], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-2000:]
    emulator = [EMULATOR, "-cpu", "max"] if build.emulated else []
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True)
    if done.returncode == NOT_ALLOWED:
        return ""
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-500:]}"
    return done.stdout


@pytest.mark.slow  # half a minute each; test_sanitizers.py runs the same program everywhere, briefly
@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_it_computes_what_its_comments_say(build, said):
    if build.missing:
        pytest.skip(f"not here: {build.missing}")
    lines = said(build)
    if not lines:
        pytest.skip("the system does not allow these instructions")
    assert len(lines) > 30


@pytest.mark.slow
def test_what_rounds_alike_gives_the_same_bits(said):
    everywhere: dict[str, set[str]] = {}
    of_lanes: dict[tuple[str, str], set[str]] = {}
    for build in BUILDS:
        lines = {} if build.missing else said(build)
        if lines.pop("rounds", "twice") == "twice":
            continue
        lanes, tiles = lines.pop("lanes"), lines.pop("tiles")
        if tiles != "0":
            lines = {what: value for what, value in lines.items() if "int" not in what}
        for what, value in lines.items():
            if what.startswith(OF_LANES):
                of_lanes.setdefault((what, lanes), set()).add(value)
            else:
                everywhere.setdefault(what, set()).add(value)
    if not everywhere:
        pytest.skip("there is nothing to compare")
    assert [what for what, values in everywhere.items() if len(values) > 1] == []
    assert [what for what, values in of_lanes.items() if len(values) > 1] == []
