"""The Mooncake Store backend: objects in the memory of all participating machines, found by a master.

Its client has no deadlines and needs memory that is registered with it. So every call runs on a pool thread (thread_pool.py)
with a piece of registered memory, from which verified blocks are copied: a late transfer writes there, never into a block of
ours.

An object that was read recently is leased and cannot be removed. A damaged one is remembered here, counts as missing, and is
replaced by the next `put`.
"""

from __future__ import annotations

import ctypes
import mmap
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from baton.errors import InvalidConfig, StorageFailed, StorageReason
from baton.kvcache.storage.backend import Deadline, LayoutName, StorageBackend
from baton.kvcache.storage.counters import Counters
from baton.kvcache.storage.object import HEADER_BYTES, fault_of, seal
from baton.kvcache.storage.thread_pool import PoolCall, PoolThread, ThreadPool
from baton.kvcache.storage.url import StorageURL

PORT = 50051
LANES = 3
LANE_BYTES = 24 * 2**20
"""Bytes of memory per thread, half of which is one request to the store. Smaller ones cost more: 10 % more CPU with 8 MiB, 30 %
with 2 MiB."""
CLIENT_BUFFER_BYTES = 16 * 2**20
DAMAGED_MAX = 1024

MISSES = (-703, -704, -707)
"""Error codes that count as misses: not ready, not found, lease expired while it was read."""
TOO_LARGE = -600
REASONS: dict[int, StorageReason] = {-200: "full", -900: "unreachable", -901: "timeout"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    host: str
    port: int = PORT
    protocol: str = "tcp"
    device: str = ""
    "Names of RDMA devices, separated by commas."
    local_host: str = ""
    "Address under which other machines reach this one; by default the local address of the connection to the master."
    segment_bytes: int = 2**30
    "Bytes of memory that this process gives to the store."


def open_mooncake(url: StorageURL, layout: LayoutName) -> StorageBackend:
    return MooncakeBackend(mooncake_settings(url), layout, store_class())


def mooncake_settings(url: StorageURL) -> MooncakeConfig:
    """Settings from the address. Nothing is opened."""
    url.allow("segment_gib", "protocol", "device", "local_host")
    if not url.host:
        raise InvalidConfig(f"{url!r} names no master; write mooncake://host:{PORT}")
    return MooncakeConfig(
        host=url.host,
        port=url.port or PORT,
        protocol=url.options.get("protocol", "tcp"),
        device=url.options.get("device", ""),
        local_host=url.options.get("local_host", ""),
        segment_bytes=int(url.number("segment_gib", 1, 0, 10**5) * 2**30),
    )


def store_class() -> Callable[[], Any]:
    try:
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ModuleNotFoundError:
        raise InvalidConfig("Mooncake is not installed: pip install 'baton-serve[mooncake]'")
    except ImportError as error:
        raise InvalidConfig(f"Mooncake cannot be loaded ({error}); its wheel needs libibverbs: apt-get install libibverbs1")
    made: Callable[[], Any] = MooncakeDistributedStore
    return made


class MooncakeBackend:
    wants_tokens = False

    def __init__(self, config: MooncakeConfig, layout: LayoutName, make_store: Callable[[], Any]) -> None:
        self.config, self.layout = config, layout
        self._object_bytes = HEADER_BYTES + layout.block_bytes
        self._per_half = max(1, LANE_BYTES // 2 // self._object_bytes)
        lane_bytes = 2 * self._per_half * self._object_bytes
        self._memory = mmap.mmap(-1, LANES * lane_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        whole, address = memoryview(self._memory), self._address
        starts = range(0, LANES * lane_bytes, lane_bytes)
        self._lanes = ThreadPool([(whole[start : start + lane_bytes], address + start) for start in starts])
        self._make_store = make_store
        self._store: Any = None
        self._may_connect: deque[None] = deque([None])
        "Queue with one entry: the thread that pops it connects."
        self._counters = Counters()
        self._damaged: dict[bytes, None] = {}

    def identify(self, identity: bytes) -> None:
        self.layout = replace(self.layout, identity=identity)

    def contains_prefix(self, keys: Sequence[bytes], deadline: Deadline, tokens: Sequence[int] | None = None) -> int:
        names = [self._name(key) for key in keys]
        with self._failures(lambda: 0), self._lanes.idle_thread(deadline) as lane:
            store = self._connected(lane, deadline)
            there: list[int] = lane.call(partial(store.batch_is_exist, names), deadline)
        for place, (key, answer) in enumerate(zip(keys, there, strict=True)):
            if answer < 0:
                raise self._failed(answer, place)
            if answer != 1 or key in self._damaged:
                return place
        return len(keys)

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        done = 0
        try:
            with self._failures(lambda: done), self._lanes.idle_thread(deadline) as lane:
                store = self._connected(lane, deadline)
                for batch, half, read in self._batches(lane, keys, deadline, lambda _: store.batch_get_into):
                    taken = self._take(half, batch, read, into[done : done + len(batch)])
                    done += taken
                    if taken < len(batch):
                        if read[taken] < 0 and read[taken] not in (*MISSES, TOO_LARGE):
                            raise self._failed(read[taken], done)
                        break
        finally:
            self._counters.add("hits", done)
            self._counters.add("misses", len(keys) - done)
            self._counters.add("bytes_read", done * self._object_bytes)
        return done

    def _batches(
        self,
        lane: PoolThread,
        keys: Sequence[bytes],
        deadline: Deadline,
        prepare: Callable[[tuple[Sequence[bytes], memoryview]], Callable[..., list[int]]],
    ) -> Iterator[tuple[Sequence[bytes], memoryview, list[int]]]:
        """Move the objects of these keys between a thread's memory and the store; yields each batch with its memory and
        results.

        A batch uses half of the thread's memory: the next one is under way while the caller handles one. `prepare` gets a batch
        and its memory, fills that for a put, and returns the client's function that moves it.
        """
        under_way: deque[tuple[Sequence[bytes], memoryview, PoolCall[list[int]]]] = deque()
        half_bytes, size, asked = self._per_half * self._object_bytes, self._object_bytes, 0
        half = 0
        while under_way or asked < len(keys):
            while asked < len(keys) and len(under_way) < 2:
                batch, begin = keys[asked : asked + self._per_half], half * half_bytes
                memory = lane.memory[begin : begin + half_bytes]
                move = prepare((batch, memory))
                addresses = [lane.address + begin + place * size for place in range(len(batch))]
                names = [self._name(key) for key in batch]
                under_way.append((batch, memory, lane.start(partial(move, names, addresses, [size] * len(batch)))))
                asked, half = asked + len(batch), 1 - half
            batch, memory, call = under_way.popleft()
            yield batch, memory, lane.wait(call, deadline)

    def _take(self, memory: memoryview, keys: Sequence[bytes], read: Sequence[int], into: Sequence[memoryview]) -> int:
        """Copy the leading complete objects out of a thread's memory."""
        for place, (key, block) in enumerate(zip(keys, into, strict=True)):
            if read[place] < 0 and read[place] != TOO_LARGE:
                return place
            begin = place * self._object_bytes
            found = memory[begin : begin + self._object_bytes]
            if read[place] == self._object_bytes:
                block[:] = found[HEADER_BYTES:]
            # The copy is verified: it is in the processor's caches, and it is the one that will be used.
            if read[place] != self._object_bytes or fault_of(found[:HEADER_BYTES], key, self.layout, block):
                self._remember_damaged(key)
                return place
        return len(keys)

    def _remember_damaged(self, key: bytes) -> None:
        self._counters.add("corrupt")
        if len(self._damaged) < DAMAGED_MAX:
            self._damaged[key] = None

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        done = 0
        left = iter(blocks)
        with self._failures(lambda: done), self._lanes.idle_thread(deadline) as lane:
            store = self._connected(lane, deadline)

            def fill(batch_and_memory: tuple[Sequence[bytes], memoryview]) -> Callable[..., list[int]]:
                batch, memory = batch_and_memory
                for place, key in enumerate(batch):
                    block, begin = next(left), place * self._object_bytes
                    memory[begin : begin + HEADER_BYTES] = seal(key, self.layout, block)
                    memory[begin + HEADER_BYTES : begin + self._object_bytes] = block
                again = any(key in self._damaged for key in batch)
                move: Callable[..., list[int]] = store.batch_upsert_from if again else store.batch_put_from
                return move

            for batch, _, written in self._batches(lane, keys, deadline, fill):
                for key, answer in zip(batch, written, strict=True):
                    if answer != 0:
                        raise self._failed(answer, done)
                    self._damaged.pop(key, None)
                    self._counters.add("stored")
                    self._counters.add("bytes_written", self._object_bytes)
                    done += 1
        return done

    def _name(self, key: bytes) -> str:
        return f"baton:kv:{self.layout.object_name(key)}"

    def _connected(self, lane: PoolThread, deadline: Deadline) -> Any:
        if self._store is None:
            try:
                self._may_connect.pop()
            except IndexError:
                raise StorageFailed("unreachable", f"Mooncake at {self._place()} is still being connected")
            lane.call(self._connect, deadline)
        return self._store

    def _connect(self) -> None:
        try:
            config = self.config
            # The client would try for 90 s, with the interpreter lock held.
            with socket.create_connection((config.host, config.port), timeout=2) as probe:
                local_host = config.local_host or probe.getsockname()[0]
            store, place = self._make_store(), f"{config.host}:{config.port}"
            memory = (config.segment_bytes, CLIENT_BUFFER_BYTES)
            if store.setup(local_host, "P2PHANDSHAKE", *memory, config.protocol, config.device, place) != 0:
                raise StorageFailed("unreachable", f"Mooncake at {place} did not accept this client")
            if store.register_buffer(self._address, len(self._memory)) != 0:
                raise StorageFailed("io", "Mooncake could not register its memory (see ulimit -l)")
            self._store = store
        finally:
            self._may_connect.append(None)

    @contextmanager
    def _failures(self, done: Callable[[], int]) -> Iterator[None]:
        try:
            yield
        except StorageFailed as failed:
            raise StorageFailed(failed.reason, str(failed), done())
        except TimeoutError:
            raise StorageFailed("timeout", f"Mooncake at {self._place()} took too long", done())
        except OSError as error:
            raise StorageFailed("unreachable", f"Mooncake at {self._place()}: {error}", done())

    def _failed(self, answer: int, done: int) -> StorageFailed:
        return StorageFailed(REASONS.get(answer, "io"), f"Mooncake at {self._place()} answers {answer}", done)

    def _place(self) -> str:
        return f"{self.config.host}:{self.config.port}"

    def counters(self) -> dict[str, int]:
        return self._counters.totals()

    def close(self) -> None:
        self._lanes.end()
        if self._store is not None:
            self._store.close()
            self._store = None
