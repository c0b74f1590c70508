"""Shared by the runtime tests: pairs of sockets, children that find our modules, and no descriptor left open."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "chaos"), str(HERE.parent / "trust")]  # workers, chaos_model.py, certificates.py

from descriptor_check import no_descriptor_is_kept  # noqa: E402, F401


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


@pytest.fixture
def child_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this process find our sources and the modules beside this file."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent.parent / "src"), str(HERE)]))
