"""What the draft model's blocks hold, against a naive record of every token's prefix."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.worker.drafters.draft_kv import DraftKV

SIZE, BLOCKS, SLOTS = 4, 12, 3


class Naive:
    """By place of the pool: the whole prefix of the token whose KV was written there last. Valid KV was computed behind valid
    KV, of which nothing was overwritten since."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}

    def write(self, table: list[int], begin: int, tokens: list[int], end: int) -> None:
        for at in range(begin, end):
            self.places[table[at // SIZE], at % SIZE] = tuple(tokens[: at + 1])

    def valid(self, table: list[int], tokens: list[int]) -> int:
        count = 0
        while count < len(tokens) and self.places.get((table[count // SIZE], count % SIZE)) == tuple(tokens[: count + 1]):
            count += 1
        return count


def some_tokens(rng: random.Random, count: int) -> list[int]:
    """Few tokens, so that sequences often have equal beginnings."""
    return [rng.randrange(2) for _ in range(count)]


@pytest.mark.parametrize("seed", range(30))
def test_drawn_sequences(seed):
    """Sequences come and go, grow, share and take over blocks, and are computed in parts, also with refused drafts. What
    is called valid is so; and all that is valid is found, but behind a block that was written again from its middle on."""
    rng, kv, naive = random.Random(seed), DraftKV(slots=SLOTS, blocks=BLOCKS, block_size=SIZE), Naive()
    tokens: list[list[int]] = [[] for _ in range(SLOTS)]
    tables: list[list[int]] = [[0] * 6 for _ in range(SLOTS)]
    found = most = 0
    for _ in range(300):
        slot = rng.randrange(SLOTS)
        if not tokens[slot] or rng.random() < 0.1:
            kv.assign_slot(slot)
            tokens[slot] = some_tokens(rng, rng.randint(1, 12))
            tables[slot] = rng.sample(range(BLOCKS), 6)
        if rng.random() < 0.2:  # folded
            tables[slot][rng.randrange(6)] = rng.randrange(BLOCKS)
        if len(set(tables[slot])) < 6:
            tables[slot] = rng.sample(range(BLOCKS), 6)
        if rng.random() < 0.5 and len(tokens[slot]) < 14:
            tokens[slot] += some_tokens(rng, rng.randint(1, 3))
        table, known = np.array(tables[slot], np.int32), np.array(tokens[slot], np.int32)
        begin = kv.valid(slot, known, table)
        assert begin <= naive.valid(tables[slot], tokens[slot])
        found, most = found + begin, most + naive.valid(tables[slot], tokens[slot])
        end = rng.randint(begin, len(known))
        if end > begin:
            kv.write(slot, table, begin, known[begin:end])
            naive.write(tables[slot], begin, tokens[slot], end)
        if end == len(known):  # drafts
            drafts = some_tokens(rng, rng.randint(0, 4))
            for place in range(len(drafts)):
                kv.write(slot, table, end + place, np.array(drafts[place : place + 1], np.int32))
            naive.write(tables[slot], end, tokens[slot] + drafts, end + len(drafts))
            if rng.random() < 0.5 and len(tokens[slot]) < 14:
                tokens[slot] += drafts[: rng.randint(0, len(drafts))]
        assert kv.valid(slot, known, table) >= begin
    assert found > 0.9 * most


def test_a_block_that_is_overwritten_from_its_beginning_is_not_valid_by_its_end():
    kv, table = DraftKV(slots=2, blocks=2, block_size=4), np.array([0, 1], np.int32)
    first, second = np.array([1, 2, 3, 4], np.int32), np.array([1, 9], np.int32)
    kv.valid(0, first, table)
    kv.write(0, table, 0, first)
    assert kv.valid(1, second, table) == 1
    kv.write(1, table, 1, second[1:])
    assert kv.valid(0, first, table) == 1


def test_positions_count():
    """The same tokens in another order, and shifted."""
    kv, table = DraftKV(slots=2, blocks=2, block_size=4), np.array([0, 1], np.int32)
    kv.valid(0, np.array([5, 6, 5, 6, 5], np.int32), table)
    kv.write(0, table, 0, np.array([5, 6, 5, 6, 5], np.int32))
    for other in ([6, 5, 5, 6], [5, 5, 6, 6], [6, 5, 6, 5], [0, 5, 6, 5]):
        kv.assign_slot(1)
        assert kv.valid(1, np.array(other, np.int32), table) < 4


def test_long_sequences_widen_the_arrays():
    kv, table = DraftKV(slots=1, blocks=256, block_size=4), np.arange(256, dtype=np.int32)
    tokens = np.arange(1000, dtype=np.int32)
    for end in (10, 70, 1000):
        begin = kv.valid(0, tokens[:end], table)
        kv.write(0, table, begin, tokens[begin:end])
        assert kv.valid(0, tokens[:end], table) == end
