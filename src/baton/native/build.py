"""Compiles the C source to a shared library: once per machine, at first use, with the system's compiler.

Available compilers are tried until one succeeds. The library is written under another name and renamed: processes that start
together may all compile, and none loads a partial file. native/build_cache.py keeps the result.
"""

from __future__ import annotations

import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from pathlib import Path

from baton.errors import EngineError
from baton.native import build_cache
from baton.native.variants import Variant

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-shared")
COMPILE_SECONDS_MAX = 300.0

Compiler = list[str]
"""Compiler: a program and its first arguments."""

_announce: ContextVar[Callable[[str], None]] = ContextVar("announce", default=log.info)


@contextmanager
def compilation_announced(announce: Callable[[str], None]) -> Iterator[None]:
    """Call `announce` with a sentence before a compilation within the block. Without it compilations are logged."""
    token = _announce.set(announce)
    try:
        yield
    finally:
        _announce.reset(token)


class NoCompiler(EngineError):
    """No C compiler, or none that can compile our source; the message has the reason."""


class NoPlace(NoCompiler):
    """The folder cannot be written to."""


def find_compilers() -> list[Compiler]:
    """Available compilers, $CC first. A program with several names counts once. Raises NoCompiler."""
    found: dict[tuple[str, ...], Compiler] = {}
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        words = shlex.split(name)
        if words and (path := shutil.which(words[0])):
            found.setdefault((os.path.realpath(path), *words[1:]), words)
    if not found:
        raise NoCompiler("no C compiler: neither $CC nor cc, gcc or clang is there")
    return list(found.values())


def find_compiler() -> Compiler:
    """The first available compiler. Raises NoCompiler."""
    return find_compilers()[0]


def cache_folder() -> Path:
    try:
        return build_cache.user_cache("kernels")
    except RuntimeError as error:  # a user without an entry in the system, as in many containers
        raise NoPlace("no place for compiled kernels: there is no home folder, and XDG_CACHE_HOME is not set") from error


def temporary_folder() -> Path:
    """The folder for builds if the cache is not writable, as in a container with a read-only file system. Only its owner can
    write there, and the user's next process finds it."""
    folder = Path(tempfile.gettempdir(), f"baton-kernels-{os.geteuid()}")
    if folder.is_symlink():
        raise NoPlace(f"{folder} is a link, which anybody may have made: remove it")
    return folder


def build_library(variant: Variant, folder: Path | None = None, compiler: Compiler | None = None) -> Path:
    """The library in `folder`, compiled if missing. `compiler`: use only this one. Raises NoCompiler."""
    compilers = [compiler] if compiler else find_compilers()
    try:
        return _built(variant, folder or cache_folder(), compilers)
    except NoPlace as error:
        if folder is not None:
            raise
        with suppress(NoPlace):  # the error of the cache is more informative
            path = _built(variant, temporary_folder(), compilers)
            log.warning("%s; until then they are in %s", error, path.parent)
            return path
        raise


def _built(variant: Variant, folder: Path, compilers: list[Compiler]) -> Path:
    """The compiled library of this variant: from the cache, else built by the first compiler that can. Raises NoCompiler."""
    try:
        build_cache.open_folder(folder)
    except OSError as error:
        raise _no_place(variant, folder, error) from error
    except build_cache.Untrusted as error:
        raise NoCompiler(str(error)) from error  # not worked around: an operator must check the folder
    stems = [f"baton-{variant.name}-{_fingerprint(variant, each)}" for each in compilers]
    for stem in stems:
        if (path := build_cache.find(folder, stem)) is not None:
            return path
    _announce.get()("compiling kernels for this CPU (once, about 20 s)")
    log.debug("compiling the %s kernels into %s", variant.name, folder)
    errors = []
    for each, stem in zip(compilers, stems, strict=True):
        try:
            path = _compile(variant, folder, each, stem)
        except NoPlace:
            raise
        except NoCompiler as error:
            errors.append(str(error))
        else:
            build_cache.tidy(folder, variant.name)
            return path
    raise NoCompiler("; ".join(errors))


def _compile(variant: Variant, folder: Path, compiler: Compiler, stem: str) -> Path:
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=build_cache.SCRATCH) as scratch:
            made = Path(scratch, "kernels.so")
            flags = [*FLAGS, *variant.compiler_flags]
            command = [*compiler, *flags, str(SOURCES / "decoder.c"), "-o", str(made), "-lpthread"]
            subprocess.run(command, capture_output=True, check=True, text=True, timeout=COMPILE_SECONDS_MAX)
            return build_cache.install(made, folder, stem)
    except subprocess.CalledProcessError as error:
        raise NoCompiler(f"{' '.join(compiler)} cannot compile the {variant.name} kernels: {error.stderr[-400:]}") from error
    except subprocess.SubprocessError as error:
        raise NoCompiler(f"the {variant.name} kernels cannot be compiled into {folder}: {error}") from error
    except OSError as error:
        raise _no_place(variant, folder, error) from error


def _no_place(variant: Variant, folder: Path, error: OSError) -> NoPlace:
    why = error.strerror or str(error)
    return NoPlace(f"the {variant.name} kernels cannot be put into {folder} ({why}): set XDG_CACHE_HOME to a folder of yours")


def _fingerprint(variant: Variant, compiler: Compiler) -> str:
    """Name of the compiler by its file's size and time: asking for its version would cost a process per start."""
    path = shutil.which(compiler[0])
    stat = os.stat(path) if path else None
    parts = [file.read_bytes() for file in sorted(SOURCES.iterdir())]
    how = [*compiler, *FLAGS, *variant.compiler_flags, platform.machine(), f"{stat.st_size} {stat.st_mtime_ns}" if stat else ""]
    return sha256(b"|".join([*parts, " ".join(how).encode()])).hexdigest()[:20]
