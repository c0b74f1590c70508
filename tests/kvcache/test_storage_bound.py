"""The bound of `file:`: compared with a model, beside readers and writers, and where the process ends while it removes."""

from __future__ import annotations

import errno
import os
from random import Random

import pytest
from storage_rig import Rig, key_of, layout_of

from baton.kvcache.storage import files as files_module
from baton.kvcache.storage.file_tools import FileListing, file_fault
from baton.kvcache.storage.files import FileBackend

PAGE = 4096
QUOTA = 60 * PAGE
"""One group of folders, in which the order is exact."""


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def clock(monkeypatch):
    """A clock of the test's own, for times of last use too."""
    now, utime = [10**9], os.utime
    monkeypatch.setattr(files_module, "time", lambda: now[0])
    monkeypatch.setattr(files_module.os, "utime", lambda file, times=None: utime(file, times or (now[0], now[0])))
    return now


def left(rig: Rig, backend: FileBackend, numbers: range) -> set[int]:
    return {number for number in numbers if os.path.exists(backend.path_of(key_of(number)))}


@pytest.mark.parametrize("seed", range(4))
def test_what_was_used_last_stays_whatever_the_order_of_use(rig, make_files, clock, seed):
    """The model: a table of times of last use. Whatever is removed was used before everything that stays."""
    random, backend, used = Random(seed), make_files(rig, quota_bytes=QUOTA), dict[int, float]()
    for _ in range(400):
        clock[0] += 100  # longer than the precision of a time of last use
        number = random.randrange(120)
        if random.random() < 0.6:
            assert rig.put(backend, [number]) == 1
            os.utime(backend.path_of(key_of(number)), (clock[0], clock[0]))  # the file system has a clock of its own
            used[number] = clock[0]
        elif rig.get(backend, [number]):
            assert number in used
            used[number] = clock[0]
        stays = left(rig, backend, range(120))
        assert len(stays) * PAGE <= QUOTA
        gone = used.keys() - stays
        assert max((used[number] for number in gone), default=0) < min((used[number] for number in stays), default=1)
        used = {number: used[number] for number in stays}
    assert backend.counters()["evicted"] > 50


def test_a_block_that_is_being_read_is_read_whole_though_it_is_evicted(rig, make_files, monkeypatch):
    backend, other = make_files(rig, quota_bytes=QUOTA), make_files(rig, quota_bytes=QUOTA)
    rig.put(backend, range(3))
    real, evicted = os.preadv, []

    def preadv(*arguments):
        if not evicted:
            for number in range(100, 200):
                rig.put(other, [number])
            evicted.append(not os.path.exists(backend.path_of(key_of(0))))
        return real(*arguments)

    monkeypatch.setattr(files_module.os, "preadv", preadv)
    assert rig.get(backend, [0]) == 1, "its bytes are compared"
    assert evicted == [True]


def test_a_block_that_is_being_written_is_not_evicted(rig, make_files, monkeypatch):
    backend, other = make_files(rig, quota_bytes=QUOTA), make_files(rig, quota_bytes=QUOTA)
    real, depth = os.pwritev, []

    def pwritev(*arguments):
        written = real(*arguments)
        if not depth:
            depth.append(1)
            for number in range(100, 200):
                rig.put(other, [number])
            other._quota.evict(0, 10**9)
        return written

    monkeypatch.setattr(files_module.os, "pwritev", pwritev)
    assert rig.put(backend, [0]) == 1
    assert rig.get(backend, [0]) == 1


def dying(monkeypatch, calls: int) -> None:
    """The process is killed at this call of unlink: before it, or after it."""
    real, left_over = os.unlink, [calls]

    def unlink(path, **named):
        left_over[0] -= 1
        if left_over[0] == 0:
            raise Killed
        real(path, **named)

    monkeypatch.setattr(files_module.os, "unlink", unlink)


@pytest.mark.parametrize("calls", [1, 2, 4, 6])
def test_a_process_that_ends_while_it_evicts_leaves_a_right_store(rig, make_files, monkeypatch, calls):
    backend = make_files(rig, quota_bytes=QUOTA)
    for number in range(60):
        rig.put(backend, [number])
        os.utime(backend.path_of(key_of(number)), (number, number))
    dying(monkeypatch, calls)
    with pytest.raises(Killed):
        rig.put(backend, [60])
    monkeypatch.undo()
    next_one = make_files(rig, quota_bytes=QUOTA)
    assert left(rig, next_one, range(61)) == set(range(calls - 1, 60)), "the oldest are gone, each whole"
    require_right(rig, next_one, range(calls - 1, 60))
    assert rig.put(next_one, [60]) == rig.get(next_one, [60]) == 1
    assert len(rig.files()) * PAGE <= QUOTA


@pytest.mark.parametrize("calls", [1, 5, 20])
def test_a_command_that_ends_while_it_removes_leaves_a_right_store(rig, make_files, monkeypatch, calls):
    backend = make_files(rig)
    rig.put(backend, range(20))
    listing = FileListing(rig.root)
    dying(monkeypatch, calls)
    with pytest.raises(Killed):
        listing.remove(list(listing.objects(lambda done, total: None)), lambda done, total: None)
    monkeypatch.undo()
    assert len(rig.files()) == 21 - calls
    require_right(rig, backend, sorted(left(rig, backend, range(20))))
    assert listing.remove(list(listing.objects(lambda done, total: None)), lambda done, total: None) == 21 - calls


def require_right(rig: Rig, backend: FileBackend, numbers) -> None:
    for number in numbers:
        assert rig.get(backend, [number]) == 1
    found = list(FileListing(rig.root).objects(lambda done, total: None))
    assert [file_fault(one) for one in found] == [None] * len(numbers)


def test_the_bound_holds_over_all_identities(rig, make_files):
    """An update leaves blocks of the old identity: they count, and are the first to go."""
    old, new = make_files(rig, quota_bytes=QUOTA), make_files(rig, quota_bytes=QUOTA)
    old.identify(b"\xaa" * 32)
    new.identify(b"\xbb" * 32)
    before, after = Rig(rig.root), Rig(rig.root)
    before.layout, after.layout = old.layout, new.layout
    before.put(old, range(50))
    for path in rig.files():
        os.utime(path, (1000, 1000))
    after.put(new, range(50))
    assert len(rig.files()) * PAGE <= QUOTA
    assert after.get(new, range(50)) == 50
    assert before.get(old, range(50)) < 11


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_directory_that_cannot_be_listed_is_an_error_of_the_command(rig, make_files, monkeypatch, number):
    rig.put(make_files(rig), range(3))

    def refuse(path):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        list(FileListing(rig.root).objects(lambda done, total: None))


def test_layouts_without_an_identity_have_the_layouts_label(rig, make_files):
    rig.put(make_files(rig), [0])
    (found,) = FileListing(rig.root).objects(lambda done, total: None)
    assert found.identity == f"{layout_of().fingerprint[:8].hex()}-r0"
