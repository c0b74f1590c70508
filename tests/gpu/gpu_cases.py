"""Random inputs for kernels: fresh ones for every test, outputs and unused memory poisoned with not-a-number."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch

SEEDS = itertools.count(20261116)


@dataclass
class Place:
    device: str
    dtype: torch.dtype
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(next(SEEDS)))

    @property
    def tolerance(self) -> float:
        """Of the norm of the difference relative to the norm of the reference."""
        return 1e-5 if self.dtype == torch.float32 else 6e-3

    def random(self, *shape, scale=1.0, dtype=None):
        values = self.rng.standard_normal(shape, np.float32) * scale
        return torch.from_numpy(values).to(self.device, dtype or self.dtype)

    def poisoned(self, *shape, dtype=None):
        return torch.full(shape, float("nan"), dtype=dtype or self.dtype, device=self.device)

    def ints(self, values):
        return torch.tensor(np.asarray(values), dtype=torch.int32, device=self.device)

    def check(self, found, wanted, times=1.0):
        assert found.shape == wanted.shape
        assert torch.isfinite(found).all(), "something was not written, or poison was read"
        found, wanted = found.double(), wanted.double()
        error = ((found - wanted).norm() / wanted.norm()).item()
        assert error < self.tolerance * times, f"relative error {error}"


@dataclass
class Shape:
    heads: int = 8
    kv_heads: int = 2
    dim: int = 32
    block_size: int = 16
    layers: int = 2
    norm: bool = False
    window: int | None = None

    @property
    def scale(self) -> float:
        return self.dim**-0.5


class PagedBatch:
    """Sequences whose keys and values lie in random blocks of a poisoned pool; rows of this step are not in it yet."""

    def __init__(self, place: Place, shape: Shape, contexts, counts):
        self.place, self.shape = place, shape
        self.contexts, self.counts = np.array(contexts, np.int64), np.array(counts, np.int64)
        sequences = len(self.contexts)
        lengths = self.contexts + self.counts
        width = max(1, -(-int(lengths.max(initial=1)) // shape.block_size)) + 1
        count = int((-(-lengths // shape.block_size)).sum()) + 3
        numbers = place.rng.permutation(count)
        self.tables_np = np.full((sequences + 2, width), 2**30, np.int32)  # outside the pool: must not be looked up
        self.slots_np = place.rng.permutation(sequences + 2)[:sequences]
        used = 0
        self.pool = place.poisoned(count, shape.layers, 2, shape.kv_heads, shape.block_size, shape.dim)
        for sequence, slot in enumerate(self.slots_np):
            need = -(-int(lengths[sequence]) // shape.block_size)
            self.tables_np[slot, :need] = numbers[used : used + need]
            used += need
            position = np.arange(int(self.contexts[sequence]))
            if len(position):
                blocks = torch.from_numpy(self.tables_np[slot, position // shape.block_size]).long().to(place.device)
                places = torch.from_numpy(position % shape.block_size).to(place.device)
                self.pool[blocks, :, :, :, places] = place.random(len(position), shape.layers, 2, shape.kv_heads, shape.dim)
        self.starts_np = np.concatenate(([0], np.cumsum(self.counts)))
        rows = int(self.starts_np[-1])
        of_row = np.repeat(np.arange(sequences), self.counts)
        self.positions_np = self.contexts[of_row] + np.arange(rows) - self.starts_np[:-1][of_row]
        self.row_slots_np = self.slots_np[of_row]
        self.tables, self.slots = place.ints(self.tables_np), place.ints(self.slots_np)
        self.starts, self.positions = place.ints(self.starts_np), place.ints(self.positions_np)
        self.contexts_t, self.row_slots = place.ints(self.contexts), place.ints(self.row_slots_np)
        self.rows = rows
        self.qkv = place.random(rows, (shape.heads + 2 * shape.kv_heads) * shape.dim)

    def angles(self, positions=None):
        count = (int(self.positions_np.max(initial=0)) + 1) if positions is None else positions
        turns = self.place.rng.uniform(0, 6.3, (count, self.shape.dim // 2)).astype(np.float32)
        turns = torch.from_numpy(turns).to(self.place.device)
        return turns.cos(), turns.sin()

    def store(self, layer: int) -> torch.Tensor:
        """Keys and values of the rows go to the pool as they are; the queries."""
        shape = self.shape
        one, zero = (
            torch.full((int(self.positions_np.max()) + 1, shape.dim // 2), v, device=self.place.device) for v in (1.0, 0.0)
        )
        import plain

        return plain.rope_store(
            self.qkv, None, 0.0, (one, zero), self.positions, self.row_slots, self.tables, self.pool, layer, heads=shape.heads
        )
