"""From C source to a file that can be loaded: compiled once a machine, at first use, with the system's compiler.

The file's name is a hash of everything that went into it (sources, flags, compiler), so a file that exists is the right
one. It is written under another name and renamed: processes that start together may all compile, and none of them ever
loads half a file.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from baton.errors import EngineError
from baton.native.variants import Variant

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-shared")
COMPILE_SECONDS_MAX = 300.0


class NoCompiler(EngineError):
    """No C compiler, or none that can compile our source. The message says which."""


def find_compiler() -> list[str]:
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(name)
        if words and shutil.which(words[0]):
            return words
    raise NoCompiler("no C compiler: neither $CC nor cc, gcc or clang is there")


def cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "baton" / "kernels"
    except RuntimeError as error:  # a user whom the system does not know, as in many a container
        raise NoCompiler("no place for compiled kernels: there is no home folder, and XDG_CACHE_HOME is not set") from error


def compiled(variant: Variant, folder: Path | None = None, compiler: list[str] | None = None) -> Path:
    """The library in `folder`, made if it is not there yet."""
    folder = folder or cache_folder()
    compiler = compiler or find_compiler()
    target = folder / f"baton-{variant.name}-{_fingerprint(variant, compiler)}.so"
    if target.exists():
        return target
    log.info("compiling the %s kernels (once on this machine, some seconds)", variant.name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
            made = Path(scratch, target.name)
            command = [*compiler, *FLAGS, *variant.flags, str(SOURCES / "decoder.c"), "-o", str(made), "-lm", "-lpthread"]
            subprocess.run(command, capture_output=True, check=True, text=True, timeout=COMPILE_SECONDS_MAX)
            made.replace(target)
    except subprocess.CalledProcessError as error:
        raise NoCompiler(f"{' '.join(compiler)} cannot compile the {variant.name} kernels: {error.stderr[-400:]}") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise NoCompiler(f"the {variant.name} kernels cannot be compiled into {folder}: {error}") from error
    return target


def _fingerprint(variant: Variant, compiler: list[str]) -> str:
    """The compiler by its file's size and time: asking it for its version would cost every start a process."""
    path = shutil.which(compiler[0])
    stat = os.stat(path) if path else None
    parts = [file.read_bytes() for file in sorted(SOURCES.iterdir())]
    words = [*compiler, *FLAGS, *variant.flags, f"{stat.st_size} {stat.st_mtime_ns}" if stat else ""]
    return sha256(b"|".join([*parts, " ".join(words).encode()])).hexdigest()[:20]
