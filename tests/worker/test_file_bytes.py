"""Bytes of mapped files by reading: the same as in the map, whatever happened to the name."""

import mmap
import os
from types import SimpleNamespace

import numpy as np
import pytest

from baton.errors import ModelFileBroken
from baton.worker.cuda.file_bytes import FileBytes


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(1).bytes(100_000))
    with path.open("rb") as opened:
        return SimpleNamespace(
            path=path, stat=os.fstat(opened.fileno()), buffer=mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        )


def read(files, content):
    target = np.zeros(len(content), np.uint8)
    source = FileBytes(files)
    source.read(content, target)
    source.close()
    return target


@pytest.mark.parametrize(("begin", "end"), [(0, 100_000), (17, 17), (4099, 50_001), (99_999, 100_000)])
def test_what_is_in_a_file(file, begin, end):
    content = np.frombuffer(file.buffer, np.uint8)[begin:end]
    assert np.array_equal(read([file], content), content)


def test_what_is_in_no_file(file):
    content = np.arange(1000).astype(np.uint8)
    assert np.array_equal(read([file], content), content)
    assert np.array_equal(read([], content), content)


def test_a_file_that_was_replaced_is_read_from_the_map(file):
    content = np.frombuffer(file.buffer, np.uint8)
    wanted = content.copy()
    other = file.path.with_name("other")
    other.write_bytes(b"x" * 100_000)
    other.replace(file.path)
    assert np.array_equal(read([file], content), wanted)


def test_a_file_that_became_shorter(file):
    content = np.frombuffer(file.buffer, np.uint8)
    os.truncate(file.path, 50_000)
    with pytest.raises(ModelFileBroken, match="became shorter"):
        read([file], content)
