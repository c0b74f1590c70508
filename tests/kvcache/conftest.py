import gc
import os
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "trust"))  # certificates.py

from storage_rig import Rig

from baton.kvcache.storage.files import FileBackend


@pytest.fixture
def no_descriptor_is_kept():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before, "file descriptors are left open"


@pytest.fixture
def folder():
    """In memory where that is possible: thousands of small files are slow on a disk that others use."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as made:
        yield Path(made)


@pytest.fixture
def rig(folder):
    return Rig(folder / "kv")


@pytest.fixture
def make_files():
    def make(rig, quota_bytes=2**30):
        return FileBackend(rig.root, rig.layout, quota_bytes)

    return make
