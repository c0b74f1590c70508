"""Blocks, keys and deadlines for tests of storage backends."""

from __future__ import annotations

from pathlib import Path

from baton.kvcache.storage.backend import Deadline
from baton.testing.storage_suite import SOON, block_of, key_of, layout_of

__all__ = ["key_of", "layout_of"]


def soon() -> Deadline:
    return Deadline.after(SOON)


class Rig:
    def __init__(self, root: Path, block_bytes: int = 1000) -> None:
        self.root = root
        self.layout = layout_of(block_bytes=block_bytes)

    def keys(self, numbers) -> list[bytes]:
        return [key_of(number) for number in numbers]

    def block(self, number: int) -> memoryview:
        return block_of(number, self.layout.block_bytes)

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
