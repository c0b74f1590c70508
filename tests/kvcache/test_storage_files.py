"""The file backend: what is put is found again; what is damaged is never served; only StorageFailed leaves it."""

import errno
import os
import threading
from pathlib import Path

import pytest
from storage_rig import Rig, key_of, layout_of, soon

from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage import files as files_module
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.storage.files import MARK, FileBackend
from baton.kvcache.storage.open import open_backend


def test_what_was_put_is_there(rig, make_files):
    backend = make_files(rig)
    assert rig.has(backend, range(5)) == rig.get(backend, range(5)) == 0
    assert rig.put(backend, range(5)) == 5
    assert rig.has(backend, range(5)) == rig.get(backend, range(5)) == 5
    assert rig.get(make_files(rig), range(5)) == 5, "after a restart too"


def test_a_run_ends_at_its_first_gap(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, [0, 1, 3, 4])
    assert rig.has(backend, range(5)) == rig.get(backend, range(5)) == 2


def test_more_blocks_than_files_are_opened_ahead(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, range(100))
    assert rig.get(backend, range(100)) == 100
    rig.files()[50].unlink()
    gone = next(number for number in range(100) if not os.path.exists(backend.path_of(key_of(number))))
    assert rig.get(backend, range(100)) == gone


def cold(real):
    """Nothing is in memory."""

    def preadv(descriptor, buffers, offset, flags=0):
        if flags:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return real(descriptor, buffers, offset)

    return preadv


def test_cold_files_are_asked_for_ahead_and_warm_ones_read_at_once(rig, make_files, monkeypatch):
    backend = make_files(rig)
    rig.put(backend, range(40))
    real, reads, asked = os.preadv, [], []

    def preadv(descriptor, buffers, offset, flags=0):
        reads.append(flags)
        if flags and cold_from <= reads.count(flags) - 1:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(files_module.os, "preadv", preadv)
    monkeypatch.setattr(files_module.os, "posix_fadvise", lambda *each: asked.append(each))
    for cold_from, advised in ((40, 0), (10, 29), (0, 39)):
        reads.clear()
        asked.clear()
        assert rig.get(backend, range(40)) == 40
        assert len(asked) == advised, "every file after the first cold one"
        assert len(reads) == 40 + (cold_from < 40), "one read per block, and the one that found it cold"


def test_a_file_system_that_cannot_say_what_is_in_memory(rig, make_files, monkeypatch):
    backend = make_files(rig)
    rig.put(backend, range(20))
    real = os.preadv

    def preadv(descriptor, buffers, offset, flags=0):
        if flags:
            raise OSError(errno.EOPNOTSUPP, "no such flag here")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(files_module.os, "preadv", preadv)
    assert rig.get(backend, range(25)) == 20


def test_what_was_opened_ahead_is_closed_where_the_run_ends_early(rig, make_files, monkeypatch):
    backend = make_files(rig)
    rig.put(backend, range(20))
    Path(backend.path_of(key_of(3))).write_bytes(b"damaged")
    real = os.preadv

    def cold(descriptor, buffers, offset, flags=0):
        if flags:
            raise OSError(errno.EAGAIN, "not in memory")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(files_module.os, "preadv", cold)
    before = len(os.listdir("/proc/self/fd"))
    assert rig.get(backend, range(20)) == 3
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_cannot_be_opened_ahead_costs_no_other_file(rig, make_files, monkeypatch):
    """Found by an audit: the whole file that was read at that moment was taken for damaged, and removed."""
    backend = make_files(rig)
    rig.put(backend, range(20))
    real, locked = os.open, backend.path_of(key_of(12))

    def opened(path, *rest, **named):
        if path == locked:
            raise PermissionError(errno.EACCES, "not for us", path)
        return real(path, *rest, **named)

    monkeypatch.setattr(files_module.os, "preadv", cold(os.preadv))
    monkeypatch.setattr(files_module.os, "open", opened)
    with pytest.raises(StorageFailed) as failed:
        rig.get(backend, range(20))
    assert (failed.value.reason, failed.value.done) == ("denied", 12)
    assert len(rig.files()) == 20
    assert backend.counters()["corrupt"] == 0


