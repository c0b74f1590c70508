"""Shared by the runtime tests: loops that end, and pairs of channels."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "chaos")]  # the workers that the tests start, and chaos_model.py

T = TypeVar("T")


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run it; what hangs fails here and not in CI's time-out."""
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


@pytest.fixture(autouse=True)
def no_descriptor_is_kept():
    import gc

    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "file descriptors are left open"


@pytest.fixture
def child_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this process find our sources and the modules beside this file."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE.parent.parent / "src"), str(HERE)]))
