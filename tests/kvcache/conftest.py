import pytest
from storage_rig import Rig

from baton.kvcache.storage.files import FileBackend


@pytest.fixture
def rig(tmp_path):
    return Rig(tmp_path / "kv")


@pytest.fixture
def make_files(tmp_path):
    def make(rig, quota_bytes=2**30):
        return FileBackend(tmp_path / "kv", rig.layout, quota_bytes)

    return make