def test_no_descriptor_is_left_open(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, range(40))
    before = len(os.listdir("/proc/self/fd"))
    rig.get(backend, range(50))
    with pytest.raises(StorageFailed):
        backend.get(rig.keys(range(40)), rig.blocks(range(40)), Deadline.after(-1))
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_layouts_and_ranks_see_nothing(rig, make_files, tmp_path):
    rig.put(make_files(rig), range(3))
    for layout in (layout_of("another"), layout_of(rank=1)):
        other = Rig(rig.root)
        other.layout = layout
        assert other.has(make_files(other), range(3)) == other.get(make_files(other), range(3)) == 0


def test_an_object_that_is_there_is_not_written_again(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, range(3))
    written = [path.stat().st_ino for path in rig.files()]
    assert rig.put(make_files(rig), range(3)) == 3
    assert [path.stat().st_ino for path in rig.files()] == written
    assert make_files(rig).counters()["stored"] == 0


# Damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"x" * path.stat().st_size),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"),
        lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]),
    ],
    ids=["torn", "header only", "empty", "foreign", "payload", "magic"],
)
def test_a_damaged_file_is_a_miss_and_is_removed(rig, make_files, damage):
    backend = make_files(rig)
    rig.put(backend, [0])
    damage(rig.files()[0])
    assert rig.get(backend, [0]) == 0
    assert not rig.files()
    assert backend.counters()["corrupt"] == 1
    rig.put(backend, [0])
    assert rig.get(backend, [0]) == 1


def test_a_misdirected_file_is_a_miss(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, [0, 1])
    os.replace(backend.path_of(key_of(1)), backend.path_of(key_of(0)))
    assert rig.get(backend, [0]) == 0


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "dangling"])
def test_what_is_no_file_is_a_miss(rig, make_files, kind):
    backend = make_files(rig)
    rig.put(backend, [0, 1])
    path = backend.path_of(key_of(0))
    os.unlink(path)
    {
        "folder": lambda: os.mkdir(path),
        "fifo": lambda: os.mkfifo(path),
        "link": lambda: os.symlink(backend.path_of(key_of(1)), path),
        "dangling": lambda: os.symlink("/nowhere", path),
    }[kind]()
    assert rig.has(backend, [0]) == rig.get(backend, [0]) == 0


# What the operating system refuses


def failing(monkeypatch, call, number, times=10**9):
    """From now on this call of `os` fails, as seen by the backend."""
    real, left = getattr(os, call), [times]

    def fail(*args, **kwargs):
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    monkeypatch.setattr(files_module.os, call, fail)


@pytest.mark.parametrize(
    ("call", "number", "reason"),
    [
        ("pwritev", errno.ENOSPC, "full"),
        ("pwritev", errno.EDQUOT, "full"),
        ("pwritev", errno.EIO, "io"),
        ("open", errno.EACCES, "denied"),
        ("open", errno.EROFS, "denied"),
        ("open", errno.EMFILE, "io"),
        ("rename", errno.ESTALE, "gone"),
    ],
)
def test_a_put_that_fails_is_typed_and_leaves_nothing(rig, make_files, monkeypatch, call, number, reason):
    backend = make_files(rig)
    failing(monkeypatch, call, number)
    with pytest.raises(StorageFailed) as failed:
        rig.put(backend, range(3))
    assert (failed.value.reason, failed.value.done) == (reason, 0)
    monkeypatch.undo()
    assert not [path for path in rig.root.rglob("*") if path.is_file() and path.name != MARK]
    assert rig.put(backend, range(3)) == 3


def test_a_failed_put_says_what_was_stored_before(rig, make_files, monkeypatch):
    backend = make_files(rig)
    real, calls = os.pwritev, []

    def third_fails(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "full")
        return real(*args)

    monkeypatch.setattr(files_module.os, "pwritev", third_fails)
    with pytest.raises(StorageFailed) as failed:
        rig.put(backend, range(5))
    assert failed.value.done == 2


