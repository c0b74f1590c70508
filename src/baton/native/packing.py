"""A model's weights in the order in which the products read them (csrc/matrix.h).

Several tensors that take the same input become one matrix: queries, keys and values; gate and up, whose outputs alternate
sixteen by sixteen so that a gate and what it lets through come out of the same product. All matrices lie in one arena of
large pages: a token reads every byte of it once, and with small pages looking up addresses would take a good part of that.

The library reads rows as the file has them and all threads pack: nothing becomes an array of floats on the way. Matrices of
bytes are packed twice: once to see what activations they meet, and once more with a balance for each input (native/balance.py).
Not so those of a large model that is mostly of four bits: there a balance shows in no figure (docs/internals/quantisation.md),
and costs a third of the start. Nor the output head of a model with weights of four bits, which keeps its groups
(`keeps_groups`).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from ctypes import c_int64
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.config import Quantization
from baton.errors import EngineError, InvariantBroken
from baton.models.config import ModelConfig
from baton.models.dequantise import dequantise
from baton.models.loaders.weights import RawWeights
from baton.models.parameters import EMBED, LM_HEAD, layer_norms
from baton.models.quantise import converted, type_for, weights_as
from baton.models.raw_tensor import Bytes, Floats, RawTensor, TensorFacts
from baton.models.tensor_types import BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, TensorType
from baton.native import library as c
from baton.native.library import GATES, LayerWeights, Library, Matrix, Norm

PANEL = 32
PAIR = PANEL // 2
LINE = 64
LARGE_PAGE = 2 << 20

ATTENTION_INPUTS, ATTENTION_OUTPUT = ("attention.q", "attention.k", "attention.v"), ("attention.o",)
MLP_INPUTS, MLP_OUTPUT = ("mlp.gate", "mlp.up"), ("mlp.down",)
"""What becomes one matrix each."""

KINDS: dict[TensorType, int] = {F32: c.F32, Q8_0: c.Q8_0, Q4_0: c.Q4_0, Q4_1: c.Q4_1}
"""Of matrices."""
STORED: dict[TensorType, int] = {
    **KINDS,
    F16: c.F16,
    BF16: c.BF16,
    Q5_0: c.Q5_0,
    Q5_1: c.Q5_1,
    Q4_K: c.Q4_K,
    Q5_K: c.Q5_K,
    Q6_K: c.Q6_K,
}
"""What the library reads from files."""

LARGE_WEIGHTS = 1 << 30
"""A model of more weights is large."""

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packing:
    """A matrix, and what it is made of."""

    matrix: Matrix
    parts: Sequence[RawTensor]
    places: Sequence[Places]
    balance: Floats
    "Of a matrix of bytes: [inputs], in the library's own memory. Else empty."
    squares: Floats
    "The same: of the weights, summed up over outputs."

    def run(self, library: Library, threads: int, *, sum_squares: bool = False) -> None:
        squares = self.squares.ctypes.data if sum_squares and len(self.squares) else None
        for part, places in zip(self.parts, self.places, strict=True):
            rows, order = np.ascontiguousarray(part.data), np.ascontiguousarray(places, np.int64)
            where = (rows.ctypes.data, rows.shape[1], order.ctypes.data, len(order))
            if library.pack(self.matrix, STORED[part.type], *where, squares, threads):
                raise EngineError("there is not enough memory to pack the weights")


class Arena:
    """Memory for all matrices, no more than they need. It is asked for as a whole, and not with MAP_NORESERVE: what the system
    does not have it should refuse now, and not end the process when it is written to."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
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
        self._used += _whole_lines(nbytes)
        if begin + nbytes > len(self._bytes):
            raise InvariantBroken(f"the weights need more than the {self.nbytes} bytes that were planned for them")
        return self._bytes[begin : begin + nbytes]


