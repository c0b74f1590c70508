"""Shared by the runtime tests: pairs of sockets, children that find our modules, and no descriptor left open."""

from __future__ import annotations

import gc
import os
import socket
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "chaos")]  # the workers that the tests start, and chaos_model.py


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


@pytest.fixture(autouse=True)
def no_descriptor_is_kept():
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "file descriptors are left open"


@pytest.fixture
def child_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this process find our sources and the modules beside this file."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent.parent / "src"), str(HERE)]))
