"""Sampling settings by slot: columns, written when a sequence gets the slot.

A step reads its rows by indexing. Settings that are not a single number (words, biases, counts of tokens) are in the slot's
SequenceSampling.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from baton.worker.arrays import Bools, Int64s
from baton.worker.draws import DRAW, Draws, Words, uniforms
from baton.worker.sampling_state import SequenceSampling, waits_for_tokens

NONE: Int64s = np.zeros(0, np.int64)


class SamplingColumns:
    __slots__ = ("_changed", "_counted", "draws", "indices", "on_host", "seeds", "states", "waits")

    def __init__(self, slots: int) -> None:
        self.draws: Draws = np.zeros(slots, DRAW)
        "Temperature, top_k, top_p and min_p. The uniform number differs per token (draws_at)."
        self.seeds: Words = np.zeros(slots, np.uint64)
        self.indices: Words = np.zeros(slots, np.uint64)
        self.on_host: Bools = np.zeros(slots, np.bool_)
        "Whether the slot's logits are processed on the host."
        self.waits: Bools = np.zeros(slots, np.bool_)
        "Whether the slot's tokens so far must be known, on any executor."
        self.states: list[SequenceSampling | None] = [None] * slots
        self._changed: dict[int, None] = {}
        self._counted: list[tuple[int, int]] = []

    def assign_slot(self, slot: int, state: SequenceSampling) -> None:
        self.states[slot] = state
        self.draws[slot] = state.draw
        self.seeds[slot] = state.seed
        self.indices[slot] = state.index
        self.on_host[slot] = state.on_host
        self.waits[slot] = waits_for_tokens(state.params)
        self._changed[slot] = None

    def count(self, slot: int, tokens: Iterable[int]) -> None:
        """Record tokens of a slot with penalties, beyond the one that each step counts itself."""
        self._counted += [(slot, token) for token in tokens]

    def drop(self, slot: int) -> None:
        self.states[slot] = None
        self.on_host[slot] = self.waits[slot] = False

    def take_changed(self) -> Int64s:
        """Slots whose columns were written since the last call: for executors with a copy."""
        if not self._changed:
            return NONE
        slots = np.array(list(self._changed), np.int64)
        self._changed.clear()
        return slots

    def take_counted(self) -> Int64s:
        """[2, tokens] slots and tokens of `count` since the last call: for executors with a copy, before take_changed."""
        counted = np.array(self._counted, np.int64).reshape(-1, 2).T
        self._counted.clear()
        return counted

    @property
    def has_changes(self) -> bool:
        """Whether take_changed or take_counted has something."""
        return bool(self._changed or self._counted)

    @property
    def has_counted(self) -> bool:
        return bool(self._counted)

    def draws_at(self, slots: Int64s, positions: Int64s) -> Draws:
        """Draw settings of the next token of each slot; `positions`: number of earlier output tokens."""
        draws: Draws = self.draws[slots]
        if draws["temperature"].any():
            draws["uniform"] = uniforms(self.seeds[slots], self.indices[slots], positions.astype(np.uint64))
        return draws
