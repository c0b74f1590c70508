"""Opens an encoder's folder without loading: config.json, and sentence-transformers' settings of its use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from baton.models.config_fields import ConfigFields
from baton.models.encoders.config import EncoderConfig
from baton.models.encoders.families import encoder_config_from_hf
from baton.models.encoders.pair_types import pair_separator
from baton.models.files import read_json, read_json_list

LENGTHS: Final = (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length"))
"""Names of files with the maximum input length of sentence-transformers; the first that has it counts."""


def encoder_config(folder: Path, raw: Mapping[str, Any], origin: str) -> EncoderConfig:
    """The config of an encoder, with sentence-transformers' settings. `raw`: config.json."""
    config = encoder_config_from_hf(raw, origin)
    longest = min(config.context_tokens_max - 1, _longest_input(folder) or config.context_tokens_max)
    separator = pair_separator(folder) if config.head is not None and config.types > 1 else None
    normalised = config.head is None and _normalises(folder)
    return replace(config, context_tokens_max=longest + 1, pair_separator=separator, normalised=normalised)


def _longest_input(folder: Path) -> int | None:
    for name, key in LENGTHS:
        if (folder / name).is_file() and (found := ConfigFields(read_json(folder / name), str(folder / name)).get(key)):
            return int(ConfigFields({key: found}, str(folder / name)).positive(key))
    return None


def _normalises(folder: Path) -> bool:
    """Whether vectors are scaled to length 1. Without modules.json they are, as those of decoders."""
    if not (folder / "modules.json").is_file():
        return True
    modules = [module for module in read_json_list(folder / "modules.json") if isinstance(module, dict)]
    return any(str(module.get("type", "")).endswith(".Normalize") for module in modules)
