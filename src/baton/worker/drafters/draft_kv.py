"""Records what the draft model's KV pool holds. Block b of that pool has the KV of the tokens of the main pool's block b.

    tokens of a slot     t0   t1   t2   t3 | t4   t5   t6
    their prefix hashes  h1   h2   h3   h4 | h5   h6   h7       h3: of t0 t1 t2
    record of its blocks h1   h2   h3   h4 | h5   x    x        so t0 to t4 are valid, and t5 is computed next

The draft's KV of a token is valid where the record of its place equals the hash of all tokens up to it. This one rule covers
prefix hits, preemption, folded blocks, evicted and reused blocks, accepted and refused drafts: none of them is reported here.
Hashes may collide, and a block may change behind a sequence: a wrong draft costs time and nothing else.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from baton.worker.arrays import Int32s

Hashes = NDArray[np.uint64]

FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
RADIX: Final = np.uint64(0xD1342543DE82EF95)
NOTHING: Final = np.uint64(0)


class DraftKV:
    def __init__(self, *, slots: int, blocks: int, block_size: int) -> None:
        self._size = block_size
        self._record: Hashes = np.zeros((blocks, block_size), np.uint64)
        "[block, place] hash of the tokens up to the one whose KV is there. Behind the place that was written last: NOTHING."
        self._hashes: Hashes = np.zeros((slots, 64), np.uint64)
        "[slot, position] hash of the tokens up to and with this position."
        self._hashed = [0] * slots
        "Tokens of each slot that are in `_hashes`."
        self._powers: Hashes = np.ones(1, np.uint64)

    def assign_slot(self, slot: int) -> None:
        """Forget the slot's earlier sequence: it has another one now."""
        self._hashed[slot] = 0

    def valid(self, slot: int, tokens: Int32s, table: Int32s) -> int:
        """Number of leading tokens whose KV is in the blocks of the table."""
        hashes, size = self._hashes_of(slot, tokens), self._size
        whole = len(tokens) // size
        # Places are written in order, and later ones are cleared: the last one of a block stands for all of it.
        wrong = np.flatnonzero(self._record[table[:whole], size - 1] != hashes[size - 1 : whole * size : size])
        first = int(wrong[0]) if wrong.size else whole
        rest = hashes[first * size : (first + 1) * size]
        if not rest.size:
            return first * size
        differ = np.flatnonzero(self._record[table[first], : len(rest)] != rest)
        return first * size + (int(differ[0]) if differ.size else len(rest))

    def write(self, slot: int, table: Int32s, begin: int, tokens: Int32s) -> None:
        """Record that the KV of these tokens, from position `begin` on, was computed. The tokens before are those of the last
        `valid`, or drafts that were written since, in order."""
        end, size = begin + len(tokens), self._size
        self._hash(slot, begin, tokens)
        at = np.arange(begin, end)
        self._record[table[at // size], at % size] = self._hashes[slot, begin:end]
        if end % size:
            self._record[table[end // size], end % size :] = NOTHING

    def _hashes_of(self, slot: int, tokens: Int32s) -> Hashes:
        hashed = self._hashed[slot]
        self._hash(slot, hashed, tokens[hashed:])
        self._hashed[slot] = len(tokens)
        return self._hashes[slot, : len(tokens)]

    def _hash(self, slot: int, begin: int, tokens: Int32s) -> None:
        """Stores the hashes of these tokens, from position `begin` on: sums of mixed tokens, times a power per position."""
        end = begin + len(tokens)
        if end > self._hashes.shape[1]:
            wider = np.zeros((len(self._hashes), max(end, 2 * self._hashes.shape[1])), np.uint64)
            wider[:, : self._hashes.shape[1]] = self._hashes
            self._hashes = wider
        if end > len(self._powers):
            self._powers = np.cumprod(np.concatenate(([np.uint64(1)], np.full(2 * end, RADIX))), dtype=np.uint64)
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * FACTOR
        mixed ^= mixed >> np.uint64(32)
        before = self._hashes[slot, begin - 1] if begin else NOTHING
        self._hashes[slot, begin:end] = before + np.cumsum(mixed * self._powers[begin:end], dtype=np.uint64)
