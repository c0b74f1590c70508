"""Bytes per second of KV between two instances, by how they are protected on their way.

    python bench/transfer_security.py [--mib 64] [--rounds 30] [--json]

The peer is a process of its own; both are on this machine and share its cores, so a figure is an upper bound of what one pair
of processes moves over a network that is faster. Every round has one turn of each way, in a drawn order; a figure is the median
over the rounds, and so is the ratio to the plain socket, which is taken within a round. Beside it, less touched by other work:
the ratio of the fastest rounds, and the processor time of both processes. A read has two threads on each side, the plain socket
one: where cores are short, rounds may favour the reads.

    plain      one connection, the system calls alone, from one pool's memory into the other's
    checksum   a read (kvcache/tcp.py) with xxh3
    keyed      a read with keyed digests
    TLS        a read inside TLS 1.3, certificates made with the openssl command
    scattered  the same, of blocks in a drawn order in both pools

Then the candidates for a keyed digest, alone, on pieces of 1 MiB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import hmac
import json
import platform
import random
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

import numpy as np
from xxhash import xxh3_128_digest

from baton.kvcache.digests import KeyedDigest, ranked
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.tcp import Tcp
from baton.kvcache.transport import runs_of
from baton.kvpool.copies import CopySpan
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.ids import PoolIncarnation
from baton.trust.keyring import Keyring
from baton.trust.secret import create_secret
from baton.trust.tls import TlsFiles

LAYOUT = KVLayout(layers=30, kv_heads=3, head_dim=64, block_size=16, dtype="int8", format="int8-fours")
SCATTERED = ", scattered"
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")


def make_files(folder: Path) -> None:
    """A secret, and certificates where openssl is installed."""
    create_secret(folder / "secret")
    if shutil.which("openssl") is not None:
        for name, signer in (("ca", ()), ("member", ("-CA", "ca.pem", "-CAkey", "ca.key"))):
            made = ("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
            subprocess.run(["openssl", "req", "-x509", *KEY, *signer, *made], check=True, capture_output=True, cwd=folder)


def credentials(folder: Path) -> tuple[Keyring, Keyring | None]:
    secret, names = str(folder / "secret"), ("member.pem", "member.key", "ca.pem")
    if not (folder / "ca.pem").exists():
        return Keyring(secret), None
    return Keyring(secret), Keyring(secret, TlsFiles(*(str(folder / name) for name in names)))


async def serve(folder: Path, blocks: int) -> None:
    """The peer: prints its pool and its ports."""
    pool = KVPool.create(LAYOUT, blocks)
    pool.data[:] = np.random.default_rng(1).integers(-100, 100, pool.data.shape, np.int8)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    print(pool.incarnation, *(listener.getsockname()[1] for listener in listeners), flush=True)
    threading.Thread(target=send_plain, args=(listeners[0], pool), daemon=True).start()
    for listener, keyring in zip(listeners[1:], credentials(folder), strict=True):
        if keyring is not None:
            server = Tcp(keyring)
            server.attach(pool)
            server.listen(listener)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def send_plain(listener: socket.socket, pool: KVPool) -> None:
    sock, _ = listener.accept()
    content = memoryview(pool.data).cast("B")
    while sock.recv(1):
        sock.sendall(content)


class Way:
    """Seconds of each round, and processor seconds of both processes in all rounds."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self.seconds: list[float] = []
        self.processor = [0.0, 0.0]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        before, begun = self._processor(), perf_counter()
        yield
        self.seconds.append(perf_counter() - begun)
        self.processor = [all_ + now - then for all_, now, then in zip(self.processor, self._processor(), before, strict=True)]

    def _processor(self) -> tuple[float, float]:
        threads = Path(f"/proc/{self._peer}/task").glob("*/schedstat")
        return process_time(), sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


