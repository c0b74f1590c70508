"""From a name to a torch model, through all the stages in models/__init__.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from baton.config import Quantization
from baton.models.config import ModelConfig
from baton.models.decoder import Decoder
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.weights import Progress, RawWeights, WeightSource
from baton.models.names import resolve
from baton.models.open import open_model
from baton.models.torch_weights import Weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    path: Path
    "The folder or .gguf file."
    config: ModelConfig
    model: Decoder


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
    progress: Progress | None = None,
) -> LoadedModel:
    """`name`: a folder, a .gguf file, an alias or a Hugging Face id. `progress` is called with (bytes done, bytes in total)
    while the weights are read."""
    opened = open_model(resolve(name))
    model = build_model(opened.config, opened.weights, dtype=dtype, device=device, quantization=quantization, progress=progress)
    return LoadedModel(opened.path, opened.config, model)


def build_model(
    config: ModelConfig,
    source: WeightSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
    progress: Progress | None = None,
) -> Decoder:
    raw = RawWeights(source, config, progress)
    with torch.inference_mode():
        model = Decoder(config, Weights(raw, dtype=dtype, device=device, quantization=quantization))
    raw.close()
    return model


def dummy_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    quantization: Quantization = "none",
) -> Decoder:
    """A model of this shape with random weights; the same seed gives the same model everywhere."""
    return build_model(config, DummyWeights(config, seed), dtype=dtype, device=device, quantization=quantization)
