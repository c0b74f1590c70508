"""Single kernels of the library: teams without a model, matrices by themselves, products as functions."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import numpy as np
import pytest

from baton.models.config import ModelConfig, RopeConfig, Traits
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.weights import RawWeights, StoredTensor
from baton.models.quantise import Quantization
from baton.models.raw_tensor import Floats, RawTensor
from baton.models.tensor_types import F32
from baton.native.build import NoCompiler, find_compiler
from baton.native.library import Library, Matrix, Model, load_variant
from baton.native.packing import PackedModel
from baton.native.variants import Variant, supported_variants


def load(variant: Variant) -> Library:
    """Skips where there is no compiler, or one that does not know these instructions, or a system that forbids them. But
    source that does not compile is our mistake."""
    try:
        find_compiler()
    except NoCompiler as error:
        pytest.skip(str(error))
    try:
        return load_variant(variant)
    except NoCompiler as error:
        if "does not allow" in str(error) or "unrecognized command" in str(error) or "unknown argument" in str(error):
            pytest.skip(str(error))
        raise


def rounds_once(library: Library) -> bool:
    """It multiplies and adds in one rounding."""
    return library.variant.name != "plain"


def fused_libraries(*, nibbles: bool) -> list[Library]:
    """Those that must all give the same bits; on tiles, weights of 4 bits are another thing (csrc/matmul_q4_amx.h)."""
    found = [
        library for library in map(load, supported_variants()) if rounds_once(library) and not (nibbles and library.has_tiles())
    ]
    if len(found) < 2:
        pytest.skip("this processor has no two variants to compare")
    return found


class Team:
    """Threads, and no model."""

    def __init__(self, library: Library, threads: int = 1) -> None:
        self.library = library
        self._model = Model(hidden=32)  # it lives as long as the runner
        self.runner = library.new(self._model, threads)
        assert self.runner

    def __enter__(self) -> Team:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.library.free(self.runner)

    def product(self, matrix: Matrix, x: Floats, outputs: int) -> Floats:
        x = np.ascontiguousarray(x, np.float32)
        out = np.full((len(x), outputs), 1e30, np.float32)
        failed = self.library.product(self.runner, matrix, x.ctypes.data, len(x), out.ctypes.data, outputs)
        assert not failed
        return out


# Matrices, as a model brings them


class GivenWeights(DummyWeights):
    """Some tensors are given, the rest is random."""

    def __init__(self, config: ModelConfig, given: Mapping[str, RawTensor], seed: int = 0) -> None:
        super().__init__(config, seed)
        self._given = given
        assert set(given) <= set(self._shapes)

    def stored(self) -> Mapping[str, StoredTensor]:
        given = {name: StoredTensor(raw.type, raw.shape, raw.data.nbytes, name) for name, raw in self._given.items()}
        return {**super().stored(), **given}

    def raw(self, name: str) -> RawTensor:
        return self._given[name] if name in self._given else super().raw(name)


def small_config(**changes: object) -> ModelConfig:
    sizes: dict[str, object] = {
        "architecture": "llama", "vocab_size": 40, "layers": 1, "hidden_size": 32, "heads": 2, "kv_heads": 1, "head_dim": 16,
        "intermediate_size": 32, "rope": RopeConfig(), "norm_eps": 1e-5, "tied_embeddings": False, "traits": Traits(),
        "context_tokens_max": 512,
    }  # fmt: skip
    return ModelConfig(**{**sizes, **changes})  # type: ignore[arg-type]


def pack(
    library: Library, config: ModelConfig, given: Mapping[str, RawTensor], quantization: Quantization, threads: int = 1
) -> PackedModel:
    return PackedModel(library, config, RawWeights(GivenWeights(config, given), config), quantization, threads)


def packed_head(library: Library, raw: RawTensor) -> PackedModel:
    """A model whose output head is this matrix, as it is stored. The matrix lives as long as the model."""
    config = small_config(vocab_size=raw.shape[0], hidden_size=raw.shape[1])
    return pack(library, config, {"lm_head.weight": raw}, "none" if raw.type == F32 else "auto")
