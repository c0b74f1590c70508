"""A model's weights in the order in which the products read them (csrc/matrix.h).

Several tensors that take the same input become one matrix: queries, keys and values; gate and up, whose outputs alternate
sixteen by sixteen so that a gate and what it lets through come out of the same product. All matrices lie in one arena of
large pages: a token reads every byte of it once, and with small pages looking up addresses would take a good part of that.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_int64

import numpy as np
from numpy.typing import NDArray

from baton.config import Quantization
from baton.errors import EngineError
from baton.models.config import ModelConfig
from baton.models.dequantise import dequantise
from baton.models.loaders.weights import RawWeights
from baton.models.parameters import EMBED, FINAL_NORM, LM_HEAD
from baton.models.quantise import to_q8_0, weights_as
from baton.models.raw_tensor import Bytes, Floats, RawTensor
from baton.models.tensor_types import F32, Q4_0, Q4_1, Q8_0, TensorType
from baton.native import library as c
from baton.native.library import Block, Library, Matrix

CELL = 32
PAIR = CELL // 2
LARGE_PAGE = 2 << 20

KINDS: dict[TensorType, int] = {F32: c.F32, Q8_0: c.INT8, Q4_0: c.INT4, Q4_1: c.INT4M}

Places = NDArray[np.int64]


class Arena:
    """Memory for all matrices. Reserved for the worst case: a page that nobody writes to costs nothing."""

    def __init__(self, nbytes: int) -> None:
        try:
            # Private: what is shared lies in a file system in memory, which has small pages only.
            self._map = mmap.mmap(-1, nbytes + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise EngineError(f"{nbytes / 2**30:.2f} GiB for the weights cannot be reserved: {error}") from error
        with suppress(AttributeError, OSError):  # a system without large pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self._used = -self._bytes.ctypes.data % LARGE_PAGE

    def take(self, nbytes: int) -> Bytes:
        begin = self._used
        self._used += -(-nbytes // 64) * 64
        return self._bytes[begin : begin + nbytes]


class PackedModel:
    """Everything the library needs of a model, in memory that lives as long as this."""

    def __init__(self, library: Library, config: ModelConfig, weights: RawWeights, quantization: Quantization) -> None:
        self.config = config
        self._library = library
        self._weights = weights
        self._quantization = quantization
        self._arena = Arena(_worst_case(config))
        self._kept: list[NDArray[np.generic]] = []
        embedding = self._take(EMBED)
        self.embedding, self.embedding_kind = embedding.data, KINDS[embedding.type]
        self.blocks = (Block * config.layers)(*(self._block(layer) for layer in range(config.layers)))
        self.final_norm = self._vector(FINAL_NORM)
        self.head = self._matrix([embedding if config.tied_embeddings else self._take(LM_HEAD)])
        weights.close()

    def _block(self, layer: int) -> Block:
        prefix, traits = f"layers.{layer}.", self.config.traits
        attention, mlp = f"{prefix}attention.", f"{prefix}mlp."
        return Block(
            attention_norm=self._vector(f"{prefix}attention_norm.weight"),
            mlp_norm=self._vector(f"{prefix}mlp_norm.weight"),
            q_norm=self._vector(f"{attention}q_norm.weight") if traits.qk_norm else None,
            k_norm=self._vector(f"{attention}k_norm.weight") if traits.qk_norm else None,
            qkv=self._linear([f"{attention}q", f"{attention}k", f"{attention}v"], bias=traits.qkv_bias),
            output=self._linear([f"{attention}o"], bias=traits.output_bias),
            gate_up=self._linear([f"{mlp}gate", f"{mlp}up"], bias=traits.mlp_bias, paired=True),
            down=self._linear([f"{mlp}down"], bias=traits.mlp_bias),
            window=self.config.window(layer) or 0,
        )

    def _linear(self, names: Sequence[str], *, bias: bool, paired: bool = False) -> Matrix:
        raws = [self._take(f"{name}.weight") for name in names]
        biases = [dequantise(self._weights.take(f"{name}.bias")).reshape(-1) for name in names] if bias else []
        return self._matrix(raws, biases, paired=paired)

    def _matrix(self, raws: Sequence[RawTensor], biases: Sequence[Floats] = (), *, paired: bool = False) -> Matrix:
        raws = _of_one_type(raws)
        sizes = [raw.rows for raw in raws]
        places = _paired_places(sizes[0]) if paired else np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        outputs = 1 + max(int(part[-1]) for part in places)
        matrix = Matrix(KINDS[raws[0].type], paired, outputs, raws[0].row_elements)
        sizes_of_parts = (c_int64 * 3)()
        self._library.plan(matrix, sizes_of_parts)
        matrix.numbers, matrix.scales, matrix.minima = (self._arena.take(nbytes).ctypes.data for nbytes in sizes_of_parts)
        for raw, where in zip(raws, places, strict=True):
            rows, order = np.ascontiguousarray(raw.data), np.ascontiguousarray(where, np.int64)
            self._library.pack(matrix, rows.ctypes.data, rows.shape[1], order.ctypes.data, len(order))
        if biases:
            bias = np.zeros(matrix.cells * CELL, np.float32)
            bias[np.concatenate(places)] = np.concatenate(biases)
            matrix.bias = self._keep(bias)
        return matrix

    def _take(self, name: str) -> RawTensor:
        return weights_as(self._weights.take(name), name, self._quantization)

    def _vector(self, name: str) -> int:
        return self._keep(dequantise(self._weights.take(name)).reshape(-1))

    def _keep(self, array: NDArray[np.float32]) -> int:
        array = np.ascontiguousarray(array, np.float32)
        self._kept.append(array)
        return array.ctypes.data


def _of_one_type(raws: Sequence[RawTensor]) -> Sequence[RawTensor]:
    """A file may store the parts of one matrix differently. Then they all become what loses least."""
    kinds = {raw.type for raw in raws}
    if len(kinds) == 1:
        return raws
    if F32 in kinds:
        return [RawTensor.of_floats(dequantise(raw)) for raw in raws]
    return [raw if raw.type == Q8_0 else to_q8_0(dequantise(raw)) for raw in raws]


def _paired_places(width: int) -> list[Places]:
    """Gate i and up i are PAIR outputs apart."""
    rows = np.arange(width)
    gates = rows // PAIR * CELL + rows % PAIR
    return [gates, gates + PAIR]


def _worst_case(config: ModelConfig) -> int:
    """All matrices in float32, each rounded up to whole cells."""
    hidden, inner = config.hidden_size, config.intermediate_size
    rounded = CELL * 4 * (hidden + config.q_size + inner) * 4
    qkv = (config.q_size + 2 * config.kv_size) * hidden
    layer = 4 * (qkv + config.q_size * hidden + 3 * hidden * inner) + rounded
    return config.layers * layer + 4 * (config.vocab_size + CELL) * hidden