class PackedModel:
    """Everything the library needs of a model, in memory that lives as long as this."""

    def __init__(
        self, library: Library, config: ModelConfig, weights: RawWeights, quantization: Quantization, threads: int = 1
    ) -> None:
        self.config = config
        self.threads = threads
        self._library = library
        self._weights: RawWeights | None = weights
        self._quantization = quantization
        planned = plan_model(library, config, weights.stored, quantization)
        self.large, self._balanced, self._grouped = planned.large, planned.balanced, planned.grouped
        self._arena = Arena(planned.nbytes)
        self._kept: list[Floats] = []
        self.of_bytes: list[Packing] = []
        "In the order of `matrices`: to be packed again, with a balance."
        embedding = weights.take(EMBED)
        # Blocks and 16 bits stay as they are, and a token's row is unpacked when it is asked for.
        looked_up = (
            embedding if embedding.type in STORED and embedding.type != F32 else weights_as(embedding, EMBED, quantization)
        )
        # A copy, never a view of the mapped file: whoever writes to the file or cuts it short would change answers, or end
        # the process with SIGBUS.
        self.embedding: Bytes = np.array(looked_up.data)
        self.embedding_kind = STORED[looked_up.type]
        self.blocks = (LayerWeights * config.layers)(*(self._block(layer) for layer in range(config.layers)))
        self.final_norm = self._norm("final_norm")
        self.final_norm_weights = self._final_norm_weights()
        self.head = self._matrix([embedding if config.tied_embeddings else weights.take(LM_HEAD)], [LM_HEAD])
        weights.close()
        self._weights = None  # nothing is read from the files any more, and they are unmapped

    def matrices(self) -> list[Matrix]:
        """Those that the library reads, in the order in which they were packed."""
        return [*(getattr(block, name) for block in self.blocks for name in ("qkv", "output", "gate_up", "down")), self.head]

    def _block(self, layer: int) -> LayerWeights:
        prefix, traits = f"layers.{layer}.", self.config.traits
        attention = f"{prefix}attention."

        def linear(names: Sequence[str], *, bias: bool, paired: bool = False) -> Matrix:
            return self._linear([f"{prefix}{name}" for name in names], bias=bias, paired=paired)

        return LayerWeights(
            **{name: self._norm(f"{prefix}{name}") for name in layer_norms(self.config)},
            q_norm=self._vector(f"{attention}q_norm.weight") if traits.qk_norm else None,
            k_norm=self._vector(f"{attention}k_norm.weight") if traits.qk_norm else None,
            qkv=linear(ATTENTION_INPUTS, bias=traits.qkv_bias),
            output=linear(ATTENTION_OUTPUT, bias=traits.output_bias),
            gate_up=linear(MLP_INPUTS, bias=traits.mlp_bias, paired=True),
            down=linear(MLP_OUTPUT, bias=traits.mlp_bias),
            window=self.config.window(layer) or 0,
        )

    def _linear(self, names: Sequence[str], *, bias: bool, paired: bool = False) -> Matrix:
        names_of_weights = [f"{name}.weight" for name in names]
        raws = [self._take(name) for name in names_of_weights]
        biases = [dequantise(self._take(f"{name}.bias")).reshape(-1) for name in names] if bias else []
        return self._matrix(raws, names_of_weights, biases, paired=paired)

    def _matrix(
        self, raws: Sequence[RawTensor], names: Sequence[str], biases: Sequence[Floats] = (), *, paired: bool = False
    ) -> Matrix:
        matrix, part_bytes = _planned(
            self._library, raws, names, self._quantization, paired=paired, grouped=self._grouped and names == [LM_HEAD]
        )
        if paired:
            matrix.paired = GATES[self.config.traits.activation]
        raws = [raw if raw.type in STORED else converted(raw, F32) for raw in raws]
        sizes = [raw.rows for raw in raws]
        places = _paired_places(sizes[0]) if paired else np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        numbers, scales, corrections = (self._arena.take(nbytes) for nbytes in part_bytes)
        matrix.numbers, matrix.scales, matrix.corrections = (part.ctypes.data for part in (numbers, scales, corrections))
        rotated = matrix.kind == c.Q8_0
        balance = (corrections if rotated else corrections[:0]).view(np.float32)
        balance.fill(1.0)
        packing = Packing(matrix, raws, places, balance, np.zeros_like(balance))
        if rotated and self._balanced:
            self.of_bytes.append(packing)
        packing.run(self._library, self.threads, sum_squares=self._balanced)
        if biases:
            bias = np.zeros(matrix.panels * PANEL, np.float32)
            bias[np.concatenate(places)] = np.concatenate(biases)
            matrix.bias = self._keep(bias)
        return matrix

    def _take(self, name: str) -> RawTensor:
        assert self._weights is not None
        return self._weights.take(name)

    def _norm(self, name: str) -> Norm:
        weight = self._vector(f"{name}.weight")
        return Norm(weight=weight, bias=self._vector(f"{name}.bias") if self.config.traits.norm_bias else None)

    def _final_norm_weights(self) -> tuple[Floats, Floats | None]:
        """Weight and bias, where they were kept last."""
        return (self._kept[-2], self._kept[-1]) if self.config.traits.norm_bias else (self._kept[-1], None)

    def _vector(self, name: str) -> int:
        return self._keep(dequantise(self._take(name)).reshape(-1))

    def _keep(self, array: NDArray[np.float32]) -> int:
        array = np.ascontiguousarray(array, np.float32)
        self._kept.append(array)
        return array.ctypes.data


