"""What a store holds, by identity and age, and its removal: compared with what was put, in a directory and in a Redis."""

from __future__ import annotations

import os
from dataclasses import replace
from time import time

import pytest
from redis_server import SERVER, RedisServer
from storage_rig import Rig, key_of, soon

from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage.file_tools import FileListing
from baton.kvcache.storage.listing import IdentityTotals, Listing, StoredObject
from baton.kvcache.storage.open import open_backend, open_listing
from baton.kvcache.storage.resp import Connection, RedisAddress

needs_redis = pytest.mark.skipif(SERVER is None, reason="redis-server is not installed: apt-get install redis-server")
IDENTITIES = {b"\xaa" * 32: range(30), b"\xbb" * 32: range(20, 32), b"": range(5)}
"""Numbers of the blocks that are put, by identity. Without one the layout is the label."""


def silent(done: int, total: int) -> None:
    pass


def wanted(rig: Rig) -> set[tuple[str, str]]:
    """Key and identity of everything that is put."""
    labels = {identity: (identity or rig.layout.fingerprint)[:8].hex() + "-r0" for identity in IDENTITIES}
    return {(key_of(number).hex(), labels[identity]) for identity, numbers in IDENTITIES.items() for number in numbers}


def listed(listing: Listing) -> set[tuple[str, str]]:
    found = [(one.key, one.identity) for one in listing.objects(silent)]
    assert len(found) == len(set(found)), "listed twice"
    return set(found)


def fill(url: str, rig: Rig) -> None:
    for identity, numbers in IDENTITIES.items():
        backend = open_backend(url, rig.layout)
        if identity:
            backend.identify(identity)
        assert rig_of(rig, identity).put(backend, numbers) == len(numbers)
        assert rig_of(rig, identity).get(backend, numbers) == len(numbers), "and it is found again"
        backend.close()


def rig_of(rig: Rig, identity: bytes) -> Rig:
    other = Rig(rig.root)
    other.layout = replace(rig.layout, identity=identity)
    return other


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    started = RedisServer(tmp_path_factory.mktemp("redis"))
    yield started
    started.stop()


@pytest.fixture(params=["file", pytest.param("redis", marks=needs_redis)])
def url(request, rig):
    if request.param == "file":
        return f"file:{rig.root}"
    server = request.getfixturevalue("server")
    server.ask("FLUSHALL")
    server.ask("SET", "baton:kv:notes", "mine")
    server.ask("SET", "notes", "mine")
    return f"redis://127.0.0.1:{server.port}/0"


def test_everything_that_was_put_is_listed_once_with_its_identity(url, rig):
    fill(url, rig)
    assert listed(open_listing(url)) == wanted(rig)


def test_what_is_removed_is_gone_and_the_rest_is_found(url, rig):
    fill(url, rig)
    listing = open_listing(url)
    old = [one for one in listing.objects(silent) if one.identity.startswith("bb")]
    assert len(old) == 12
    assert listing.remove(old, silent) == 12
    assert listed(listing) == {one for one in wanted(rig) if not one[1].startswith("bb")}
    assert listing.remove(old, silent) == 0, "a second time it is no error"
    backend = open_backend(url, rig.layout)
    backend.identify(b"\xbb" * 32)
    assert rig_of(rig, b"\xbb" * 32).get(backend, range(20, 32)) == 0
    backend.identify(b"\xaa" * 32)
    assert rig_of(rig, b"\xaa" * 32).get(backend, range(30)) == 30
    backend.close()


def test_identities_are_apart_and_a_change_of_weights_changes_back(url, rig):
    """Blocks of an identity are found again after other weights were loaded and the old ones came back."""
    backend = open_backend(url, rig.layout)
    for identity in (b"\xaa" * 32, b"\xbb" * 32):
        backend.identify(identity)
        assert rig_of(rig, identity).get(backend, range(3)) == 0
        assert rig_of(rig, identity).put(backend, range(3)) == 3
    backend.identify(b"\xaa" * 32)
    assert rig_of(rig, b"\xaa" * 32).get(backend, range(3)) == 3
    backend.close()


