"""Injects faults into stored objects and counts how many damaged blocks are served: none may be.

    python tests/kvcache/storage_faults.py --injections 1000000 [--seed 1] [--directory DIR]

Small synthetic blocks, through the real file backend. Every injection stores a run of three blocks, damages one of them (its
file, or what the operating system answers), and reads the run: the blocks before the damaged one must be right and nothing
after them may be counted. What is in the memory of a block that counts is compared byte by byte.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import perf_counter

from baton.errors import StorageFailed
from baton.kvcache.storage import files as files_module
from baton.kvcache.storage.backend import Deadline, LayoutName
from baton.kvcache.storage.files import FileBackend
from baton.kvcache.storage.object import HEADER_BYTES, seal

RUN = 3
SOON = Deadline.after(10**6)


class Campaign:
    def __init__(self, root: Path, seed: int) -> None:
        self.random = Random(seed)
        size = self.random.choice((64, 257, 1000))
        self.layout = LayoutName(fingerprint=self.random.randbytes(32), block_bytes=size)
        self.backend = FileBackend(root, self.layout, 2**30)
        self.into = [memoryview(bytearray(size)) for _ in range(RUN)]
        self.injected: Counter[str] = Counter()
        self.served_corrupt = 0
        self.lost_good = 0
        self.keys: list[bytes] = []
        self.blocks: list[memoryview] = []

    def renew(self) -> None:
        for key in self.keys:
            try:
                os.unlink(self.backend.path_of(key))
            except OSError:
                continue
        self.keys = [self.random.randbytes(32) for _ in range(RUN)]
        self.blocks = [memoryview(self.random.randbytes(self.layout.block_bytes)) for _ in range(RUN)]

    def inject(self) -> None:
        """One fault, one read."""
        if len(self.keys) == 0 or self.random.random() < 0.05:
            self.renew()
        assert self.backend.put(self.keys, self.blocks, SOON) == RUN
        place = self.random.randrange(RUN)
        name = self.random.choice(list(FAULTS))
        for block in self.into:
            block[:1] = b"?"
        try:
            with FAULTS[name](self, place):
                count = self.backend.get(self.keys, self.into, SOON)
        except StorageFailed as failed:
            count = failed.done
        self.injected[name] += 1
        right = [got == wanted for got, wanted in zip(self.into, self.blocks, strict=True)]
        if count > place or not all(right[:count]):
            self.served_corrupt += 1
        # Errors of opening may end a run early: files are opened ahead.
        self.lost_good += count < place and name not in EARLY

    def path(self, place: int) -> str:
        return self.backend.path_of(self.keys[place])

    def rewrite(self, place: int, change: Callable[[bytearray], bytes | bytearray]) -> None:
        with open(self.path(place), "r+b") as file:
            content = bytearray(file.read())
            changed = change(bytearray(content))
            assert changed != content
            file.seek(0)
            file.write(changed)
            file.truncate()


Fault = Callable[[Campaign, int], "Iterator[None]"]
FAULTS: dict[str, Callable] = {}
EARLY = {"open fails"}


def fault(function: Fault) -> Fault:
    FAULTS[function.__name__.replace("_", " ")] = contextmanager(function)
    return function


def changed_file(name: str) -> Callable:
    """A fault that is in the file's bytes."""

    def add(change: Callable[[Campaign, int, bytearray], bytes | bytearray]) -> Callable:
        def damage(campaign: Campaign, place: int) -> Iterator[None]:
            campaign.rewrite(place, lambda content: change(campaign, place, content))
            yield

        damage.__name__ = name
        fault(damage)
        return change

    return add


