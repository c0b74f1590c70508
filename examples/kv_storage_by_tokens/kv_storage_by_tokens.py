"""A KV storage backend that finds blocks by the token ids before them, in an SQLite file that several servers may share.

    pip install ./examples/kv_storage_by_tokens
    baton serve --kv-storage 'tokens:/var/cache/blocks.db?blocks_max=4096'

Most stores need nothing but block keys, and get nothing else. A store that indexes by tokens says `wants_tokens = True`; every
call then carries the ids from the start of the sequence to the end of the last block that is named.

What it must keep to is in `baton/kvcache/storage/backend.py`. Three things are easily forgotten:
- Equal tokens are not equal KV: the model, its weights and the tenant differ, and only the key knows. So objects are sealed
  with their key, and verified when they are read, like on every other backend.
- Calls come from several threads at once. Here each thread has a connection of its own.
- Token ids are the prompt. This store keeps digests of them.
"""

from __future__ import annotations

import sqlite3
import threading
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256

from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage.backend import Deadline, LayoutName, StorageBackend
from baton.kvcache.storage.counters import Counters
from baton.kvcache.storage.object import HEADER_BYTES, fault_of, seal
from baton.kvcache.storage.url import StorageURL

SCHEMA = "CREATE TABLE IF NOT EXISTS blocks (prefix BLOB, name TEXT, object BLOB, PRIMARY KEY (prefix, name))"
FIND = "FROM blocks WHERE prefix = ? AND name = ?"
EVICT = """DELETE FROM blocks WHERE rowid IN
    (SELECT rowid FROM blocks ORDER BY rowid LIMIT max(0, (SELECT count(*) FROM blocks) - ?))"""


def open_tokens(url: StorageURL, layout: LayoutName) -> StorageBackend:
    url.allow("blocks_max")
    if not url.path:
        raise InvalidConfig("a storage by tokens needs a file: tokens:/var/cache/blocks.db")
    return TokenStorage(url.path, layout, int(url.number("blocks_max", 1024, 1, 10**9)))


class TokenStorage:
    wants_tokens = True

    def __init__(self, path: str, layout: LayoutName, blocks_max: int) -> None:
        self._path, self._layout, self._blocks_max = path, layout, blocks_max
        self._mine = threading.local()
        self._counters = Counters()

    def contains_prefix(self, keys: Sequence[bytes], deadline: Deadline, tokens: Sequence[int] | None = None) -> int:
        connection = self._connection(deadline)
        for count, (_, place) in enumerate(self._places(keys, tokens)):
            if connection.execute(f"SELECT 1 {FIND}", place).fetchone() is None:
                return count
        return len(keys)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        connection, done = self._connection(deadline), 0
        for (key, place), block in zip(self._places(keys, tokens), into, strict=True):
            row = connection.execute(f"SELECT object {FIND}", place).fetchone()
            found = memoryview(row[0] if row is not None else b"")
            payload = found[HEADER_BYTES:]
            if len(payload) != len(block) or fault_of(found[:HEADER_BYTES], key, self._layout, payload):
                break
            block[:] = payload
            done += 1
            _within(deadline, done, len(keys))
        self._counters.add("hits", done)
        self._counters.add("misses", len(keys) - done)
        return done

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        connection = self._connection(deadline)
        places = list(self._places(keys, tokens))
        for done, ((key, place), block) in enumerate(zip(places, blocks, strict=True), 1):
            sealed = seal(key, self._layout, block) + bytes(block)
            with connection:
                connection.execute("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", (*place, sealed))
                connection.execute(EVICT, (self._blocks_max,))
            self._counters.add("stored")
            _within(deadline, done, len(keys))
        return len(keys)

    def counters(self) -> dict[str, int]:
        return self._counters.totals()

    def close(self) -> None:
        """The file stays: others may share it. Connections end with their threads."""

    def _places(self, keys: Sequence[bytes], tokens: Sequence[int] | None) -> Iterator[tuple[bytes, tuple[bytes, str]]]:
        """Each key with where it lies: under all tokens up to the end of its block, of which the last `len(keys)` are meant."""
        ids, size = array("I", tokens or ()), self._layout.block_tokens
        first = len(ids) // size - len(keys)
        prefix = sha256(ids[: first * size].tobytes())
        for number, key in enumerate(keys, first):
            prefix.update(ids[number * size : (number + 1) * size].tobytes())
            # One place for each key and prefix: tenants with the same prompt do not drive out each other's blocks.
            yield key, (prefix.digest(), self._layout.object_name(key))

    def _connection(self, deadline: Deadline) -> sqlite3.Connection:
        """Of this thread, to a file that other processes may have locked: then it waits, up to the deadline."""
        connection: sqlite3.Connection | None = getattr(self._mine, "connection", None)
        if connection is None:
            connection = self._mine.connection = sqlite3.connect(self._path, timeout=deadline.left())
            connection.execute("PRAGMA synchronous = OFF")  # It is a cache: what a power failure costs is computed.
            connection.execute(SCHEMA)
        connection.execute(f"PRAGMA busy_timeout = {round(deadline.left() * 1000)}")
        return connection


def _within(deadline: Deadline, done: int, wanted: int) -> None:
    if done < wanted and deadline.passed():
        raise StorageFailed("timeout", "the SQLite file is slow", done)
