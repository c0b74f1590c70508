"""Compiled kernels are code: what is kept is whole, ours alone, and not kept for ever."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from test_build import ANY, compiler, own_cache, sources  # noqa: F401

from baton.native import build_cache
from baton.native.build import NoCompiler, build_library, cache_folder, find_compilers
from baton.native.library import load_file
from baton.native.variants import Variant

pytestmark = pytest.mark.usefixtures("sources", "own_cache")


def script(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# Compilers


def test_the_next_compiler_is_tried_when_one_cannot_do_it(monkeypatch, tmp_path):
    broken = script(tmp_path / "bin", "broken-cc", "echo no such instructions >&2; exit 1")
    monkeypatch.setenv("CC", str(broken))
    assert load_file(ANY).baton_allow() == 0
    assert len(find_compilers()) >= 2


def test_what_the_second_one_made_is_found_again(monkeypatch, tmp_path):
    """And the first is not asked again, which would cost every start a failed compilation."""
    calls = tmp_path / "calls"
    monkeypatch.setenv("CC", str(script(tmp_path / "bin", "broken-cc", f"echo x >> {calls}; exit 1")))
    first = build_library(ANY)
    assert build_library(ANY) == first
    assert calls.read_text() == "x\n"


def test_when_none_can_do_it_each_says_why(monkeypatch, tmp_path):
    for name in ("cc", "gcc", "clang"):
        script(tmp_path / "bin", name, f"echo {name} is broken >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(NoCompiler) as caught:
        build_library(ANY)
    assert [f"{name} is broken" in str(caught.value) for name in ("cc", "gcc", "clang")] == [True] * 3


def test_a_compiler_under_two_names_is_one(monkeypatch, tmp_path):
    real = script(tmp_path / "bin", "gcc", "exit 1")
    (tmp_path / "bin" / "cc").symlink_to(real)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)
    assert find_compilers() == [["cc"]]


# Whole


@pytest.mark.parametrize("damage", ["cut short", "one bit", "empty"])
def test_a_damaged_library_is_made_again(damage):
    path = build_library(ANY)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 1
    path.write_bytes({"cut short": whole[: len(whole) // 2], "one bit": bytes(changed), "empty": b""}[damage])
    assert load_file(ANY).baton_allow() == 0
    assert build_library(ANY).read_bytes() == whole


def test_a_library_that_cannot_be_loaded_is_made_again():
    """Whole, as its name says, and still nothing that this machine loads."""
    path = build_library(ANY)
    stem = path.name.rsplit("-", 1)[0]
    path.unlink()
    strange = path.parent / "strange"
    strange.write_bytes(b"a library of another machine")
    build_cache.install(strange, path.parent, stem)
    assert load_file(ANY).baton_allow() == 0
    assert [file.name for file in path.parent.iterdir()] == [path.name]


# Ours


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_for_us_alone():
    before = os.umask(0)
    try:
        path = build_library(ANY)
    finally:
        os.umask(before)
    assert mode(path.parent) == 0o700
    assert mode(path) & 0o077 == 0


def test_a_folder_that_others_may_write_to_is_closed_to_them():
    cache_folder().mkdir(parents=True)
    cache_folder().chmod(0o777)
    build_library(ANY)
    assert mode(cache_folder()) == 0o700


def test_a_library_that_others_may_write_to_is_made_again():
    path = build_library(ANY)
    path.chmod(0o722)
    assert build_library(ANY) == path
    assert mode(path) == 0o700


def test_a_link_is_not_followed(tmp_path):
    path = build_library(ANY)
    elsewhere = tmp_path / "elsewhere.so"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert not build_library(ANY).is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_is_somebody_else_s_is_refused():
    path = build_library(ANY)
    os.chown(path, 12345, 12345)
    assert build_library(ANY).stat().st_uid == 0
    os.chown(path.parent, 12345, 12345)
    with pytest.raises(NoCompiler, match=r"belongs to user 12345.*XDG_CACHE_HOME"):
        build_library(ANY)


# Not for ever


def test_old_builds_go_and_those_in_use_stay():
    builds = [Variant("any", "", frozenset(), (f"-DN={number}",), "") for number in range(build_cache.BUILDS_KEPT)]
    other = build_library(Variant("other", "", frozenset(), (), ""))
    paths = [build_library(each) for each in builds]
    for age, path in enumerate(paths):
        os.utime(path, (1000 - age, 1000 - age))
    assert build_library(builds[-1]) == paths[-1]  # the oldest, used again
    newest = build_library(Variant("any", "", frozenset(), ("-DN=99",), ""))
    assert {*cache_folder().iterdir()} == {newest, other, *paths} - {paths[-2]}


def test_what_a_killed_compiler_left_goes():
    left, fresh = cache_folder() / f"{build_cache.SCRATCH}old", cache_folder() / f"{build_cache.SCRATCH}new"
    for folder in (left, fresh):
        folder.mkdir(parents=True)
        (folder / "kernels.so").write_text("half")
    os.utime(left, (1000, 1000))
    build_library(ANY)
    assert not left.exists()
    assert fresh.exists()
