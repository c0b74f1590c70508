"""Name in, model out: the walk through all the stages that models/__init__.py lists."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from baton.models.config import ModelConfig
from baton.models.config_from_gguf import config_from_gguf
from baton.models.config_from_hf import config_from_hf
from baton.models.decoder import Decoder
from baton.models.files import read_json
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.gguf import GGUFWeights
from baton.models.loaders.gguf_reader import GGUFFile
from baton.models.loaders.safetensors import SafetensorsWeights
from baton.models.loaders.weights import Progress, Weights, WeightSource
from baton.models.names import resolve
from baton.models.registry import architecture
from baton.models.tokenizer_source import TokenizerSource, tokenizer_in_folder, tokenizer_in_gguf


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model's files, looked at and not yet loaded."""

    path: Path
    config: ModelConfig
    tokenizer: TokenizerSource
    weights: WeightSource


@dataclass(frozen=True, slots=True)
class LoadedModel:
    path: Path
    "The folder or .gguf file."
    config: ModelConfig
    model: Decoder
    tokenizer: TokenizerSource

    @property
    def chat_template(self) -> str | None:
        return self.tokenizer.chat_template


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """`name` is a folder, a .gguf file, an alias or a Hugging Face id. `progress` is told (bytes done, bytes in all),
    from 0 to the total twice where a model has to be fetched first."""
    opened = open_model(resolve(name, progress=progress))
    model = build_model(opened.config, opened.weights, dtype=dtype, device=device, progress=progress)
    return LoadedModel(opened.path, opened.config, model, opened.tokenizer)


def open_model(path: Path) -> OpenedModel:
    """Config, tokenizer and a list of the tensors; no weights are read. `path` is what names.resolve() gave."""
    if path.is_dir():
        generation = path / "generation_config.json"
        config = config_from_hf(
            read_json(path / "config.json"),
            origin=str(path / "config.json"),
            generation=read_json(generation) if generation.is_file() else None,
        )
        return OpenedModel(path, config, tokenizer_in_folder(path), SafetensorsWeights(path))
    file = GGUFFile(path)
    config = config_from_gguf(file)
    return OpenedModel(path, config, tokenizer_in_gguf(file), GGUFWeights(file, config))


def build_model(
    config: ModelConfig,
    source: WeightSource,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Decoder:
    weights = Weights(source, config, dtype=dtype, device=device, progress=progress)
    with torch.inference_mode():
        model = architecture(config.architecture)(config, weights)
    weights.close()
    return model


def dummy_model(
    config: ModelConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """A model of this shape with random weights; the same seed gives the same model everywhere."""
    return build_model(config, DummyWeights(config, seed), dtype=dtype, device=device)
