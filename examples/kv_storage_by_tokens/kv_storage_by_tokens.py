"""A KV storage backend that finds blocks by the token ids before them, in the memory of its process.

    pip install ./examples/kv_storage_by_tokens
    baton serve --kv-storage 'tokens:shared?blocks_max=4096'

Most stores need nothing but block keys, and get nothing else. A store that indexes by tokens says `wants_tokens = True`; every
call then carries the ids from the start of the sequence to the end of the last block that is named.

What it must keep to is in `baton/kvcache/storage/backend.py`. Two things are easily forgotten:
- Equal tokens are not equal KV: the model, its weights and the tenant differ, and only the key knows. So objects are sealed
  with their key, and verified when they are read, like on every other backend.
- Calls come from several threads at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from baton.kvcache.storage.backend import Deadline, LayoutName, StorageBackend
from baton.kvcache.storage.counters import Counters
from baton.kvcache.storage.object import HEADER_BYTES, fault_of, seal
from baton.kvcache.storage.url import StorageURL

STORES: dict[str, dict[tuple[str, bytes], bytes]] = {}
"""By name, so that two engines in one process share."""


def open_tokens(url: StorageURL, layout: LayoutName) -> StorageBackend:
    url.allow("blocks_max")
    return TokenStorage(url.path, layout, int(url.number("blocks_max", 1024, 1, 10**9)))


class TokenStorage:
    wants_tokens = True

    def __init__(self, name: str, layout: LayoutName, blocks_max: int) -> None:
        self._objects = STORES.setdefault(name, {})
        self._layout, self._blocks_max = layout, blocks_max
        self._counters = Counters()

    def _places(self, keys: Sequence[bytes], tokens: Sequence[int] | None) -> Iterator[tuple[bytes, tuple[str, bytes]]]:
        """Each key with where it lies: under all tokens up to the end of its block."""
        ids = array("I", tokens or ())
        size = self._layout.block_tokens
        first = len(ids) // size - len(keys)
        for place, key in enumerate(keys):
            # One place per key and prefix: tenants with the same prompt do not drive out each other's blocks.
            yield key, (self._layout.object_name(key), ids[: (first + place + 1) * size].tobytes())

    def contains_prefix(self, keys: Sequence[bytes], deadline: Deadline, tokens: Sequence[int] | None = None) -> int:
        for count, (_, place) in enumerate(self._places(keys, tokens)):
            if place not in self._objects:
                return count
        return len(keys)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        done = 0
        for (key, place), block in zip(self._places(keys, tokens), into, strict=True):
            found = memoryview(self._objects.get(place, b""))
            payload = found[HEADER_BYTES:]
            if len(payload) != len(block) or fault_of(found[:HEADER_BYTES], key, self._layout, payload):
                break
            block[:] = payload
            done += 1
        self._counters.add("hits", done)
        self._counters.add("misses", len(keys) - done)
        return done

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        for (key, place), block in zip(self._places(keys, tokens), blocks, strict=True):
            self._objects[place] = seal(key, self._layout, block) + bytes(block)
            self._counters.add("stored")
            while len(self._objects) > self._blocks_max:
                self._objects.pop(next(iter(self._objects)), None)
        return len(keys)

    def counters(self) -> dict[str, int]:
        return self._counters.totals()

    def close(self) -> None:
        """The objects stay: others may share them."""
