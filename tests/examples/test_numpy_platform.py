"""The platform plug-in of examples/: the suite that its author runs, a server on it, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from example_package import EXAMPLES, install_example

from baton.config import WorkerConfig
from baton.errors import InvalidConfig
from baton.worker.platforms import plug_ins
from baton.worker.platforms.choose import choose

FOLDER = Path("/")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(install_example(tmp_path, "numpy_platform"))
    return tmp_path


@pytest.mark.parametrize("cases", ["greedy and None", pytest.param("", marks=pytest.mark.slow)], ids=["one", "all"])
def test_its_own_test_file_runs_the_conformance_suite(tmp_path, cases):
    """As its author runs it. tests/testing has all cases, beside the platforms of this repository."""
    pytest.importorskip("torch", reason="the suite's oracle")
    path = os.pathsep.join([str(install_example(tmp_path, "numpy_platform")), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-rA",
        "-k",
        cases,
        str(EXAMPLES / "numpy_platform"),
    ]
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert "PASSED" in ran.stdout


def test_the_name_is_a_device(installed):
    platform, resolved = choose(WorkerConfig(device="numpy"), FOLDER)
    assert (platform.name, resolved.device, resolved.dtype, resolved.kv_memory_gib) == ("numpy", "numpy", "float32", 0.5)


def test_a_device_without_a_plug_in_names_those_that_are_there(installed):
    with pytest.raises(InvalidConfig, match=r"must be one of auto, cpu, cuda \(by entry points of baton.platforms: numpy\)"):
        WorkerConfig(device="numpi")


def test_its_settings_are_refused_before_weights_are_read(installed):
    with pytest.raises(InvalidConfig, match="--device numpy computes in float32"):
        choose(WorkerConfig(device="numpy", quantization="int8"), FOLDER)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:open_it", "no_such_module:open_it cannot be opened"),
        ("numpy_platform:rotated", "numpy_platform:rotated cannot be opened: TypeError"),
        ("wrong_plug_ins:other_name", "calls its device numpy and itself other"),
        ("wrong_plug_ins:dtype_auto", "leaves dtype auto"),
        ("wrong_plug_ins:private_pool", "no other process can read its KV pool"),
    ],
)
def test_what_a_plug_in_forgets_is_a_wrong_setting(installed, monkeypatch, value, message):
    (installed / "wrong_plug_ins.py").write_text(WRONG)
    config = WorkerConfig(device="numpy", pool="announced")
    monkeypatch.setattr(plug_ins, "entry_points", lambda **_: (EntryPoint("numpy", value, "baton.platforms"),))
    with pytest.raises(InvalidConfig, match=message):
        choose(config, FOLDER)


def test_two_packages_with_one_name_are_refused(installed, monkeypatch):
    one = EntryPoint("numpy", "numpy_platform:open_numpy", "baton.platforms")
    monkeypatch.setattr(plug_ins, "entry_points", lambda **_: (one, one))
    with pytest.raises(InvalidConfig, match="2 packages bring this name"):
        choose(WorkerConfig(device="numpy"), FOLDER)


WRONG = """
from dataclasses import replace
from types import SimpleNamespace
from numpy_platform import open_numpy

def other_name(config, path):
    return SimpleNamespace(name="other"), open_numpy(config, path)[1]

def dtype_auto(config, path):
    return open_numpy(config, path)[0], replace(config, dtype="auto")

def private_pool(config, path):
    platform, resolved = open_numpy(config, path)
    platform.shares_pools = False
    return platform, resolved
"""