def test_a_write_in_part_is_not_published(rig, make_files, monkeypatch):
    backend = make_files(rig)
    real = os.pwritev
    monkeypatch.setattr(files_module.os, "pwritev", lambda fd, parts, offset: real(fd, parts[:1], offset))
    with pytest.raises(StorageFailed) as failed:
        rig.put(backend, [0])
    assert failed.value.reason == "full"
    assert not rig.files()


def test_a_full_disk_is_answered_by_eviction(rig, make_files, monkeypatch):
    backend = make_files(rig, quota_bytes=100 * 4096)
    rig.put(backend, range(40))
    failing(monkeypatch, "pwritev", errno.ENOSPC)
    with pytest.raises(StorageFailed):
        rig.put(backend, [99])
    assert 0 < len(rig.files()) <= 20


@pytest.mark.parametrize(("number", "reason"), [(errno.EIO, "io"), (errno.ESTALE, "gone"), (errno.ETIMEDOUT, "timeout")])
def test_a_read_that_fails_is_typed_and_its_object_removed(rig, make_files, monkeypatch, number, reason):
    backend = make_files(rig)
    rig.put(backend, range(3))
    failing(monkeypatch, "preadv", number, times=1)
    with pytest.raises(StorageFailed) as failed:
        rig.get(backend, range(3))
    assert (failed.value.reason, failed.value.done) == (reason, 0)
    assert len(rig.files()) == 2


def test_a_directory_that_was_taken_away_is_not_made_anew(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, [0])
    for path in sorted(rig.root.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    rig.root.rmdir()
    assert rig.get(backend, [0]) == 0
    with pytest.raises(StorageFailed) as failed:
        rig.put(backend, [0])
    assert failed.value.reason == "gone"
    assert not rig.root.exists()


def test_the_mount_point_of_an_unmounted_disk_is_not_filled(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, [0])
    disk = rig.root.rename(rig.root.with_name("the disk, unmounted"))
    rig.root.mkdir()
    assert rig.get(backend, [0]) == 0
    with pytest.raises(StorageFailed) as failed:
        rig.put(backend, [0])
    assert failed.value.reason == "gone"
    assert not list(rig.root.iterdir())
    rig.root.rmdir()
    disk.rename(rig.root)  # mounted again
    assert rig.get(backend, [0]) == rig.put(backend, range(3)) - 2 == 1


def test_a_deadline_that_has_passed_ends_every_call(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, range(3))
    late = Deadline.after(-1)
    for call in (
        lambda: backend.contains_prefix(rig.keys(range(3)), late),
        lambda: backend.get(rig.keys(range(3)), [memoryview(bytearray(1000))] * 3, late),
        lambda: backend.put(rig.keys(range(3)), rig.blocks(range(3)), late),
    ):
        with pytest.raises(StorageFailed) as failed:
            call()
        assert failed.value.reason == "timeout"


# Quota


def used_bytes(rig):
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in rig.files())


def test_the_quota_holds_and_the_oldest_goes_first(rig, make_files):
    quota = 120 * 4096
    backend = make_files(rig, quota_bytes=quota)
    for number in range(1000):
        rig.put(backend, [number])
        os.utime(backend.path_of(key_of(number)), (number, number))
        assert number % 20 or used_bytes(rig) <= quota
    assert len(rig.files()) >= 100, "nearly all of the quota is used"
    left = [number for number in range(1000) if rig.has(backend, [number])]
    assert left == list(range(min(left), 1000)), "in one group the order is exact"
    assert backend.counters()["evicted"] == 1000 - len(left)


def test_many_groups_fill_evenly(rig, make_files):
    quota = 2000 * 4096
    backend = make_files(rig, quota_bytes=quota)
    assert rig.put(backend, range(5000)) == 5000
    assert 0.8 * quota <= used_bytes(rig) <= quota


