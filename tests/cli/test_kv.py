"""`baton kv` on a directory that a file backend has filled."""

from __future__ import annotations

import json
import os
import time
from hashlib import sha256

import pytest
from command_rig import baton_here as baton
from command_rig import said

from baton.kvcache.storage.backend import Deadline, LayoutName
from baton.kvcache.storage.files import FileBackend

LAYOUTS = [LayoutName(fingerprint=bytes([number]) * 32, block_bytes=3000) for number in (0xAA, 0xBB)]


def key_of(number: int) -> bytes:
    return sha256(bytes([number])).digest()


@pytest.fixture
def store(tmp_path):
    """30 blocks of one layout, 10 of another, a file of somebody else's."""
    root = tmp_path / "kv"
    for layout, count in zip(LAYOUTS, (30, 10), strict=True):
        backend = FileBackend(root, layout, 2**30)
        keys, blocks = [key_of(number) for number in range(count)], [memoryview(bytes([7]) * 3000)] * count
        assert backend.put(keys, blocks, Deadline.after(30)) == count
    (root / "notes.txt").write_text("mine")
    (root / "00").mkdir(exist_ok=True)
    (root / "00" / "notes.txt").write_text("mine")
    return root


@pytest.mark.parametrize("name", ["list", "stat"])
def test_list_counts_per_identity(store, name):
    """`stat` is its former name."""
    text = said(baton("kv", name, store))
    assert "40 objects, 122.2 KiB" in text
    assert "aaaaaaaaaaaaaaaa-r0 30 91.6 KiB" in text
    facts = json.loads(baton("kv", name, f"file:{store}?quota_gib=3", "--json").stdout)
    assert (facts["objects"], facts["nbytes"]) == (40, 40 * 3128)
    assert sorted(row["objects"] for row in facts["identities"]) == [10, 30]


def test_blocks_shows_what_was_used_last(store):
    backend = FileBackend(store, LAYOUTS[0], 2**30)
    for number in range(30):
        os.utime(backend.path_of(key_of(number)), (1000 + number, 1000 + number))
    ran = baton("kv", "blocks", store, "--identity", "aa", "--limit", "3", "--json")
    facts = json.loads(ran.stdout)
    assert facts["objects"] == 30
    assert [row["key"] for row in facts["shown"]] == [key_of(number).hex() for number in (29, 28, 27)]
    text = said(baton("kv", "blocks", store))
    assert "20 more; --limit 0 lists all" in text
    assert len(json.loads(baton("kv", "blocks", store, "--limit", "0", "--json").stdout)["shown"]) == 40


def test_verify_finds_what_is_damaged_and_removes_it_if_asked(store):
    assert "40 objects, 122.2 KiB, 0 damaged" in said(baton("kv", "verify", store))
    files = sorted(store.rglob("*.kv"))
    torn, flipped, misdirected = files[3], files[20], files[30]
    torn.write_bytes(torn.read_bytes()[:-1])
    flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
    misdirected.write_bytes(files[31].read_bytes())
    ran = baton("kv", "verify", store, "--json")
    assert ran.returncode == 1
    found = {row["path"]: row["fault"] for row in json.loads(ran.stdout)["damaged"]}
    assert found.keys() == {str(torn), str(flipped), str(misdirected)}
    assert (found[str(torn)], found[str(flipped)]) == ("length", "payload")
    assert "3 damaged" in said(baton("kv", "verify", store, "--remove"))
    ran = baton("kv", "verify", store)
    assert ran.returncode == 0
    assert "37 objects" in said(ran)


def test_verify_waits_for_nothing_that_is_no_file(store):
    """Found by an audit: a FIFO was waited for, /dev/zero read to its end, links followed."""
    files = sorted(store.rglob("*.kv"))
    for path in files[:3]:
        path.unlink()
    os.mkfifo(files[0])
    files[1].symlink_to("/dev/zero")
    files[2].symlink_to(files[3])
    ran = baton("kv", "verify", store, "--json")
    assert {row["path"] for row in json.loads(ran.stdout)["damaged"]} == {str(path) for path in files[:3]}
    assert "3 damaged" in said(baton("kv", "verify", store, "--remove"))
    assert baton("kv", "verify", store).returncode == 0


def test_remove_asks_and_leaves_what_is_not_ours(store):
    ran = baton("kv", "remove", store, stdin="n\n")
    assert ran.returncode == 1
    assert len(list(store.rglob("*.kv"))) == 40
    assert "10 blocks removed, 30.5 KiB" in said(baton("kv", "remove", store, "--identity", "bb", stdin="y\n"))
    assert "0 blocks removed" in said(baton("kv", "remove", store, "--yes", "--older-than", "1"))
    assert "30 blocks removed" in said(baton("kv", "clear", store, "--yes"))
    assert not list(store.rglob("*.kv"))
    assert len(list(store.rglob("notes.txt"))) == 2


@pytest.mark.parametrize(
    ("age", "seconds"),
    [("90s", 90), ("30m", 1800), ("12h", 43200), ("7d", 604800), ("2w", 1209600), ("36", 129600), ("1.5D", 129600)],
)
def test_remove_by_age_takes_what_was_used_before_that(store, age, seconds):
    files, now = sorted(store.rglob("*.kv")), time.time()
    for number, path in enumerate(files):
        at = now - seconds + (number - 20) * 10 + 5
        os.utime(path, (at, at))
    assert "20 objects" in said(baton("kv", "remove", store, "--older-than", age, "--dry-run"))
    assert len(list(store.rglob("*.kv"))) == 40, "a dry run removes nothing"
    assert "20 blocks removed" in said(baton("kv", "remove", store, "--older-than", age, "--yes"))
    assert sorted(store.rglob("*.kv")) == files[20:]


@pytest.mark.parametrize("age", ["soon", "-1d", "7 years", "", "1e9d"])
def test_an_age_that_is_none_is_said_in_one_line(store, age):
    ran = baton("kv", "remove", store, "--older-than", age)
    assert ran.returncode == 1
    assert "such as 30m, 12h, 7d or 2w" in said(ran)
    assert len(list(store.rglob("*.kv"))) == 40


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("/nowhere", "/nowhere is no directory"),
        ("file:/nowhere", "is no directory"),
        ("file:/nowhere?quota=3", "has no option quota"),
        ("mooncake://master:50051", "mooncake: has no listing"),
        ("sqlite:/var/kv", "sqlite: has no listing"),
        ("redis://127.0.0.1:1", "Redis at 127.0.0.1:1 cannot be reached"),
    ],
)
def test_a_place_that_is_none_is_said_in_one_line(place, words):
    for command in ("list", "blocks", "verify", "remove"):
        ran = baton("kv", command, place)
        assert ran.returncode == 1
        assert ran.stderr.startswith(f"baton kv {command}: ")
        assert words in said(ran)
        assert len(ran.stderr.splitlines()) == 1
