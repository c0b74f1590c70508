"""From C source to a loaded library: compiled once a machine, at first use, with the system's compiler.

The file's name is a hash of everything that went into it (source, flags, compiler, processor), so a file that exists is
the right one. It is written under another name and renamed: processes that start together may all compile, and none of
them ever loads half a file.

OpenMP comes from torch: a second runtime would bring a second set of threads, and the two would spin against each other.
So the library is linked against none, and finds the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from baton.errors import EngineError

FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC")
VARIANTS = (("-march=native", "-fopenmp"), ("-march=native",), ())
"""Tried in this order: clang without libomp refuses -fopenmp, some compilers know no -march=native."""
COMPILE_SECONDS_MAX = 120.0


class NoCompiler(EngineError):
    """No C compiler, or none that can compile our source. The message says which."""


def load_library(source: Path, cache: Path | None = None) -> ctypes.CDLL:
    compiler = find_compiler()
    folder = cache or cache_folder()
    errors = []
    for variant in VARIANTS:
        if "-fopenmp" in variant and not share_openmp():
            continue
        try:
            return ctypes.CDLL(str(compiled(source, compiler, (*FLAGS, *variant), folder)))
        except (OSError, subprocess.SubprocessError) as error:
            errors.append(f"{' '.join(variant)}: {getattr(error, 'stderr', None) or error}")
    raise NoCompiler(f"{source.name} cannot be compiled with {' '.join(compiler)}: {'; '.join(errors)}")


def find_compiler() -> list[str]:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    raise NoCompiler("no C compiler: neither $CC nor cc, gcc or clang is there")


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "baton" / "kernels"


def compiled(source: Path, compiler: list[str], flags: tuple[str, ...], folder: Path) -> Path:
    """The library in `folder`, made if it is not there yet."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_SECONDS_MAX).stdout
    everything = [source.read_bytes(), " ".join(flags).encode(), version, processor().encode()]
    target = folder / f"{source.stem}-{sha256(b'|'.join(everything)).hexdigest()[:20]}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        made, unlinked = Path(scratch, target.name), Path(scratch, "unlinked.o")
        # Two steps, so that -fopenmp is seen by the compiler and not by the linker.
        for command in ([*flags, "-c", str(source), "-o", str(unlinked)], ["-shared", str(unlinked), "-o", str(made), "-lm"]):
            subprocess.run([*compiler, *command], capture_output=True, check=True, text=True, timeout=COMPILE_SECONDS_MAX)
        made.replace(target)
    return target


def processor() -> str:
    """What -march=native depends on. A home folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    words = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(words)}))


def share_openmp() -> bool:
    """Make the OpenMP runtime that torch has loaded visible to libraries that are loaded after it."""
    import torch  # noqa: F401  the runtime comes with it

    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return False
    for path in dict.fromkeys(line.split()[-1] for line in maps.splitlines() if "/lib" in line):
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
            return True
    return False