def test_a_file_that_is_used_after_it_was_listed_stays(rig, make_files):
    backend = make_files(rig)
    rig.put(backend, range(10))
    for number in range(10):
        os.utime(backend.path_of(key_of(number)), (1000, 1000))
    listing = FileListing(rig.root)
    found = list(listing.objects(silent))
    assert rig.get(backend, [3, 4]) == 2, "a read renews them"
    assert listing.remove(found, silent) == 8
    assert rig.get(backend, [3, 4]) == 2


@needs_redis
def test_listing_renews_nothing_and_what_is_used_meanwhile_stays(server, rig):
    """A value's time of last use is set back; it has no command to set it, so restored values carry it."""
    url = f"redis://127.0.0.1:{server.port}/0"
    server.ask("FLUSHALL")
    fill(url, rig)
    listing = open_listing(url)
    names = [one.place for one in listing.objects(silent)]
    connection = Connection(RedisAddress(host="127.0.0.1", port=server.port), soon())
    for name in names:
        connection.send([b"*2\r\n$4\r\nDUMP\r\n$%d\r\n%s\r\n" % (len(name), name.encode())])
        (value,) = connection.read_replies(1)
        words = [b"RESTORE", name.encode(), b"0", value, b"REPLACE", b"IDLETIME", b"86400"]
        connection.send([b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)])
        assert connection.read_replies(1) == [b"OK"]
    connection.close()
    for _ in range(2):  # the first listing has not renewed them
        found = list(listing.objects(silent))
        assert all(86000 < time() - one.used_at < 87000 for one in found)
    server.ask("GET", names[0])
    server.ask("GET", names[1])
    assert listing.remove(found, silent) == len(names) - 2
    assert {one.place for one in listing.objects(silent)} == set(names[:2])


def test_totals():
    totals = IdentityTotals("aa-r0")
    assert (totals.oldest, totals.newest) == (None, None)
    for used_at in (5.0, None, 3.0, 9.0):
        totals.add(StoredObject("place", "key", "aa-r0", 10, used_at))
    assert (totals.objects, totals.nbytes, totals.oldest, totals.newest) == (4, 40, 3.0, 9.0)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mooncake://master:50051", "has no listing"),
        ("sqlite:/var/kv", "has no listing"),
        ("redis://127.0.0.1:1/0", "cannot be reached"),
        ("redis://:verysecret@127.0.0.1:1/0", "cannot be reached"),
        ("/nowhere", "is no directory"),
    ],
)
def test_a_store_that_cannot_be_listed_says_so(url, words):
    with pytest.raises(InvalidConfig, match=words) as refused:
        open_listing(url)
    assert "verysecret" not in str(refused.value)


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_replies_that_are_cut_anywhere_are_read(cut):
    """A server's bytes come in pieces of any size."""
    reply = b"*2\r\n$2\r\n17\r\n*2\r\n$5\r\nfirst\r\n$-1\r\n:42\r\n-ERR no such thing\r\n+OK\r\n"
    pieces = [reply[at : at + cut] for at in range(0, len(reply), cut)]

    class Pieces(Connection):
        def __init__(self) -> None:
            self._address = RedisAddress(host="h", port=1)

        def _receive_some(self) -> bytes:
            return pieces.pop(0)

    nested, number, error, status = Pieces().read_replies(4)
    assert (nested, number, status) == ([b"17", [b"first", None]], 42, b"OK")
    assert "ERR no such thing" in str(error)


@pytest.mark.parametrize("reply", [b"%2\r\n", b"$x\r\n", b"x" * 3000, b"$99999999\r\n", b"+OK\r\n+more\r\n"])
def test_a_reply_that_is_none_is_found_out(reply):
    class Pieces(Connection):
        def __init__(self) -> None:
            self._address = RedisAddress(host="h", port=1)

        def _receive_some(self) -> bytes:
            return reply

    with pytest.raises(StorageFailed, match="does not fit"):
        Pieces().read_replies(1)
