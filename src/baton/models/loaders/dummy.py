"""Random weights of any shape: for tests, for benchmarks without a download, for a cluster's dry run.

A tensor depends only on the seed and its name, so two processes, or two versions with another loading order, get the same
model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from math import prod

import numpy as np

from baton.models.config import ModelConfig
from baton.models.encoders.config import EncoderConfig
from baton.models.loaders.weights import StoredTensor
from baton.models.parameters import expected_shapes
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import F32


class DummyWeights:
    def __init__(self, config: ModelConfig | EncoderConfig, seed: int = 0) -> None:
        self.origin = f"dummy weights (seed {seed})"
        self._seed = seed
        self._shapes = expected_shapes(config)

    def stored(self) -> Mapping[str, StoredTensor]:
        return {
            name: StoredTensor(F32, shape, F32.row_bytes(prod(shape)), f"{self.origin}: {name}")
            for name, shape in self._shapes.items()
        }

    def raw(self, name: str) -> RawTensor:
        shape = self._shapes[name]
        generator = np.random.Generator(np.random.SFC64(zlib.crc32(f"{self._seed} {name}".encode())))
        values = generator.standard_normal(shape, np.float32)
        if name.endswith("norm.weight"):
            values *= 0.1
            values += 1.0
        elif name.endswith(".bias"):
            values *= 0.1
        else:
            # Keeps the size of activations constant through the layers, so that logits are neither flat nor infinite.
            values *= shape[-1] ** -0.5
        return RawTensor.of_floats(values)
