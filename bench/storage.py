"""What a storage backend costs beside the bare transport of the same bytes. The goals: files 1.5x, Redis and Mooncake 1.3x.

    python bench/storage.py [--block-kib 190] [--blocks 125] [--rounds 15] [--directory DIR] [--only KIND] [--json]

125 blocks of 190 KiB are a prefix of 2,000 tokens of the default model. Every round runs all ways of moving them, one after the
other, and a figure is the median over the rounds; so is the ratio, which is taken within a round. CPU is that of this
process (user and system). Ours verify everything that they read and leave it in the blocks.

    file warm, cold    `get` of FileBackend, against: the same files with open, preadv, close and no check ("raw"),
                       and one large file with the same bytes, read block by block ("one file")
    file put           `put`, against open, pwritev, close, rename without header and checksum
    redis              against redis-py with hiredis: mget into bytes objects; a pipeline of set
    mooncake           against its own client: batch_get_into, batch_put_from with registered memory; the store's memory is in
                       another process, so that the bytes go over TCP
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep

from baton.errors import InvalidConfig
from baton.kvcache.storage.backend import Deadline, LayoutName, StorageBackend
from baton.kvcache.storage.files import FileBackend
from baton.kvcache.storage.open import open_backend

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kvcache"))  # They know how to start the servers.
from mooncake_master import MooncakeMaster, why_not
from redis_server import SERVER, RedisServer

Way = tuple[Callable[[], object], Callable[[], object]]
"""What is done before the clock starts, and what is measured."""


SCRATCH = bytearray(128 << 20)


def nothing() -> None:
    return None


class Data:
    """A run of blocks in page-aligned memory, as a pool has them, and a second one to read into."""

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self.layout = LayoutName(fingerprint=bytes(32), block_bytes=block_bytes)
        self.block_bytes, self.count = block_bytes, blocks
        self.memory, self.target = (mmap.mmap(-1, blocks * block_bytes) for _ in range(2))
        self.memory[:] = os.urandom(1 << 20) * (blocks * block_bytes >> 20) + os.urandom(blocks * block_bytes % (1 << 20))
        self.blocks, self.into = self._cut(self.memory), self._cut(self.target)
        self._round = 0

    def _cut(self, memory: mmap.mmap) -> list[memoryview]:
        whole = memoryview(memory)
        return [whole[place * self.block_bytes : (place + 1) * self.block_bytes] for place in range(self.count)]

    def keys(self, name: str) -> list[bytes]:
        return [sha256(f"{name} {number}".encode()).digest() for number in range(self.count)]

    def new_keys(self) -> list[bytes]:
        self._round += 1
        return self.keys(f"round {self._round}")

    def get(self, backend: StorageBackend, keys: list[bytes]) -> None:
        assert backend.get(keys, self.into, Deadline.after(60)) == self.count

    def put(self, backend: StorageBackend, keys: list[bytes]) -> None:
        assert backend.put(keys, self.blocks, Deadline.after(60)) == self.count


def measure(ways: dict[str, Way], rounds: int, ours: str) -> list[dict[str, object]]:
    """Seconds, CPU seconds, and the ratio of ours to each, from interleaved rounds."""
    wall: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (before, work) in ways.items():
            before()
            SCRATCH[: len(SCRATCH) // 2] = SCRATCH[len(SCRATCH) // 2 :]  # No way finds in the caches what the last one left.
            begin, begin_cpu = perf_counter(), process_time()
            work()
            if number:  # The first round warms up.
                wall[name].append(perf_counter() - begin)
                cpu[name].append(process_time() - begin_cpu)
    ratios = {name: median(a / b for a, b in zip(wall[ours], wall[name], strict=True)) for name in ways}
    return [
        {"way": name, "ms": 1e3 * median(wall[name]), "cpu_ms": 1e3 * median(cpu[name]), "ours_to_this": ratios[name]}
        for name in ways
    ]


# Files


def drop_from_page_cache(paths: list[str]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def raw_read(paths: list[str], into: list[memoryview]) -> None:
    for path, block in zip(paths, into, strict=True):
        descriptor = os.open(path, os.O_RDONLY)
        os.preadv(descriptor, [block], 128)
        os.close(descriptor)


def one_file_read(path: str, into: list[memoryview]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    offset = 0
    for block in into:
        offset += os.preadv(descriptor, [block], offset)
    os.close(descriptor)


def raw_write(folder: str, blocks: list[memoryview]) -> None:
    for number, block in enumerate(blocks):
        descriptor = os.open(f"{folder}/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwritev(descriptor, [block], 0)
        os.close(descriptor)
        os.rename(f"{folder}/new", f"{folder}/{number}")


def empty(folder: str) -> None:
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")


def bench_files(data: Data, rounds: int, folder: str) -> Iterator[tuple[str, list[dict[str, object]]]]:
    backend = FileBackend(Path(folder) / "kv", data.layout, 2**40)
    keys = data.keys("files")
    data.put(backend, keys)
    paths, one = [backend.path_of(key) for key in keys], f"{folder}/one"
    Path(one).write_bytes(data.memory)
    os.makedirs(f"{folder}/raw")
    ways = {
        "baton": (paths, lambda: data.get(backend, keys)),
        "raw": (paths, lambda: raw_read(paths, data.into)),
        "one file": ([one], lambda: one_file_read(one, data.into)),
    }
    yield "file warm get", measure({name: (nothing, work) for name, (_, work) in ways.items()}, rounds, "baton")
    cold = {name: (lambda used=used: drop_from_page_cache(used), work) for name, (used, work) in ways.items()}
    yield "file cold get", measure(cold, rounds, "baton")
    fresh: list[list[bytes]] = []

    def forget() -> None:
        for key in fresh.pop() if fresh else []:
            os.unlink(backend.path_of(key))
        fresh.append(data.new_keys())

    puts = {
        "baton": (forget, lambda: data.put(backend, fresh[-1])),
        "raw": (lambda: empty(f"{folder}/raw"), lambda: raw_write(f"{folder}/raw", data.blocks)),
    }
    yield "file put", measure(puts, rounds, "baton")


# Redis


def bench_redis(data: Data, rounds: int, folder: str) -> Iterator[tuple[str, list[dict[str, object]]]]:
    if SERVER is None:
        print("redis: skipped, there is no redis-server", file=sys.stderr)
        return
    try:
        import redis
    except ModuleNotFoundError:
        print("redis: skipped, its own client is not installed: pip install redis hiredis", file=sys.stderr)
        return
    server = RedisServer(Path(folder))
    try:
        for kind, url in (("tcp", f"redis://127.0.0.1:{server.port}/0"), ("unix", f"redis+unix://{server.socket_path}")):
            client = redis.Redis.from_url(url.replace("redis+unix", "unix"))
            backend, keys = open_backend(url, data.layout), data.keys("redis")
            data.put(backend, keys)
            names = [f"raw{number}" for number in range(data.count)]

            def their_put(client: redis.Redis = client, names: list[str] = names) -> None:
                with client.pipeline(transaction=False) as pipeline:
                    for name, block in zip(names, data.blocks, strict=True):
                        pipeline.set(name, block)
                    pipeline.execute()

            their_put()
            gets = {
                "baton": (nothing, lambda backend=backend, keys=keys: data.get(backend, keys)),
                "redis-py": (nothing, lambda client=client, names=names: client.mget(names)),
            }
            yield f"redis {kind} get", measure(gets, rounds, "baton")
            puts = {
                "baton": (client.flushall, lambda backend=backend, keys=keys: data.put(backend, keys)),
                "redis-py": (client.flushall, their_put),
            }
            yield f"redis {kind} put", measure(puts, rounds, "baton")
    finally:
        server.stop()


# Mooncake

HOLDER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 4 << 30, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def memory_holder(port: int) -> Iterator[None]:
    """Another process that gives the store its memory."""
    command = [sys.executable, "-c", HOLDER, f"127.0.0.1:{port}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield
        process.kill()


def bench_mooncake(data: Data, rounds: int, folder: str) -> Iterator[tuple[str, list[dict[str, object]]]]:
    reason = why_not()
    if reason:
        print(f"mooncake: skipped, {reason}", file=sys.stderr)
        return
    with ExitStack() as stack:
        master = MooncakeMaster(Path(folder), lease_ms=10_000)  # its default
        stack.callback(master.stop)
        stack.enter_context(memory_holder(master.port))
        backend = open_backend(f"mooncake://127.0.0.1:{master.port}?segment_gib=0", data.layout)
        keys = data.keys("mooncake")
        data.put(backend, keys)
        store = backend._store  # type: ignore[attr-defined]
        addresses = {}
        for memory in (data.memory, data.target):
            addresses[memory] = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            assert store.register_buffer(addresses[memory], len(memory)) == 0
        sizes = [data.block_bytes] * data.count

        def their(call: Callable[..., list[int]], names: list[str], memory: mmap.mmap) -> None:
            places = [addresses[memory] + place * data.block_bytes for place in range(data.count)]
            assert min(call(names, places, sizes)) >= 0

        names = [f"raw{number}" for number in range(data.count)]
        their(store.batch_put_from, names, data.memory)
        gets = {
            "baton": (nothing, lambda: data.get(backend, keys)),
            "its client": (nothing, lambda: their(store.batch_get_into, names, data.target)),
        }
        yield "mooncake get", measure(gets, rounds, "baton")
        fresh = iter(range(10**9))
        puts = {
            "baton": (lambda: sleep(0.05), lambda: data.put(backend, data.new_keys())),
            "its client": (
                lambda: sleep(0.05),
                lambda: their(store.batch_put_from, [f"new{next(fresh)}" for _ in range(data.count)], data.memory),
            ),
        }
        yield "mooncake put", measure(puts, rounds, "baton")


GOALS = {"file": ("raw", 1.5), "redis": ("redis-py", 1.3), "mooncake": ("its client", 1.3)}


def show(name: str, rows: list[dict[str, object]], nbytes: int) -> None:
    other, goal = GOALS[name.split()[0]]
    for row in rows:
        ms, ratio = float(str(row["ms"])), float(str(row["ours_to_this"]))
        told = ""
        if row["way"] == other:
            told = f"  goal {goal:g}x: {'met' if ratio <= goal else 'missed'}"
        rate = nbytes / ms / 1e6
        figures = f"{ms:8.2f} ms  {rate:6.2f} GB/s  CPU {row['cpu_ms']:8.2f} ms  baton {ratio:5.2f}x"
        print(f"{name:16} {row['way']!s:12} {figures}{told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-kib", type=float, default=190)
    parser.add_argument("--blocks", type=int, default=125)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--directory", type=Path, default=None, help="a directory on the disk to measure")
    parser.add_argument("--only", choices=list(GOALS))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    data = Data(asked.blocks, int(asked.block_kib * 1024))
    found: dict[str, list[dict[str, object]]] = {}
    benches = {"file": bench_files, "redis": bench_redis, "mooncake": bench_mooncake}
    for kind, bench in benches.items():
        if asked.only in (None, kind):
            with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
                try:
                    for name, rows in bench(data, asked.rounds, folder):
                        found[name] = rows
                        if not asked.json:
                            show(name, rows, len(data.memory))
                except InvalidConfig as error:
                    print(f"{kind}: skipped, {error}", file=sys.stderr)
    if asked.json:
        print(json.dumps(found, indent=2))
    sys.stdout.flush()
    os._exit(0)  # Mooncake's client would wait for its master.


if __name__ == "__main__":
    main()
