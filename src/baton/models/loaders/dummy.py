"""Random weights of any shape: for tests, for measuring a model nobody has downloaded, for a cluster's dry run.

A tensor depends on the seed and on its own name only, so two processes, or two versions that load in another order, get
the same model.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from baton.models.config import ModelConfig
from baton.models.loaders.weights import StoredTensor
from baton.models.parameters import expected_shapes

FLOAT32_BYTES = 4


class DummyWeights:
    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.origin = f"dummy weights (seed {seed})"
        self._config = config
        self._seed = seed

    def stored(self) -> Mapping[str, StoredTensor]:
        return {
            name: StoredTensor(shape, FLOAT32_BYTES * torch.Size(shape).numel(), f"{self.origin}: {name}")
            for name, shape in expected_shapes(self._config).items()
        }

    def read_into(self, name: str, out: Tensor) -> None:
        # torch's CPU generator looks at 32 bits of its seed only, so both go into one checksum.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        noise = torch.randn(out.shape, generator=generator)
        if name.endswith("norm.weight"):
            noise.mul_(0.1).add_(1.0)
        elif name.endswith(".bias"):
            noise.mul_(0.1)
        else:
            # Keeps the size of activations through the layers, so that logits are neither flat nor infinite.
            noise.mul_(out.shape[-1] ** -0.5)
        out.copy_(noise)