def test_nobody_else_may_look_into_it(rig, make_files):
    """What is stored was made of prompts."""
    umask = os.umask(0)
    try:
        rig.put(make_files(rig), range(3))
    finally:
        os.umask(umask)
    paths = [rig.root, *rig.root.rglob("*")]
    assert len(paths) > 4
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}


def test_an_object_that_would_be_written_again_is_renewed_too(rig, make_files):
    rig.put(make_files(rig), [0])
    backend = make_files(rig)
    path = backend.path_of(key_of(0))
    os.utime(path, (1000, 1000))
    rig.put(backend, [0])
    assert os.stat(path).st_mtime > 10**9


def test_a_read_renews_an_object(rig, make_files, monkeypatch):
    rig.put(make_files(rig), [0])
    backend = make_files(rig)
    path = backend.path_of(key_of(0))
    os.utime(path, (1000, 1000))
    rig.get(backend, [0])
    renewed = os.stat(path).st_mtime
    assert renewed > 10**9
    rig.get(backend, [0])
    assert os.stat(path).st_mtime == renewed, "not on every read"
    later = renewed + 61
    monkeypatch.setattr(files_module, "time", lambda: later)
    rig.get(backend, [0])
    assert os.stat(path).st_mtime >= renewed
    assert backend._touched[key_of(0)] == later


def test_two_engines_on_one_directory_keep_one_quota(rig, make_files):
    quota = 400 * 4096
    engines = [make_files(rig, quota_bytes=quota), make_files(rig, quota_bytes=quota)]
    for number in range(0, 3000, 10):
        for place, engine in enumerate(engines):
            numbers = range(number + place * 5, number + place * 5 + 5)
            assert rig.put(engine, numbers) == 5
            rig.get(engines[1 - place], numbers)
    assert used_bytes(rig) <= quota * 9 / 8 + 4096


@pytest.mark.parametrize("kind", ["folder", "not ours"])
def test_what_cannot_be_removed_does_not_stop_eviction(rig, make_files, monkeypatch, kind):
    """Found by an audit: from then on nothing was stored any more in that group of folders."""
    quota = 120 * 4096
    backend = make_files(rig, quota_bytes=quota)
    rig.put(backend, [0])
    path = backend.path_of(key_of(0))
    if kind == "folder":
        os.unlink(path)
        os.mkdir(path)
    os.utime(path, (1000, 1000))
    real = os.unlink

    def unlink(name, **named):
        if name == path:
            raise PermissionError(errno.EPERM, "immutable", name)
        real(name, **named)

    monkeypatch.setattr(files_module.os, "unlink", unlink)
    for number in range(1, 300):
        assert rig.put(backend, [number]) == 1
    assert sum(4096 for each in rig.files() if each.is_file()) <= quota
    assert os.path.exists(path)


def test_a_quota_that_is_full_of_what_cannot_be_removed_is_not_exceeded(rig, make_files, monkeypatch):
    backend = make_files(rig, quota_bytes=120 * 4096)
    failing(monkeypatch, "unlink", errno.EPERM)
    with pytest.raises(StorageFailed) as failed:
        rig.put(backend, range(300))
    assert failed.value.reason == "full"
    assert len(rig.files()) == failed.value.done <= 120


def test_other_layouts_count_and_are_evicted_too(rig, make_files):
    quota = 200 * 4096
    old = Rig(rig.root)
    old.layout = layout_of("a model of last week")
    last_week = make_files(old, quota_bytes=quota)
    old.put(last_week, range(190))
    for path in rig.files():
        os.utime(path, (1000, 1000))
    backend = make_files(rig, quota_bytes=quota)
    rig.put(backend, range(150))
    assert used_bytes(rig) <= quota
    assert rig.has(backend, range(150)) == 150


