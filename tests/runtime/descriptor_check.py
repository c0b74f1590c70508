"""Every test closes the descriptors that it opens."""

from __future__ import annotations

import gc
import os

import pytest


@pytest.fixture(autouse=True)
def no_descriptor_is_kept():
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2, "file descriptors are left open"
