"""Every byte of a file is asked for once, before it is needed, and none beyond its end."""

from __future__ import annotations

import mmap

import pytest

from baton.models.loaders import read_ahead
from baton.models.loaders.read_ahead import ReadAhead


class Mapped:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.asked: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self.nbytes

    def madvise(self, advice: int, begin: int, length: int) -> None:
        assert advice == mmap.MADV_WILLNEED
        assert begin % mmap.PAGESIZE == 0
        assert length <= 128 << 10, "of more at once Linux would fetch only the beginning"
        self.asked.append((begin, begin + length))


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch):
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 4 * mmap.PAGESIZE)


def test_a_file_in_order_is_asked_for_once():
    file = Mapped(100 * mmap.PAGESIZE + 7)
    ahead, at = ReadAhead(file), 50
    while at < file.nbytes:
        ahead.reach(at, min(5000, file.nbytes - at))
        assert file.asked[-1][1] >= min(at + 5000, file.nbytes), "what is read now is asked for"
        at += 5000
    assert file.asked[0][0] == 0
    assert file.asked[-1][1] == file.nbytes
    assert all(late[0] <= early[1] < late[1] for early, late in zip(file.asked, file.asked[1:], strict=False))


def test_far_ahead_in_small_pieces(monkeypatch):
    """One call for 256 MiB fetched 8 of them (what the disk's read-ahead was set to), and a cold start waited for the rest."""
    monkeypatch.setattr(read_ahead, "AHEAD_BYTES", 1 << 20)
    file = Mapped((1 << 20) + 5000)
    ReadAhead(file).reach(0, 5000)
    assert [begin for begin, _ in file.asked] == list(range(0, file.nbytes, 128 << 10))
    assert file.asked[-1][1] == file.nbytes


def test_what_lies_before_is_not_asked_for_again():
    file = Mapped(100 * mmap.PAGESIZE)
    ahead = ReadAhead(file)
    ahead.reach(50 * mmap.PAGESIZE, 10)
    asked = len(file.asked)
    ahead.reach(0, 10)
    assert len(file.asked) == asked


def test_a_system_that_cannot_be_asked_will_do(tmp_path):
    path = tmp_path / "some"
    path.write_bytes(b"x" * 10)
    with path.open("rb") as file:
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    ReadAhead(buffer).reach(0, 10)
    buffer.close()
