"""Which architecture a model is of. An unknown name is refused with the list of those we run."""

from __future__ import annotations

from collections.abc import Iterable

from baton.errors import ModelUnsupported
from baton.models.architecture import Architecture
from baton.models.llama import Llama
from baton.models.qwen2 import Qwen2
from baton.models.qwen3 import Qwen3
from baton.models.qwen3_moe import Qwen3Moe

ARCHITECTURES: dict[str, type[Architecture]] = {model.name: model for model in (Llama, Qwen2, Qwen3, Qwen3Moe)}

_BY_HF_NAME = {name: model for model in ARCHITECTURES.values() for name in model.hf_names}
_BY_GGUF_NAME = {model.gguf_name: model for model in ARCHITECTURES.values()}


def architecture(name: str) -> type[Architecture]:
    """By our own name, as in ModelConfig.architecture."""
    return _look_up(ARCHITECTURES, name, "model config")


def architecture_of_hf(names: Iterable[str], origin: str) -> type[Architecture]:
    """By the `architectures` of a config.json; the first that we know wins."""
    names = list(names)
    known = [name for name in names if name in _BY_HF_NAME]
    return _look_up(_BY_HF_NAME, known[0] if known else ", ".join(names) or "(none given)", origin)


def architecture_of_gguf(name: str, origin: str) -> type[Architecture]:
    """By the `general.architecture` of a GGUF file."""
    return _look_up(_BY_GGUF_NAME, name, origin)


def _look_up(table: dict[str, type[Architecture]], name: str, origin: str) -> type[Architecture]:
    if name not in table:
        raise ModelUnsupported(f"{origin}: architecture {name} is not supported; supported are {', '.join(table)}")
    return table[name]
