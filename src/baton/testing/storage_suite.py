"""One contract for every KV storage backend (kvcache/storage/backend.py): leading counts, misses without errors, whole blocks.

Keys and blocks are made of numbers, so that a test reads like a table: `store.put(range(5)) == 5`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from baton.errors import StorageFailed
from baton.kvcache.storage.backend import Deadline, LayoutName, StorageBackend
from baton.kvcache.storage.open import open_backend

SOON = 30.0
"""Seconds that guard against hanging, never a measure."""
BLOCK_TOKENS = 4


def key_of(number: int) -> bytes:
    return sha256(f"key {number}".encode()).digest()


def layout_of(name: str = "layout", *, block_bytes: int = 1000, rank: int = 0) -> LayoutName:
    fingerprint = sha256(name.encode()).digest()
    return LayoutName(fingerprint=fingerprint, block_bytes=block_bytes, rank=rank, block_tokens=BLOCK_TOKENS)


def block_of(number: int, size: int) -> memoryview:
    seed = sha256(f"block {number}".encode()).digest()
    return memoryview((seed * (size // len(seed) + 1))[:size])


class NumberedBlocks:
    """A backend whose blocks are named by number. Block n follows block n - 1 in one sequence of tokens."""

    def __init__(self, backend: StorageBackend, layout: LayoutName) -> None:
        self.backend, self.layout = backend, layout

    def put(self, numbers: Iterable[int]) -> int:
        numbers = list(numbers)
        blocks = [block_of(number, self.layout.block_bytes) for number in numbers]
        return self.backend.put(self._keys(numbers), blocks, Deadline.after(SOON), self._tokens(numbers))

    def get(self, numbers: Iterable[int], deadline: Deadline | None = None) -> int:
        """The leading count; counted blocks are compared byte by byte."""
        numbers, size = list(numbers), self.layout.block_bytes
        into = [memoryview(bytearray(size)) for _ in numbers]
        count = self.backend.get(self._keys(numbers), into, deadline or Deadline.after(SOON), self._tokens(numbers))
        wrong = [number for number, block in zip(numbers[:count], into, strict=False) if block != block_of(number, size)]
        assert not wrong, f"get counted blocks whose bytes are others: {wrong}"
        return count

    def has(self, numbers: Iterable[int]) -> int:
        numbers = list(numbers)
        return self.backend.contains_prefix(self._keys(numbers), Deadline.after(SOON), self._tokens(numbers))

    def _keys(self, numbers: list[int]) -> list[bytes]:
        return [key_of(number) for number in numbers]

    def _tokens(self, numbers: list[int]) -> list[int] | None:
        if not self.backend.wants_tokens:
            return None
        return list(range((max(numbers, default=-1) + 1) * BLOCK_TOKENS))


class StorageConformance:
    """Tests of a storage backend. Subclass it in a test file, and say where a new, empty store is:

    class TestMyStorage(StorageConformance):
        def address(self, folder: Path) -> str:
            return f"mine:{folder}/blocks"
    """

    def address(self, folder: Path) -> str:
        """The --kv-storage URL of an empty store. `folder` is empty too, and different for every test."""
        raise NotImplementedError

    def damage(self, address: str, number: int) -> None:
        """Changes bytes of the stored block `number`. Optional: leave it out if tests cannot reach the stored bytes."""
        pytest.skip("the suite cannot reach the stored bytes of this backend")

    def key(self, number: int) -> str:
        """Key of the block `number`, in hexadecimal: object names begin with it (LayoutName.object_name)."""
        return key_of(number).hex()

    @pytest.fixture
    def opened_at(self, tmp_path: Path) -> str:
        return self.address(tmp_path)

    @pytest.fixture
    def store(self, opened_at: str) -> Iterator[NumberedBlocks]:
        with_layout = layout_of()
        store = NumberedBlocks(open_backend(opened_at, with_layout), with_layout)
        yield store
        store.backend.close()

    # Counts

    def test_what_was_put_is_there(self, store: NumberedBlocks) -> None:
        assert store.has(range(5)) == store.get(range(5)) == 0
        assert store.put(range(5)) == 5
        assert store.has(range(5)) == store.get(range(5)) == 5
        assert store.has(range(7)) == store.get(range(7)) == 5

    def test_a_run_ends_at_its_first_gap(self, store: NumberedBlocks) -> None:
        store.put(range(2))
        store.put([3, 4])
        assert store.has(range(5)) == store.get(range(5)) == 2
        assert store.get([3, 4]) == 2, "blocks behind the gap are kept"

    def test_no_keys_are_no_blocks(self, store: NumberedBlocks) -> None:
        assert store.put([]) == store.get([]) == store.has([]) == 0

    def test_blocks_that_are_there_already_count_as_stored(self, store: NumberedBlocks) -> None:
        store.put(range(3))
        assert store.put(range(5)) == 5
        assert store.get(range(5)) == 5

    @pytest.mark.parametrize("block_bytes", [1, 4096, 1_000_003])
    def test_blocks_of_any_size(self, opened_at: str, block_bytes: int) -> None:
        layout = layout_of(block_bytes=block_bytes)
        store = NumberedBlocks(open_backend(opened_at, layout), layout)
        assert store.put(range(3)) == store.get(range(3)) == 3
        store.backend.close()

    # Other layouts and ranks

    def test_other_layouts_and_ranks_see_nothing(self, opened_at: str, store: NumberedBlocks) -> None:
        """Equal keys of another model, data type or rank hold other bytes."""
        store.put(range(3))
        for layout in (layout_of("another"), layout_of(rank=1)):
            other = NumberedBlocks(open_backend(opened_at, layout), layout)
            assert other.has(range(3)) == other.get(range(3)) == 0
            assert other.put(range(3)) == other.get(range(3)) == 3
            other.backend.close()
        assert store.get(range(3)) == 3

    def test_a_damaged_block_is_a_miss(self, opened_at: str, store: NumberedBlocks) -> None:
        store.put(range(5))
        self.damage(opened_at, 2)
        assert store.get(range(5)) == 2

    # Deadlines, threads, ends

    def test_a_deadline_that_has_passed_is_no_wrong_answer(self, store: NumberedBlocks) -> None:
        store.put(range(5))
        try:
            done, reason = store.get(range(5), Deadline.after(-1)), "timeout"
        except StorageFailed as failed:
            done, reason = failed.done, failed.reason
        assert 0 <= done <= 5
        assert reason == "timeout"
        assert store.get(range(5)) == 5, "the next call works"

    def test_several_threads_at_once(self, store: NumberedBlocks) -> None:
        wrong: list[object] = []

        def work(first: int) -> None:
            try:
                for number in range(first, first + 20, 4):
                    run = range(number, number + 4)
                    if not store.put(run) == store.get(run) == store.has(run) == 4:
                        wrong.append(run)
            except BaseException as error:
                wrong.append(error)

        # half of each run is another thread's too
        threads = [threading.Thread(target=work, args=(10 * place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_counters_count(self, store: NumberedBlocks) -> None:
        store.put(range(3))
        store.get(range(4))
        counters = store.backend.counters()
        assert all(isinstance(count, int) and count >= 0 for count in counters.values())
        assert (counters.get("stored"), counters.get("hits"), counters.get("misses")) == (3, 3, 1)

    def test_close_may_come_twice(self, store: NumberedBlocks) -> None:
        store.put(range(2))
        store.backend.close()
        store.backend.close()
