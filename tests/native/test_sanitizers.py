"""The library under the compilers' own checks: no warnings from any compiler that is here, and nothing that sanitizers find."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from baton.native.build import FLAGS, SOURCES
from baton.native.variants import VARIANTS, Variant, cpu_flags

HERE = Path(__file__).parent
COMPILERS = ("gcc", *(f"gcc-{number}" for number in range(9, 16)), "clang", *(f"clang-{number}" for number in range(13, 23)))
CROSS = "aarch64-linux-gnu-gcc"
NOT_OPTIMISED = [flag for flag in FLAGS if flag not in ("-O3", "-shared", "-fPIC")]
UNKNOWN_FLAG = ("unrecognized command", "unknown argument", "unsupported option", "unsupported argument")

pytestmark = pytest.mark.timeout(600)


def installed() -> list[str]:
    """Each once, whatever its names."""
    paths = {Path(path).resolve(): name for name in reversed(COMPILERS) if (path := shutil.which(name))}
    return sorted(paths.values(), key=COMPILERS.index)


def pairs() -> list[tuple[str, Variant]]:
    arm = platform.machine() in ("aarch64", "arm64")
    found = [
        (name, variant) for name in installed() for variant in VARIANTS if variant.machine != ("x86_64" if arm else "aarch64")
    ]
    if not arm and shutil.which(CROSS):
        found += [(CROSS, variant) for variant in VARIANTS if variant.machine != "x86_64"]
    return found


@pytest.mark.parametrize(("compiler", "variant"), pairs(), ids=lambda each: getattr(each, "name", each))
def test_every_compiler_takes_every_variant_without_a_warning(compiler, variant):
    """gcc has known _Float16 on x86 since 12, clang since 15: nothing here needs it."""
    command = [
        compiler,
        *NOT_OPTIMISED,
        *variant.compiler_flags,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsyntax-only",
        str(SOURCES / "decoder.c"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and any(words in done.stderr for words in UNKNOWN_FLAG):
        pytest.skip(f"{compiler} does not know these instructions")
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
def test_the_optimiser_warns_of_nothing(tmp_path):
    """Some warnings come only when values are followed through the program."""
    if not installed():
        pytest.skip("no compiler")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-c", str(SOURCES / "decoder.c"), "-o", str(tmp_path / "made.o")]
    done = subprocess.run([installed()[0], *NOT_OPTIMISED, *flags], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def best_flags() -> tuple[str, ...]:
    """AVX2 where it is there: sanitizers do not see into larger vectors any better, and slow them down more."""
    return next(
        variant.compiler_flags for variant in VARIANTS if variant.name in ("avx2", "dotprod", "plain") and suits(variant)
    )


def suits(variant: Variant) -> bool:
    return variant.suits(platform.machine(), cpu_flags())


def checked(folder: Path, sanitizer: str, source: Path, *flags: str) -> list[str]:
    """A program with a sanitizer built in, and how to start it. Skips where the runtime is missing or does not run."""
    program, starter = folder / source.stem, ["setarch", "-R"] if sanitizer == "thread" and shutil.which("setarch") else []
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }")
    asked = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g", "-O0"]  # what takes long is compiling, not running
    first = (
        "clang" if sanitizer == "address,undefined" else "gcc"
    )  # clang needs half the time, and has no atomics of late_member.c
    for compiler in sorted(installed(), key=lambda name: not name.startswith(first)):
        trial = [compiler, *asked, str(probe), "-o", str(folder / "probe")]
        if subprocess.run(trial, capture_output=True).returncode:
            continue
        if subprocess.run([*starter, str(folder / "probe")], capture_output=True).returncode == 0:
            command = [
                compiler,
                *NOT_OPTIMISED,
                *asked,
                *flags,
                f"-I{SOURCES}",
                str(source),
                "-o",
                str(program),
                "-lm",
                "-lpthread",
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-2000:]
            return [*starter, str(program)]
    pytest.skip(f"no compiler here brings a runtime for -fsanitize={sanitizer}, or it does not run")


def run(command: list[str], **environment: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("much", ["briefly", pytest.param("all", marks=pytest.mark.slow)])
def test_no_access_is_out_of_bounds_and_nothing_is_undefined(tmp_path, much):
    command = checked(tmp_path, "address,undefined", HERE / "selftest.c", *best_flags())
    run([*command, much], ASAN_OPTIONS="detect_leaks=0")  # the test's own model goes with the process


@pytest.mark.slow
def test_threads_do_not_race(tmp_path):
    command = checked(tmp_path, "thread", HERE / "selftest.c", *best_flags())
    run([*command, "threads"], TSAN_OPTIONS=f"suppressions={HERE / 'tsan_suppressions.txt'} halt_on_error=0")


@pytest.mark.parametrize("name", ["late_member", "sleeping_member"])
def test_nor_do_late_members(tmp_path, name):
    run(checked(tmp_path, "thread", HERE / f"{name}.c"), TSAN_OPTIONS="halt_on_error=0")
