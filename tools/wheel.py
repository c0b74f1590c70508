"""Builds the files of a release: a wheel with compiled kernels for each processor architecture, one without, and an sdist.

    python tools/wheel.py [--out dist] [--machines x86_64,aarch64] [--variants avx2,plain]
    python tools/wheel.py --in-place      only the kernels of this machine, into this checkout, which then needs no C compiler

Any machine builds for every architecture: the compiler is Zig's (`pip install ziglang`), which brings the headers and stubs of
GNU's C library along. Libraries are linked against version 2.17 of it (2012), so every current distribution can run them. The
bits are those of gcc: tests/native/test_prebuilt.py compares digests. The wheel for any machine and the sdist carry sources
alone, which are compiled at the first start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # nothing has to be installed but the compiler

from baton.native import build, prebuilt  # noqa: E402
from baton.native.library import load_variant  # noqa: E402
from baton.native.variants import VARIANTS, Variant, supported_variants  # noqa: E402

SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
MACHINES = ("x86_64", "aarch64")
GLIBC = "2.17"
ZIG_CACHE = ROOT / "build" / "zig"
BUILD = """
import json, sys
from setuptools import build_meta
kind, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
print(build_meta.build_sdist(out) if kind == "sdist" else build_meta.build_wheel(out, {"--build-option": options}))
"""


def variants_of(machine: str, names: Sequence[str] = ()) -> list[Variant]:
    return [each for each in VARIANTS if each.machine in ("", machine) and (not names or each.name in names)]


def zig_flags(variant: Variant) -> list[str]:
    """Zig has its own names for the architectures of ARM: -march=armv8.2-a+dotprod is -mcpu=generic+v8_2a+dotprod."""
    return [re.sub(r"^-march=armv(\d)\.(\d)-a", r"-mcpu=generic+v\1_\2a", flag) for flag in variant.compiler_flags]


def zig_compiler(machine: str) -> list[str]:
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.{GLIBC}"]


def compile_kernels(variant: Variant, machine: str, folder: Path) -> Path:
    """The library of one variant, in `folder`, under the name by which native/prebuilt.py finds it."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch, "kernels.so")
        command = [
            *zig_compiler(machine),
            *build.FLAGS,
            *zig_flags(variant),
            "-s",
            str(build.SOURCES / "decoder.c"),
            "-o",
            str(made),
            "-lpthread",
        ]
        cache = {"ZIG_GLOBAL_CACHE_DIR": str(ZIG_CACHE), "ZIG_LOCAL_CACHE_DIR": str(ZIG_CACHE)}
        subprocess.run(command, env={**os.environ, **cache}, check=True, timeout=build.COMPILE_SECONDS_MAX)
        return made.replace(folder / prebuilt.file_name(variant, made, machine))


def copy_sources(tree: Path) -> None:
    tree.mkdir()
    ignored = shutil.ignore_patterns("*.egg-info", "__pycache__", prebuilt.FOLDER.name)
    for name in SOURCES:
        path = ROOT / name
        shutil.copytree(path, tree / name, ignore=ignored) if path.is_dir() else shutil.copy(path, tree / name)
    if commit := current_commit():
        (tree / "src" / "baton" / "_commit.txt").write_text(f"{commit}\n")


def current_commit() -> str:
    """Of this checkout. An installed wheel has no other way to know it (runtime/processes/build_info.py)."""
    git = shutil.which("git")
    if git is None:
        return ""
    done = subprocess.run([git, "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def package(kind: str, tree: Path, out: Path, *options: str) -> Path:
    """What `python -m build --no-isolation` does, with setuptools alone."""
    shutil.rmtree(tree / "build", ignore_errors=True)  # setuptools would put the files of the last wheel into this one
    command = [sys.executable, "-c", BUILD, kind, str(out), json.dumps(options)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"setuptools cannot build the {kind}:\n{done.stderr[-2000:]}")
    return out / done.stdout.splitlines()[-1]


def build_machine_wheel(machine: str, variants: Sequence[Variant], tree: Path, out: Path) -> Path:
    folder = tree / "src" / "baton" / "native" / prebuilt.FOLDER.name
    shutil.rmtree(folder, ignore_errors=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda variant: compile_kernels(variant, machine, folder), variants))
    wheel = package("wheel", tree, out, "--plat-name", f"manylinux_{GLIBC.replace('.', '_')}_{machine}")
    shutil.rmtree(folder)
    return wheel


def build_release(out: Path, machines: Sequence[str], names: Sequence[str]) -> list[Path]:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch, "tree")
        copy_sources(tree)
        made = [package("sdist", tree, out), package("wheel", tree, out)]
        return made + [build_machine_wheel(each, variants_of(each, names), tree, out) for each in machines]


def compile_in_place() -> None:
    """The best kernels that this machine runs."""
    shutil.rmtree(prebuilt.FOLDER, ignore_errors=True)
    for variant in supported_variants():
        print(compile_kernels(variant, platform.machine(), prebuilt.FOLDER))
        with suppress(build.NoCompiler):  # the system does not allow these instructions
            load_variant(variant)
            return
    raise SystemExit("this machine runs none of the kernels")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--machines", default=",".join(MACHINES), help="comma separated")
    parser.add_argument("--variants", default="", help="only these kernels, comma separated (native/variants.py)")
    parser.add_argument("--in-place", action="store_true", help="only the kernels of this machine, into this checkout")
    options = parser.parse_args()
    if options.in_place:
        compile_in_place()
        return
    names = [name for name in options.variants.split(",") if name]
    for path in build_release(options.out.resolve(), options.machines.split(","), names):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")


if __name__ == "__main__":
    main()
