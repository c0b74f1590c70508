"""Compiling at first use: together, again, and where it cannot be done."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from rig import TINY, TINY_SEED, generate, make_pool, tiny_model

from baton.config import WorkerConfig
from baton.kvpool.layout import KVKind
from baton.models.loaders.dummy import DummyWeights
from baton.models.open import OpenedModel
from baton.native import build, build_cache
from baton.native.build import NoCompiler, build_library, cache_folder, find_compiler
from baton.native.library import load_best, load_variant
from baton.native.variants import VARIANTS, Variant
from baton.worker.platforms.cpu import CpuPlatform

ANY = Variant("any", "", frozenset(), ("-O0",), "for every machine")
SMALL_SOURCE = """
#include "answer.h"
#if defined(FORBIDDEN)
#define ANSWER -1
#endif
int baton_allow(void) { return ANSWER; }
"""


@pytest.fixture
def compiler() -> list[str]:
    try:
        return find_compiler()
    except NoCompiler as error:
        pytest.skip(str(error))


@pytest.fixture
def sources(monkeypatch, tmp_path, compiler) -> Path:
    """Something that compiles in a moment, in place of the kernels."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "decoder.c").write_text(SMALL_SOURCE)
    (folder / "answer.h").write_text("#define ANSWER 0\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    return folder


class SmallLibrary:
    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.allow = ctypes.CDLL(str(build_library(variant))).baton_allow


@pytest.fixture
def own_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load_variant.cache_clear()
    load_best.cache_clear()
    yield tmp_path / "cache" / "baton" / "kernels"
    load_variant.cache_clear()
    load_best.cache_clear()


# Files


def test_processes_that_start_together_all_get_a_whole_library(sources, tmp_path):
    folder = tmp_path / "cache"
    code = f"""
import ctypes
from pathlib import Path
from baton.native import build
from baton.native.variants import Variant
build.SOURCES = Path({str(sources)!r})
path = build.build_library(Variant("any", "", frozenset(), {ANY.compiler_flags!r}, ""), Path({str(folder)!r}))
print(path.name, ctypes.CDLL(str(path)).baton_allow())
"""
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    (said,) = {child.communicate()[0].strip() for child in children}
    (path,) = folder.iterdir()  # one library, no scratch folder left
    assert said == f"{path.name} 0"
    before = path.stat().st_ino
    assert build_library(ANY, folder) == path
    assert path.stat().st_ino == before


def test_the_file_s_name_says_what_went_into_it(monkeypatch, sources, tmp_path, compiler):
    """Sources, flags and compiler: whatever changes, the old file is not taken for the new one."""
    monkeypatch.setattr(build_cache, "BUILDS_KEPT", 99)
    wrapper = tmp_path / "cc"
    wrapper.write_text(f'#!/bin/sh\nexec {compiler[0]} "$@"\n')
    wrapper.chmod(0o755)
    folder, made = tmp_path / "cache", set[Path]()

    def compile_anew(variant: Variant, with_compiler: list[str]) -> None:
        path = build_library(variant, folder, with_compiler)
        assert path not in made
        assert path == build_library(variant, folder, with_compiler)
        made.add(path)

    compile_anew(ANY, compiler)
    compile_anew(Variant("any", "", frozenset(), ("-O1",), ""), compiler)
    compile_anew(ANY, [str(wrapper)])
    os.utime(wrapper, ns=(1, 1))  # another compiler under the same name
    compile_anew(ANY, [str(wrapper)])
    (sources / "answer.h").write_text("#define ANSWER 2\n")  # an included file counts as well
    compile_anew(ANY, compiler)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DMORE"))
    compile_anew(ANY, compiler)
    assert {*folder.iterdir()} == made


def test_source_that_does_not_compile_says_why(sources, tmp_path):
    (sources / "decoder.c").write_text("int f(void) { return nonsense; }")
    with pytest.raises(NoCompiler, match="nonsense"):
        build_library(ANY, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_compiler_that_hangs_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "COMPILE_SECONDS_MAX", 0.05)
    with pytest.raises(NoCompiler, match="timed out"):
        build_library(ANY, tmp_path, ["sh", "-c", "sleep 100"])


def test_the_sources_are_in_the_package():
    """A wheel has the files that pyproject.toml names, and no others."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    patterns = tomllib.loads(pyproject.read_text())["tool"]["setuptools"]["package-data"]["baton"]
    package = build.SOURCES.parents[1]
    for source in build.SOURCES.iterdir():
        assert any(source.relative_to(package).match(pattern) for pattern in patterns), source


# Where


def test_the_cache_is_where_the_system_wants_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "baton" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/baton/kernels")


def test_nobody_s_home_is_no_place_to_compile_into(monkeypatch):
    """A container may run as a user that the system has never heard of."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    monkeypatch.setattr(build, "temporary_folder", lambda: Path("/dev/null/kernels"))
    with pytest.raises(NoCompiler, match="home"):
        build_library(ANY, compiler=["true"])


@pytest.mark.parametrize("cache", ["/dev/null", None])
def test_without_a_cache_they_are_kept_where_temporary_files_are(monkeypatch, sources, tmp_path, caplog, cache):
    """As in a container whose file system may only be read."""
    if cache is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = build_library(ANY)
    assert path.parent == tmp_path / f"baton-kernels-{os.geteuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert "XDG_CACHE_HOME" in caplog.text
    assert build_library(ANY) == path, "the next process finds it"


def test_a_place_for_temporary_files_that_somebody_else_made_is_not_used(monkeypatch, sources, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"baton-kernels-{os.geteuid()}"
    (tmp_path / "theirs").mkdir()
    place.symlink_to(tmp_path / "theirs")
    with pytest.raises(NoCompiler, match="XDG_CACHE_HOME"):
        build_library(ANY)
    place.unlink()
    place.mkdir()
    monkeypatch.setattr(build_cache, "_trusted_owner", lambda found: False)
    with pytest.raises(NoCompiler, match="XDG_CACHE_HOME"):
        build_library(ANY)
    assert not list(place.iterdir())
    assert not list((tmp_path / "theirs").iterdir())


def test_no_compiler_is_found_out(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(NoCompiler, match="no C compiler"):
        find_compiler()


def test_the_environment_s_compiler_comes_first(monkeypatch):
    monkeypatch.setenv("CC", "sh -e")
    assert find_compiler() == ["sh", "-e"]


# What becomes of it


def opened() -> OpenedModel:
    return OpenedModel(Path(), TINY, DummyWeights(TINY, TINY_SEED))


@pytest.fixture(params=["no compiler", "no place to write to"])
def hopeless(request, monkeypatch, own_cache, tmp_path) -> str:
    """A machine where nothing can be compiled, and a word of what it should say."""
    if request.param == "no compiler":
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CC", "")
        return "no C compiler"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # root may write anywhere, but not into a file
    monkeypatch.setattr(build, "temporary_folder", lambda: tmp_path / "file" / "kernels")
    return "set XDG_CACHE_HOME to a folder of yours"


def test_torch_does_it_where_nothing_can_be_compiled(hopeless, caplog):
    with caplog.at_level(logging.WARNING):
        loaded = CpuPlatform().load(opened(), WorkerConfig(quantization="none", threads=1))
    assert "the model runs in torch" in caplog.text
    assert hopeless in caplog.text
    assert loaded.kv == KVKind("float32")
    prompts = {"a": [1, 2, 3, 4, 5], "b": [9, 8]}
    in_torch = generate(tiny_model(compute="torch"), prompts, max_tokens=4)
    assert generate(tiny_model(), prompts, max_tokens=4) == in_torch


def test_whoever_insists_on_native_is_told_why_not(hopeless):
    with pytest.raises(NoCompiler, match=hopeless):
        CpuPlatform().load(opened(), WorkerConfig(compute="native"))


def test_torch_is_not_even_asked_for_a_compiler(hopeless, caplog):
    CpuPlatform().load(opened(), WorkerConfig(compute="torch", quantization="none", threads=1))
    assert not caplog.text


def test_a_variant_that_cannot_be_used_makes_way_for_the_next(monkeypatch, sources, own_cache, caplog):
    """The compiler is too old for one, the system forbids the next."""
    too_old, forbidden = (
        Variant(name, "", frozenset(), flags, name)
        for name, flags in (("too-old", ("-mno-such-words",)), ("forbidden", ("-DFORBIDDEN",)))
    )
    monkeypatch.setattr("baton.native.library.supported_variants", lambda: [too_old, forbidden, ANY])
    monkeypatch.setattr("baton.native.library.Library", SmallLibrary)
    with caplog.at_level(logging.WARNING):
        assert load_best().variant is ANY
    assert [word in caplog.text for word in ("no-such-words", "does not allow the forbidden")] == [True] * 2


def test_the_name_of_the_variant_is_told():
    model = tiny_model(compute="native")
    names = {f"native ({variant.name})" for variant in VARIANTS}
    assert model.loaded.with_pool(make_pool(model, blocks=1, block_size=4)).name in names