def test_temporary_files_of_dead_writers_are_removed_and_those_of_living_ones_kept(rig, make_files):
    folder = rig.root / f"{key_of(0)[0]:02x}"
    folder.mkdir(parents=True)
    dead, living, foreign = folder / ".0123456789ab-0.tmp", folder / ".0123456789ab-1.tmp", folder / "notes.txt"
    for path in (dead, living, foreign):
        path.write_bytes(b"x")
    os.utime(dead, (1000, 1000))
    os.utime(foreign, (1000, 1000))
    rig.put(make_files(rig), [0])
    assert (dead.exists(), living.exists(), foreign.exists()) == (False, True, True)


def test_opening_looks_at_no_object(rig, make_files, monkeypatch):
    """A million entries must not delay the start: nothing is listed before something is written."""
    rig.put(make_files(rig), range(50))
    listed = []
    real = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (listed.append(path), real(path))[1])
    backend = make_files(rig, quota_bytes=2**40)
    assert rig.get(backend, range(50)) == 50
    assert not listed
    rig.put(backend, [99])
    assert len(listed) == 1, "one folder of 256"


# Many at once


def test_threads_and_engines_put_get_and_evict_at_once(rig, make_files):
    engines = [make_files(rig, quota_bytes=120 * 4096) for _ in range(2)]
    errors = []

    def work(seed):
        try:
            for turn in range(60):
                first = (seed * 37 + turn * 13) % 200
                engine = engines[turn % 2]
                rig.put(engine, range(first, first + 8))
                rig.get(engine, range(first, first + 8))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert all(engine.counters()["corrupt"] == 0 for engine in engines)
    assert sum(engine.counters()["evicted"] for engine in engines) > 0


# Addresses


def test_file_addresses(tmp_path):
    layout = layout_of()
    assert open_backend(f"file:{tmp_path}/a", layout).root == f"{tmp_path}/a"
    assert open_backend(f"file://{tmp_path}/a%20b?quota_gib=0.5", layout).root == f"{tmp_path}/a b"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/var/cache", "file:/var/cache"),
        ("file:", "names no directory"),
        ("file://host/dir", "names a host"),
        ("file:/tmp/x?quota=3", "no option quota; options of file: quota_gib"),
        ("file:/tmp/x?quota_gib=-1", "must be a number"),
        ("file:/tmp/x?quota_gib=nan", "must be a number"),
        ("file:/tmp/x?quota_gib", "cannot be read"),
        ("file:/dev/null/x", "cannot be made"),
        ("s3://bucket", "no KV storage for s3:"),
    ],
)
def test_a_wrong_address_says_what_to_write(url, words):
    with pytest.raises(InvalidConfig) as wrong:
        open_backend(url, layout_of())
    assert words in str(wrong.value)


def test_a_quota_below_two_objects_is_refused(tmp_path):
    with pytest.raises(InvalidConfig, match="raise quota_gib"):
        FileBackend(tmp_path, layout_of(), 2000)


def test_a_directory_that_can_only_be_read_serves_hits(rig, make_files, monkeypatch):
    backend = make_files(rig)
    rig.put(backend, [0])
    os.utime(backend.path_of(key_of(0)), (1000, 1000))
    failing(monkeypatch, "utime", errno.EROFS)
    assert rig.get(backend, [0]) == 1


def test_the_counters_add_up(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, range(4))
    rig.get(backend, range(6))
    counted = backend.counters()
    assert (counted["stored"], counted["hits"], counted["misses"]) == (4, 4, 2)
    assert counted["bytes_read"] == counted["bytes_written"] == 4 * (1000 + 128)
    assert soon().left() > 0


@pytest.mark.parametrize(("mode", "words"), [(0o777, "all users may write"), (0o770, "its group may write"), (0o700, "")])
def test_a_directory_that_others_may_write_to_is_warned_of(rig, tmp_path, caplog, mode, words):
    """Whoever writes there can change answers."""
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(mode)
    FileBackend(root, rig.layout).close()
    assert words in caplog.text
    assert bool(caplog.text) is bool(words)


def test_the_mark_is_not_written_through_a_link(rig, tmp_path):
    root, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    root.mkdir(0o700)
    (root / MARK).symlink_to(elsewhere)
    FileBackend(root, rig.layout).close()
    assert not elsewhere.exists()