async def measure(folder: Path, peer: str, pid: int, blocks: int, rounds: int) -> dict[str, Way]:
    incarnation, plain_port, port, tls_port = map(int, peer.split())
    into = KVPool.create(LAYOUT, blocks)
    into.data[:] = 1
    target = memoryview(into.data).cast("B")
    plain = socket.create_connection(("127.0.0.1", plain_port))
    keyring, with_tls = credentials(folder)
    pools = {}
    for name, digest, own, place in (
        ("checksum", "checksum", keyring, port),
        ("keyed", "keyed", keyring, port),
        ("TLS", "auto", with_tls, tls_port),
    ):
        if own is not None:
            reader = Tcp(own, digest=digest)  # type: ignore[arg-type]
            reader.attach(into)
            address = f"tcp://127.0.0.1:{place}"
            pools[name] = await reader.open(address, PoolIncarnation(incarnation), LAYOUT.fingerprint(), lambda: None)
    chance = random.Random(1)
    ways = {name: Way(pid) for name in ("plain", *pools, *(f"{name}{SCATTERED}" for name in pools))}
    places = [chance.sample(range(blocks), blocks) for _ in range(2)]
    runs = {"": [CopySpan(0, 0, blocks)], SCATTERED: list(runs_of(places[0], places[1], blocks))}
    for _ in range(rounds):
        for name in chance.sample(list(ways), len(ways)):
            with ways[name].turn():
                if name == "plain":
                    plain.sendall(b"!")
                    rest = target
                    while rest:
                        rest = rest[plain.recv_into(rest) :]
                else:
                    way, _, order = name.partition(SCATTERED[0])
                    asked = runs[SCATTERED if order else ""]
                    read = await pools[way].read(asked, into, Deadline.after(60), lambda: True)
                    assert read.blocks == blocks
    for pool in pools.values():
        pool.close()
    plain.close()
    return ways


def digests(rounds: int) -> dict[str, float]:
    """GiB per second of each candidate."""
    piece, key = memoryview(random.Random(1).randbytes(1 << 20)), bytes(32)
    session = KeyedDigest(key, ranked()[0])

    def keyed(content: memoryview) -> None:
        running = session(0)
        running.update(content)
        running.digest()

    ways: dict[str, Callable[[], object]] = {
        "xxh3 (no key)": lambda: xxh3_128_digest(piece),
        "BLAKE2b": lambda: hashlib.blake2b(piece, key=key, digest_size=32).digest(),
        "HMAC-SHA256": lambda: hmac.digest(key, piece, "sha256"),
        "HMAC-SHA512": lambda: hmac.digest(key, piece, "sha512"),
        f"as used ({ranked()[0]})": lambda: keyed(piece),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begun = perf_counter()
            way()
            taken[name].append(perf_counter() - begun)
    return {name: len(piece) / median(each) / 2**30 for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    blocks = max(1, (arguments.mib << 20) // LAYOUT.block_bytes)
    if arguments.serve:
        asyncio.run(serve(Path(arguments.serve), blocks))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_files(folder)
        command = [sys.executable, str(Path(__file__)), "--mib", str(arguments.mib), "--serve", made]
        peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert peer.stdout is not None
        try:
            ways = asyncio.run(measure(folder, peer.stdout.readline().decode(), peer.pid, blocks, arguments.rounds))
        finally:
            peer.kill()
            peer.wait()
    moved = blocks * LAYOUT.block_bytes / 2**30
    rows = {
        name: {
            "gib_per_second": moved / median(way.seconds),
            "of_plain": median(plain / other for plain, other in zip(ways["plain"].seconds, way.seconds, strict=True)),
            "of_plain_fastest": min(ways["plain"].seconds) / min(way.seconds),
            "gib_per_processor_second": moved * arguments.rounds / max(way.processor),
            "processor_seconds_per_gib": [seconds / moved / arguments.rounds for seconds in way.processor],
        }
        for name, way in ways.items()
    }
    alone = digests(arguments.rounds)
    if arguments.json:
        print(json.dumps({"mib": arguments.mib, "rows": rows, "digests": alone}))
        return
    print(f"{moved * 1024:.0f} MiB in blocks of {LAYOUT.block_bytes >> 10} KiB, {platform.machine()}, {ssl.OPENSSL_VERSION}")
    for name, row in rows.items():
        ratios = f"{row['of_plain']:6.0%} of the plain socket, {row['of_plain_fastest']:4.0%} in the fastest rounds"
        speeds = f"{row['gib_per_second']:7.2f} GiB/s {ratios}"
        reader, peer_ = row["processor_seconds_per_gib"]
        print(f"{name:22}{speeds}; processor seconds per GiB: reader {reader:.2f}, peer {peer_:.2f}")
    for name, speed in alone.items():
        print(f"{name:18}{speed:7.2f} GiB/s alone")


if __name__ == "__main__":
    main()
