"""Sequences in a paged pool, and random ways to get through them: any chunks, any neighbours, blocks in any order."""

from __future__ import annotations

import random

import numpy as np

from baton.worker.flat_batch import Spans

Part = tuple[int, int, int]
"""(sequence, tokens before this step, tokens in this step)."""

NO_BLOCK = 10**6
"""Where a table has no entry: who follows it reads far outside."""


class Paged:
    """Block tables of sequences of these lengths."""

    def __init__(self, lengths: list[int], block_size: int, seed: int = 0) -> None:
        needed = [-(-n // block_size) for n in lengths]
        self.lengths = lengths
        self.blocks = sum(needed) + 2
        shuffled = np.random.default_rng(seed).permutation(self.blocks).astype(np.int32)
        self.tables = np.full((len(lengths), max(needed) + 1), NO_BLOCK, np.int32)
        for slot, count in enumerate(needed):
            self.tables[slot, :count] = shuffled[sum(needed[:slot]) :][:count]

    def spans(self, parts: list[Part]) -> Spans:
        starts = np.cumsum([0, *(count for _, _, count in parts)]).astype(np.int64)
        return Spans(self.tables, np.array([p[0] for p in parts], np.int64), starts, np.array([p[1] for p in parts], np.int64))

    def all_at_once(self) -> list[Part]:
        return [(sequence, 0, n) for sequence, n in enumerate(self.lengths)]


def random_steps(rng: random.Random, lengths: list[int]) -> list[list[Part]]:
    """Every sequence from its first token to its last, in chunks of any size, in steps with any neighbours."""
    done, steps = [0] * len(lengths), []
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        parts = []
        for sequence, n in enumerate(lengths):
            if done[sequence] < n and rng.random() < 0.7:
                count = min(rng.choice([1, 1, 2, 5, 33, 120]), n - done[sequence])
                parts.append((sequence, done[sequence], count))
                done[sequence] += count
        if parts:
            rng.shuffle(parts)
            steps.append(parts)
    return steps
