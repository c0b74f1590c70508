"""Layers of steps with few prompt rows as recorded graphs. Launched call by call such a step is bound by the host, which needs
10 ms for its 320 kernels; the device needs 4 to 12 ms for up to 512 rows.

    packed    | rows: padded | sequences: padded | rows that are decoded: padded | tiles: padded | who is due |
               \\_____________________ read by the graph ___________________________/               \\ by what follows it

Padding is position -1, row -1 or sequence -1: programs with it end at once. Choosing tokens is not in the graph: its time
depends more on the number of due sequences than on launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.worker.cuda.decoder_step import DecoderStep, Hidden
from baton.worker.cuda.step_inputs import InputPacking, MixedPadding, StepBatch, mixed_views, pack_mixed, tiles_of

ROWS = (16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 640)
"""Maximum of rows of a recorded step: from about 512 on the device takes longer than the host."""
DECODED = (0, 16, 64)
"""Rows that are decoded beside prompts. The last size is the maximum of sequences."""


@dataclass(slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    hidden: Hidden


class MixedGraphs:
    def __init__(self, step: DecoderStep, inputs: Tensor) -> None:
        """inputs: device memory to which packed steps are copied."""
        self._step, self._inputs = step, inputs
        limits = step.limits
        self._rows = [rows for rows in ROWS if rows <= limits.rows]
        self._sequences = min(limits.sequences, limits.rows)
        "Maximum of sequences per step, each with a row. The rows of a draft model may be fewer than the slots."
        self._decoded = [*(count for count in DECODED if count < self._sequences), self._sequences]
        self._recorded: dict[MixedPadding, _Recorded] = {}

    def padding_for(self, batch: StepBatch) -> MixedPadding | None:
        """The smallest graph that holds this step; None: none does."""
        rows = next((rows for rows in self._rows if rows >= len(batch.token_ids)), None)
        decoded = next((count for count in self._decoded if count >= batch.decoded_rows), None)
        if rows is None or decoded is None:
            return None
        padding = self._padding(rows, decoded)
        fits = tiles_of(batch, self._step.rows_per_tile) <= padding.tiles
        return padding if fits and padding in self._recorded else None

    def replay(self, padding: MixedPadding) -> None:
        recorded = self._recorded[padding]
        recorded.graph.replay()
        self._step.last_hidden = recorded.hidden

    def capture(self, record: Callable[[Callable[[], None]], torch.cuda.CUDAGraph]) -> None:
        """Record the graphs. record: queues the given call once, then records it."""
        for padding in self._paddings():
            self._capture(padding, record)

    def clear(self) -> None:
        self._recorded.clear()

    def _paddings(self) -> Iterator[MixedPadding]:
        """Padded sizes, largest first, as for decode steps."""
        for rows in reversed(self._rows):
            for place, decoded in enumerate(self._decoded):
                if place == 0 or self._decoded[place - 1] < rows:
                    yield self._padding(rows, decoded)

    def _padding(self, rows: int, decoded: int) -> MixedPadding:
        return MixedPadding(rows, self._sequences, decoded, rows // self._step.rows_per_tile + rows // 8 + 1)

    def _capture(self, padding: MixedPadding, record: Callable[[Callable[[], None]], torch.cuda.CUDAGraph]) -> None:
        step, none = self._step, np.zeros(0, np.int64)
        empty = StepBatch(none, none, np.zeros(1, np.int64), none, np.zeros(0, np.bool_), none)
        run = np.zeros(len(self._inputs), np.int32)
        packing: InputPacking = pack_mixed(
            empty, run, step.config.kv_heads, step.rows_per_tile, fixed=step.deterministic, padding=padding
        )
        inputs: Any = mixed_views(packing, self._inputs)
        self._inputs[: packing.size].copy_(torch.from_numpy(run[: packing.size]))
        graph = record(lambda: step.run_layers(inputs, even=False))
        self._recorded[padding] = _Recorded(graph, step.last_hidden)
