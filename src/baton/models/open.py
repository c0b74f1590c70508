"""Opens a model's files without loading weights: config, recommended sampling, list of tensors."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from baton.errors import InvalidConfig, ModelFileBroken
from baton.models.aliases import recommended_by_authors
from baton.models.architecture import Architecture
from baton.models.config import ModelConfig
from baton.models.config_from_gguf import config_from_gguf
from baton.models.config_from_hf import config_from_hf
from baton.models.encoders.config import EncoderConfig
from baton.models.encoders.families import classifies, encoder_family
from baton.models.encoders.opening import encoder_config
from baton.models.files import MappedFile, read_json
from baton.models.generation import recommended_by_gguf, recommended_by_hf
from baton.models.loaders.arranged import ArrangedWeights, Arrangement
from baton.models.loaders.gguf import GGUFWeights
from baton.models.loaders.gguf_reader import GGUFFile
from baton.models.loaders.packed_int4 import PackedInt4
from baton.models.loaders.safetensors import OUR_LAYER_NAMES, SafetensorsWeights, our_name
from baton.models.loaders.stacked_experts import StackedExperts
from baton.models.loaders.weights import WeightSource
from baton.models.packing import packing_of
from baton.models.pooling import pooling_by_gguf, pooling_by_hf
from baton.models.registry import architecture
from baton.models.scoring import scoring_by_gguf, scoring_by_hf, scoring_of_head
from baton.models.tensor_types import F8_E4M3
from baton.models.text_part import is_wrapper, text_config, text_name

EXTRA_LAYERS_MAX = 16
"""Maximum of layers behind the last that predict further tokens; models have one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    path: Path
    config: ModelConfig
    weights: WeightSource
    recommended: Mapping[str, Any] = field(default_factory=dict)
    "The authors' recommended sampling, for generation.sampling_defaults()."
    files: Sequence[MappedFile] = ()
    "Files of the weights."
    pooling: str = ""
    "The authors' pooling of embeddings (models/pooling.py). Empty: not stated."
    scoring: str = ""
    "How the model scores a pair of texts (models/scoring.py). Empty: the model was not trained for that."


@dataclass(frozen=True, slots=True)
class OpenedEncoder:
    """An opened encoder (models/encoders/)."""

    path: Path
    config: EncoderConfig
    weights: WeightSource
    files: Sequence[MappedFile] = ()
    pooling: str = ""
    scoring: str = ""
    recommended: Mapping[str, Any] = field(default_factory=dict)
    "Recommended sampling: none, because an encoder samples nothing."


Opened = OpenedModel | OpenedEncoder


def open_any(path: Path) -> Opened:
    """Opens the model at this path, a decoder or an encoder."""
    if path.is_dir() and encoder_family(read_json(path / "config.json")) is not None:
        return open_encoder(path)
    return open_model(path)


def open_encoder(folder: Path) -> OpenedEncoder:
    _require_little_endian()
    raw, origin = read_json(folder / "config.json"), str(folder / "config.json")
    family = encoder_family(raw)
    assert family is not None
    config = encoder_config(folder, raw, origin)
    files = SafetensorsWeights(folder, partial(family.our_name, classifies=classifies(raw)))
    return OpenedEncoder(folder, config, files, files.files, pooling_by_hf(folder), scoring_of_head(config.head))


def open_model(path: Path) -> OpenedModel:
    """Reads the config and lists the tensors; no weights are read. `path`: from names.resolve()."""
    _require_little_endian()
    if path.is_dir():
        file_name = path / "generation_config.json"
        generation = read_json(file_name) if file_name.is_file() else {}
        raw_config, origin = read_json(path / "config.json"), str(path / "config.json")
        config = config_from_hf(raw_config, origin=origin, generation=generation)
        model = architecture(config.architecture)
        files = SafetensorsWeights(path, _rename(model, raw_config, config.layers))
        if files.left_out and is_wrapper(raw_config):
            log.info("%s: only text is served; %d tensors for images are skipped", path, len(files.left_out))
        elif files.left_out:
            log.info("%s: %d tensors of heads that predict further tokens are skipped", path, len(files.left_out))
        if not raw_config.get("quantization_config"):
            _refuse_fp8_of_unknown_kind(files, origin)
        source: WeightSource = StackedExperts(files, config) if model.hf_stacked_experts else files
        if (packing := packing_of(text_config(raw_config, origin).get("quantization_config"), origin)) is not None:
            source = PackedInt4(source, config, packing)
        arranged = ArrangedWeights(source, config, Arrangement(model.hf_pairs, model.norm_plus_one))
        pooling, scoring = pooling_by_hf(path), scoring_by_hf(path, config.architecture)
        return OpenedModel(path, config, arranged, recommended_by_hf(generation), files.files, pooling, scoring)
    file = GGUFFile(path)
    config = config_from_gguf(file)
    recommended = recommended_by_gguf(file.metadata) or recommended_by_authors(path)
    model = architecture(config.architecture)
    weights = ArrangedWeights(GGUFWeights(file, model, config.layers), config, Arrangement(model.gguf_pairs))
    pooling, scoring = pooling_by_gguf(file.metadata), scoring_by_gguf(path, config.architecture, file.metadata)
    return OpenedModel(path, config, weights, recommended, (file,), pooling, scoring)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise InvalidConfig(
            "this processor stores the high byte of a number first, model files the low one: their numbers would be wrong; "
            "use a little-endian machine (x86-64 or ARM64)"
        )


def _rename(model: type[Architecture], raw: Mapping[str, Any], layers: int) -> Callable[[str], str]:
    """Our name of a tensor, as a function. `raw`: config.json; the files may also hold tensors for images, and heads that
    predict further tokens."""
    rename = partial(our_name, layer_names={**OUR_LAYER_NAMES, **model.hf_layer_names})
    if is_wrapper(raw):
        return lambda name: rename(text_name(name))
    more = raw.get("num_nextn_predict_layers")
    behind = range(layers, layers + (more if isinstance(more, int) and 0 < more <= EXTRA_LAYERS_MAX else 0))
    skipped = (*model.hf_extra_heads, *(f"model.layers.{number}." for number in behind))
    return lambda name: "" if name.startswith(skipped) else rename(name)


def _refuse_fp8_of_unknown_kind(weights: WeightSource, origin: str) -> None:
    """Refuses fp8 without a config: scales of other block sizes may have the same shape."""
    for stored in weights.stored().values():
        if stored.type == F8_E4M3:
            raise ModelFileBroken(
                f"{origin}: there is no quantization_config, but {stored.origin} is in fp8: the size of its blocks is unknown"
            )
