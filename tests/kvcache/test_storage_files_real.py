"""The file backend and the real world: a disk that is really full, writers that are really killed."""

import os
import random
import signal
import subprocess
import sys
import textwrap
from contextlib import suppress
from time import time

import pytest
from storage_rig import Rig, layout_of

from baton.errors import StorageFailed
from baton.kvcache.storage.file_names import TEMPORARY_SECONDS_MAX
from baton.kvcache.storage.file_tools import FileListing, file_fault
from baton.kvcache.storage.files import FileBackend


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting needs more rights than this test has")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_is_full_is_a_typed_failure_and_makes_room(small_disk):
    rig = Rig(small_disk / "kv", block_bytes=20_000)
    backend = FileBackend(rig.root, rig.layout, 2**30)
    with pytest.raises(StorageFailed) as failed:
        rig.put(backend, range(1000))
    assert failed.value.reason == "full"
    assert 20 < failed.value.done < 60
    left = sum(rig.has(backend, [number]) for number in range(1000))
    assert 0 < left <= failed.value.done - 8, "a part was evicted"
    assert rig.put(backend, range(2000, 2003)) == rig.get(backend, range(2000, 2003)) == 3
    assert not list(rig.root.rglob("*.tmp"))


TURNS = 4 if os.environ.get("BATON_SLOW") else 2
WRITER = """
import sys
from pathlib import Path
from storage_rig import Rig
from baton.kvcache.storage.files import FileBackend

rig = Rig(Path(sys.argv[1]), block_bytes=300_000)
backend = FileBackend(rig.root, rig.layout, 40 * 2**20)
print("begun", flush=True)
for number in range(int(sys.argv[2]), 10**9):
    rig.put(backend, [number % 500])
"""


def test_writers_that_are_killed_leave_whole_objects_only(folder):
    """Two at a time on one directory, with a quota that makes them evict; killed at any moment."""
    root = folder / "kv"
    for turn in range(TURNS):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(WRITER), str(root), str(turn * 100 + place * 50)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for place in range(2)
        ]
        for writer in writers:
            assert writer.stdout.readline() == "begun\n"
        with suppress(subprocess.TimeoutExpired):
            writers[0].wait(random.Random(turn).random() / 2)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
    found = list(FileListing(root).objects(lambda done, total: None))
    assert found
    assert [entry.place for entry in found if file_fault(entry)] == []

    rig = Rig(root, block_bytes=300_000)
    for path in root.rglob("*.tmp"):
        os.utime(path, (time() - TEMPORARY_SECONDS_MAX - 60,) * 2)
    assert rig.put(FileBackend(root, layout_of(block_bytes=300_000), 2**21), range(600, 620)) == 20
    assert not list(root.rglob("*.tmp")), "the next writer tidies up after the dead"
