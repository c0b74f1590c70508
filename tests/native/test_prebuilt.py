"""Kernels that a wheel carries: found where they fit, ignored where they do not, and with the bits of those compiled here."""

from __future__ import annotations

import importlib.util
import logging
import platform
import re
import shutil
import sys
from pathlib import Path

import pytest
from golden_model import runnable_variants
from test_build import ANY, SmallLibrary, compiler, own_cache, sources  # noqa: F401
from test_golden import check_bits

from baton.native import prebuilt
from baton.native.build import NoCompiler, build_library
from baton.native.library import Library, load_best, load_file
from baton.native.variants import VARIANTS, Variant, supported_variants

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import wheel

FORBIDDEN = Variant("best", "", frozenset(), ("-DFORBIDDEN",), "for no machine")


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """Where a wheel has its prebuilt kernels."""
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path / "prebuilt")
    prebuilt.FOLDER.mkdir()
    return prebuilt.FOLDER


@pytest.fixture
def shipped(folder, sources, own_cache, tmp_path) -> Path:  # noqa: F811
    """The wheel has a prebuilt library of ANY."""
    made = build_library(ANY, tmp_path / "elsewhere")
    return Path(shutil.copy(made, folder / prebuilt.file_name(ANY, made)))


@pytest.fixture
def no_compiler(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)


def test_a_library_of_the_wheel_is_loaded_without_a_compiler(shipped, own_cache, no_compiler):  # noqa: F811
    assert prebuilt.find(ANY) == shipped
    assert load_file(ANY).baton_allow() == 0
    assert not own_cache.exists(), "nothing is compiled"


def test_the_best_variant_that_the_wheel_has_is_taken_without_a_compiler(shipped, no_compiler, monkeypatch, caplog):
    monkeypatch.setattr("baton.native.library.Library", PrebuiltSmallLibrary)
    monkeypatch.setattr("baton.native.library.supported_variants", lambda: [FORBIDDEN, ANY])
    assert load_best().variant is ANY
    assert "no C compiler" in caplog.text  # why not the better one
    shipped.unlink()
    load_best.cache_clear()
    with pytest.raises(NoCompiler, match="no C compiler"):
        load_best()


class PrebuiltSmallLibrary(SmallLibrary):
    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.allow = load_file(variant).baton_allow


@pytest.mark.parametrize("changed", ["a source", "a flag", "the machine"])
def test_a_library_of_another_build_is_not_taken(shipped, sources, monkeypatch, changed):  # noqa: F811
    if changed == "a source":
        (sources / "answer.h").write_text("#define ANSWER 0 /* other */\n")
    elif changed == "a flag":
        monkeypatch.setattr("baton.native.build.FLAGS", ("-O1",))
    else:
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert prebuilt.find(ANY) is None


@pytest.mark.parametrize("damage", ["cut short", "not loadable"])
def test_a_library_that_cannot_be_used_is_compiled_here(shipped, own_cache, caplog, damage):  # noqa: F811
    """The one is noticed by its name, the other by the loader, as where a folder must not hold programs."""
    shipped.write_bytes(shipped.read_bytes()[:-100] if damage == "cut short" else b"of another C library")
    if damage == "not loadable":
        shipped.rename(shipped.with_name(prebuilt.file_name(ANY, shipped)))
    with caplog.at_level(logging.WARNING):
        assert load_file(ANY).baton_allow() == 0
    assert {"cut short": "damaged", "not loadable": "compiled here"}[damage] in caplog.text
    assert [path.suffix for path in own_cache.iterdir()] == [".so"]


# What `make wheel` compiles


needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs pip install ziglang")
BEST = supported_variants()[0].name


@needs_zig
@pytest.mark.parametrize(
    "name", [pytest.param(each.name, marks=() if each.name == BEST else pytest.mark.slow) for each in runnable_variants()]
)
def test_the_bits_are_those_of_every_compiler(folder, own_cache, name):  # noqa: F811
    variant = next(each for each in runnable_variants() if each.name == name)
    made = wheel.compile_kernels(variant, platform.machine(), folder)
    assert prebuilt.find(variant) == made
    check_bits(Library(variant))
    assert not own_cache.exists(), "nothing is compiled at the start"


@needs_zig
@pytest.mark.parametrize("machine", [pytest.param(each, marks=pytest.mark.slow) for each in wheel.MACHINES])
def test_every_variant_compiles_on_any_machine_and_needs_an_old_c_library_only(tmp_path, machine):
    variants = wheel.variants_of(machine)
    assert {each.name for each in variants} == {each.name for each in VARIANTS if each.machine in ("", machine)}
    for variant in variants:
        content = wheel.compile_kernels(variant, machine, tmp_path).read_bytes()
        versions = {tuple(map(int, found.split(b"."))) for found in re.findall(rb"GLIBC_([\d.]+)", content)}
        assert versions
        assert max(versions) <= (2, 17)


def test_zig_is_told_arm_s_architectures_by_its_own_names():
    flags = {each.name: wheel.zig_flags(each) for each in VARIANTS}
    assert flags["i8mm"] == ["-mcpu=generic+v8_2a+dotprod+i8mm"]
    assert flags["dotprod"] == ["-mcpu=generic+v8_2a+dotprod"]
    assert flags["avx2"] == list(next(each for each in VARIANTS if each.name == "avx2").compiler_flags)