def _kind_of(types: Sequence[TensorType]) -> TensorType:
    """A file may store the parts of one matrix differently. Then they all become what loses least."""
    kinds = set(types)
    return types[0] if len(kinds) == 1 else F32 if F32 in kinds else Q8_0


def _paired_places(width: int) -> list[Places]:
    """Gate i and up i are PAIR outputs apart."""
    rows = np.arange(width)
    gates = rows // PAIR * PANEL + rows % PAIR
    return [gates, gates + PAIR]


def keeps_groups(library: Library, kinds: Iterable[TensorType], quantization: Quantization) -> bool:
    """Whether the output head, if it is of bytes, keeps a scale for every 32 weights (csrc/matmul_q4.h). It does in models with
    matrices of four bits (`kinds`: of the layers), which would lose most by rotated bytes with one scale a row
    (docs/internals/quantisation.md). Not on tiles, which have no such product."""
    return quantization != "int8" and not library.has_tiles() and not {Q4_0, Q4_1}.isdisjoint(kinds)


def _planned(
    library: Library,
    tensors: Sequence[TensorFacts],
    names: Sequence[str],
    quantization: Quantization,
    *,
    paired: bool,
    grouped: bool = False,
) -> tuple[Matrix, tuple[int, ...]]:
    """The matrix that these become, without its memory, and how many bytes its numbers, scales and corrections take.
    `grouped`: bytes keep their groups."""
    kind = KINDS[_kind_of([type_for(tensor, name, quantization) for tensor, name in zip(tensors, names, strict=True)])]
    outputs = 1 + int(_paired_places(tensors[0].rows)[1][-1]) if paired else sum(tensor.rows for tensor in tensors)
    matrix = Matrix(c.GROUPED_INT8 if grouped and kind == c.Q8_0 else kind, paired, outputs, tensors[0].row_elements)
    sizes = (c_int64 * 3)()
    library.plan(matrix, sizes)
    return matrix, tuple(sizes)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What a model's matrices will be."""

    nbytes: int
    "Of all of them."
    weights: int
    of_bytes: int
    "Weights that are computed on as rotated bytes."
    grouped: bool
    "Whether the head, if it is of bytes, keeps its groups."

    @property
    def large(self) -> bool:
        return self.weights > LARGE_WEIGHTS

    @property
    def balanced(self) -> bool:
        """Whether the matrices of bytes get a balance."""
        return not self.large or 2 * self.of_bytes > self.weights


def plan_model(
    library: Library, config: ModelConfig, stored: Mapping[str, TensorFacts], quantization: Quantization
) -> PlannedModel:
    """Worked out from what the file says of its tensors."""
    every = [
        ([f"layers.{layer}.{name}.weight" for name in names], names == MLP_INPUTS)
        for layer in range(config.layers)
        for names in (ATTENTION_INPUTS, ATTENTION_OUTPUT, MLP_INPUTS, MLP_OUTPUT)
    ]
    facts = {
        name: stored[EMBED if name == LM_HEAD and config.tied_embeddings else name]
        for names, _ in [*every, ([LM_HEAD], False)]
        for name in names
    }
    grouped = keeps_groups(
        library, (type_for(facts[name], name, quantization) for names, _ in every for name in names), quantization
    )
    nbytes = weights = of_bytes = 0
    for names, paired in [*every, ([LM_HEAD], False)]:
        tensors = [facts[name] for name in names]
        matrix, part_bytes = _planned(
            library, tensors, names, quantization, paired=paired, grouped=grouped and names == [LM_HEAD]
        )
        nbytes += sum(map(_whole_lines, part_bytes))
        weights += matrix.outputs * matrix.inputs
        of_bytes += matrix.outputs * matrix.inputs if matrix.kind == c.Q8_0 else 0
    return PlannedModel(nbytes, weights, of_bytes, grouped)


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
