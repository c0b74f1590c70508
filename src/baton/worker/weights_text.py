"""Description of the weights' arithmetic for users: "4-bit weights as in the file"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod

from baton.config import WorkerConfig
from baton.models.loaders.weights import StoredTensor
from baton.models.quantise import type_for
from baton.models.tensor_types import BF16, F8_E4M3, F16, F32, F64, TensorType

FLOATS = {F64: "float64", F32: "float32", F16: "float16", BF16: "bfloat16", F8_E4M3: "fp8"}


def weights_text(stored: Mapping[str, StoredTensor], config: WorkerConfig) -> str:
    """Describes a model on the device of `config`, by the type of most of its weights."""
    in_file = _most(stored, lambda name, tensor: _words(tensor.type))
    if config.device == "cuda":
        fp8 = config.quantization == "fp8" or in_file == "fp8"
        computed = "fp8" if fp8 else str(config.dtype)
    else:
        computed = _most(stored, lambda name, tensor: _words(type_for(tensor, name, config.quantization)))
    if config.load_format == "dummy":
        return f"random {computed} weights"
    return f"{computed} weights" + (" as in the file" if computed == in_file else f" ({in_file} in the file)")


def _most(stored: Mapping[str, StoredTensor], words_of: Callable[[str, StoredTensor], str]) -> str:
    counted: Counter[str] = Counter()
    for name, tensor in stored.items():
        counted[words_of(name, tensor)] += prod(tensor.shape)
    return counted.most_common(1)[0][0]


def _words(kind: TensorType) -> str:
    """The types of blocks in words, by the bits of a number: the first digit of their name. Shared scales are not counted."""
    return FLOATS.get(kind) or f"{next(filter(str.isdigit, kind.name))}-bit"
