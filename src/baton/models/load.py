"""Builds a torch model from weights: the last stage in models/__init__.py."""

from __future__ import annotations

import torch

from baton.config import Quantization
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.loaders.weights import Progress, RawWeights, WeightSource
from baton.models.ranks import TensorCollective
from baton.models.torch_weights import Weights


def build_model(
    config: ModelConfig,
    source: WeightSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
    progress: Progress | None = None,
    collective: TensorCollective | None = None,
) -> Decoder:
    raw = RawWeights(source, config, progress)
    with torch.inference_mode():
        model = Decoder(config, Weights(raw, dtype=dtype, device=device, quantization=quantization), collective)
    raw.close()
    return model
