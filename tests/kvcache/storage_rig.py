"""Blocks, keys and deadlines for tests of storage backends."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from baton.kvcache.storage.backend import Deadline, LayoutName

SOON = 30.0
"""Seconds: a guard against hanging, never a measure."""


def soon() -> Deadline:
    return Deadline.after(SOON)


def key_of(number: int) -> bytes:
    return sha256(f"key {number}".encode()).digest()


def layout_of(name: str = "layout", *, block_bytes: int = 1000, rank: int = 0) -> LayoutName:
    return LayoutName(fingerprint=sha256(name.encode()).digest(), block_bytes=block_bytes, rank=rank, block_tokens=4)


class Rig:
    def __init__(self, root: Path, block_bytes: int = 1000) -> None:
        self.root = root
        self.layout = layout_of(block_bytes=block_bytes)

    def keys(self, numbers) -> list[bytes]:
        return [key_of(number) for number in numbers]

    def block(self, number: int) -> memoryview:
        seed = sha256(f"block {number}".encode()).digest()
        size = self.layout.block_bytes
        return memoryview((seed * (size // 32 + 1))[:size])

    def blocks(self, numbers) -> list[memoryview]:
        return [self.block(number) for number in numbers]

    def put(self, backend, numbers) -> int:
        return backend.put(self.keys(numbers), self.blocks(numbers), soon())

    def get(self, backend, numbers) -> int:
        """Leading count, and a check that what was counted is right."""
        numbers = list(numbers)
        into = [memoryview(bytearray(self.layout.block_bytes)) for _ in numbers]
        count = backend.get(self.keys(numbers), into, soon())
        assert into[:count] == self.blocks(numbers)[:count], "a corrupt block was served"
        return count

    def has(self, backend, numbers) -> int:
        return backend.contains_prefix(self.keys(numbers), soon())

    def files(self) -> list[Path]:
        return sorted(self.root.rglob("*.kv"))
