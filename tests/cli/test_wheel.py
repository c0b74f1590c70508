"""`make wheel`: the wheel of an architecture is installed where there is neither a compiler nor torch, and serves."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from command_rig import serving
from installed import ENVIRONMENT, install, wheel_tool

from baton import __version__
from baton.native.variants import supported_variants

pytestmark = [
    pytest.mark.slow,  # all variants are compiled, with another compiler
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs pip install ziglang"),
]
SMALL = ("--port", "0", "--kv-memory-gib", "0.05", "--threads", "1")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """With the kernels of this processor; test_prebuilt.py compiles those of the others."""
    tree, out = (tmp_path_factory.mktemp("wheel") / name for name in ("tree", "dist"))
    out.mkdir()
    wheel_tool.copy_sources(tree)
    return wheel_tool.build_machine_wheel(platform.machine(), supported_variants()[:1], tree, out)


def test_its_name_says_for_which_systems_it_is(wheel):
    """No tag of a Python version: one file for all of them."""
    assert wheel.name == f"baton_serve-{__version__}-py3-none-manylinux_2_17_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as archive:
        compiled = [name for name in archive.namelist() if name.endswith(".so")]
        commit = archive.read("baton/_commit.txt").decode().strip() if "baton/_commit.txt" in archive.namelist() else ""
    assert [name.split("-")[1] for name in compiled] == [supported_variants()[0].name]
    assert commit == wheel_tool.current_commit()


def test_it_serves_without_a_compiler(wheel, tmp_path, tiny_model):
    """PATH is empty, nothing may be compiled, and torch is not there."""
    baton = install(wheel, tmp_path)
    empty, cache = tmp_path / "bin", tmp_path / "cache"
    empty.mkdir()
    environment = {**ENVIRONMENT, "PATH": str(empty), "XDG_CACHE_HOME": str(cache)}
    environment.pop("CC", None)
    assert all(shutil.which(name, path=str(empty)) is None for name in ("cc", "gcc", "clang"))
    with serving(tiny_model, *SMALL, command=[str(baton)], environment=environment) as server:
        body = {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        assert server.post("/v1/chat/completions", body)["usage"]["completion_tokens"] >= 1
        code, err = server.interrupt()
    assert code == 0, err
    assert not list(cache.rglob("*.so"))
    version = subprocess.run(
        [baton, "--version"], env=environment, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert __version__ in version
    assert wheel_tool.current_commit()[:12] in version