@changed_file("bit flip in the header")
def _header_flip(campaign, place, content):
    bit = campaign.random.randrange(HEADER_BYTES * 8)
    content[bit // 8] ^= 1 << bit % 8
    return content


@changed_file("bit flip in the payload")
def _payload_flip(campaign, place, content):
    bit = campaign.random.randrange(HEADER_BYTES * 8, len(content) * 8)
    content[bit // 8] ^= 1 << bit % 8
    return content


@changed_file("several bits")
def _flips(campaign, place, content):
    for byte in campaign.random.sample(range(len(content)), campaign.random.randint(2, 20)):
        content[byte] ^= campaign.random.randint(1, 255)
    return content


@changed_file("sector of something else")
def _sector(campaign, place, content):
    begin = campaign.random.randrange(len(content))
    length = min(campaign.random.choice((1, 16, 512)), len(content) - begin)
    content[begin : begin + length] = bytes(byte ^ campaign.random.randint(1, 255) for byte in content[begin : begin + length])
    return content


@changed_file("torn")
def _torn(campaign, place, content):
    return content[: campaign.random.randrange(len(content))]


@changed_file("torn to zeros")
def _zeros(campaign, place, content):
    begin = campaign.random.randrange(len(content) - 8)
    return content[:begin] + bytes(len(content) - begin)


@changed_file("longer than it says, with its begin lost")
def _shifted(campaign, place, content):
    return campaign.random.randbytes(campaign.random.randint(1, 64)) + content


@changed_file("misdirected")
def _misdirected(campaign, place, content):
    other = (place + campaign.random.randint(1, RUN - 1)) % RUN
    return Path(campaign.path(other)).read_bytes()


@changed_file("spliced: this header, another payload")
def _spliced(campaign, place, content):
    return content[:HEADER_BYTES] + campaign.blocks[(place + 1) % RUN]


@changed_file("another layout")
def _layout(campaign, place, content):
    other = LayoutName(fingerprint=campaign.random.randbytes(32), block_bytes=campaign.layout.block_bytes)
    return seal(campaign.keys[place], other, campaign.blocks[place]) + campaign.blocks[place]


@changed_file("another rank")
def _rank(campaign, place, content):
    other = LayoutName(fingerprint=campaign.layout.fingerprint, block_bytes=campaign.layout.block_bytes, rank=1)
    return seal(campaign.keys[place], other, campaign.blocks[place]) + campaign.blocks[place]


@changed_file("another length, sealed rightly")
def _length(campaign, place, content):
    payload = memoryview(campaign.random.randbytes(campaign.random.randrange(campaign.layout.block_bytes)))
    return seal(campaign.keys[place], campaign.layout, payload) + payload


@changed_file("foreign bytes")
def _foreign(campaign, place, content):
    return campaign.random.randbytes(campaign.random.randrange(len(content) * 2))


@fault
def vanished(campaign, place):
    os.unlink(campaign.path(place))
    yield


@contextmanager
def patched(name: str, replacement: Callable) -> Iterator[None]:
    real = getattr(os, name)
    setattr(files_module.os, name, replacement)
    try:
        yield
    finally:
        setattr(files_module.os, name, real)


def _nth_read(place: int, answer: Callable[[Callable, int, list, int], int]) -> Callable:
    """A `preadv` whose call number `place` gives another answer."""
    real, calls = os.preadv, [0]

    def preadv(descriptor, buffers, offset, flags=0):
        if flags:  # The first try, which may only take what is in memory.
            raise BlockingIOError(errno.EAGAIN, "injected")
        calls[0] += 1
        return answer(real, descriptor, buffers, offset) if calls[0] == place + 1 else real(descriptor, buffers, offset)

    return preadv


@fault
def read_error(campaign, place):
    number = campaign.random.choice((errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EISDIR))

    def fail(*_):
        raise OSError(number, os.strerror(number))

    with patched("preadv", _nth_read(place, fail)):
        yield


@fault
def short_read(campaign, place):
    def short(real, descriptor, buffers, offset):
        real(descriptor, buffers, offset)
        return campaign.random.randrange(HEADER_BYTES + campaign.layout.block_bytes)

    with patched("preadv", _nth_read(place, short)):
        yield


@fault
def flip_while_reading(campaign, place):
    def flip(real, descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        buffer = campaign.random.choice(buffers)
        buffer[campaign.random.randrange(len(buffer))] ^= 1 << campaign.random.randrange(8)
        return count

    with patched("preadv", _nth_read(place, flip)):
        yield


@fault
def open_fails(campaign, place):
    path, real = campaign.path(place), os.open

    def refuse(asked, *rest):
        if asked == path:
            raise OSError(campaign.random.choice((errno.EACCES, errno.EMFILE, errno.EIO, errno.ENOENT)), "injected")
        return real(asked, *rest)

    with patched("open", refuse):
        yield


def run(root: Path, injections: int, seed: int, told: Callable[[int], None] = lambda done: None) -> Campaign:
    total = Campaign(root, seed)
    injected: Counter[str] = Counter()
    corrupt = lost = done = 0
    while done < injections:
        campaign = Campaign(root, seed + done)
        for _ in range(min(1000, injections - done)):
            campaign.inject()
        campaign.renew()
        injected += campaign.injected
        corrupt, lost, done = corrupt + campaign.served_corrupt, lost + campaign.lost_good, done + 1000
        told(min(done, injections))
    total.injected, total.served_corrupt, total.lost_good = injected, corrupt, lost
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--injections", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--directory", type=Path, default=Path("/dev/shm") if os.path.isdir("/dev/shm") else None)
    asked = parser.parse_args()
    begin = perf_counter()
    with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
        seen = run(Path(folder), asked.injections, asked.seed, lambda done: print(f"\r{done:,}", end="", file=sys.stderr))
    print(file=sys.stderr)
    for name, count in seen.injected.most_common():
        print(f"{count:>10,}  {name}")
    seconds = perf_counter() - begin
    print(f"{sum(seen.injected.values()):,} faults in {seconds:.0f} s, seed {asked.seed}")
    print(f"{seen.served_corrupt} corrupt blocks served, {seen.lost_good} good blocks before a damaged one lost")
    return 1 if seen.served_corrupt or seen.lost_good else 0


if __name__ == "__main__":
    sys.exit(main())
