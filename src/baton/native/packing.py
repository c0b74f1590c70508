"""Packs a model's weights in the order in which the products read them (csrc/matrix.h).

plan.py decides the matrices. All matrices are in one arena of large pages: a token reads every byte of it once, and with small
pages address translation would take a large part of that.

The library reads rows in the file's format and all threads pack: no float arrays are created. Int8 matrices are packed twice:
first to measure their activations, then with a balance per input (native/balance.py). Exceptions are large models that are
mostly 4-bit, where a balance has no measurable effect (docs/internals/quantisation.md) and costs a third of the start, and the
output head of a 4-bit model, which keeps its groups (plan.keeps_groups).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.config import Quantization
from baton.errors import EngineError, InvariantBroken
from baton.models.config import ModelConfig
from baton.models.dequantise import dequantise
from baton.models.loaders.sharded import Slice
from baton.models.loaders.weights import RawWeights
from baton.models.parameters import EMBED, LM_HEAD, layer_norms
from baton.models.quantise import converted, weights_as
from baton.models.raw_tensor import Bytes, Floats, RawTensor
from baton.models.tensor_types import BF16, F16, F32, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, TensorType
from baton.native import library as c
from baton.native.library import GATES, Library, Matrix, Mixture, NativeLayerWeights, Norm
from baton.native.plan import (
    HEAD,
    KINDS,
    PANEL,
    Places,
    PlannedStack,
    Stack,
    layer_stacks,
    places_of,
    plan_model,
    plan_stack,
    whole_lines,
    with_head,
)

LARGE_PAGE = 2 << 20

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
"""Formats that the library reads from files."""


@dataclass(frozen=True, slots=True)
class FileRows:
    """Rows of a file, and their places among the matrix outputs."""

    matrix: Matrix
    rows: RawTensor
    places: Places


@dataclass(frozen=True, slots=True)
class MatrixStack:
    """A stack of matrices (plan.py), and its sources."""

    pieces: list[FileRows]
    balance: Floats
    "Scales of the inputs of int8 matrices, [inputs], in the library's memory. Else empty."
    squares: Floats
    "Sums over outputs of the squares of the weights, [inputs]. Else empty."

    def run(self, library: Library, threads: int) -> None:
        """Packs all pieces again, with the current balance."""
        for piece in self.pieces:
            self.pack(library, piece, threads)

    def pack(self, library: Library, piece: FileRows, threads: int, *, sum_squares: bool = False) -> None:
        squares = self.squares.ctypes.data if sum_squares and len(self.squares) else None
        rows, order = np.ascontiguousarray(piece.rows.data), np.ascontiguousarray(piece.places, np.int64)
        where = (rows.ctypes.data, rows.shape[1], order.ctypes.data, len(order))
        if library.pack(piece.matrix, STORED[piece.rows.type], *where, squares, threads):
            raise EngineError("there is not enough memory to pack the weights")


class Arena:
    """Memory for exactly all matrices. Reserved as a whole and without MAP_NORESERVE: if memory is short the system should
    refuse now, and not kill the process on a later write."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            # Private: shared memory is in a memory file system, which has only small pages.
            self._map = mmap.mmap(-1, nbytes + LARGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError) as error:
            raise EngineError(f"{nbytes / 2**30:.2f} GiB for the weights cannot be reserved: {error}") from error
        with suppress(AttributeError, OSError):  # a system without large pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: Bytes = np.frombuffer(self._map, np.uint8)
        self._used = -self._bytes.ctypes.data % LARGE_PAGE

    def take(self, nbytes: int) -> Bytes:
        begin = self._used
        self._used += whole_lines(nbytes)
        if begin + nbytes > len(self._bytes):
            raise InvariantBroken(f"the weights need more than the {self.nbytes} bytes that were planned for them")
        return self._bytes[begin : begin + nbytes]


class PackedModel:
    """Everything the library needs of a model, in memory that lives as long as this object."""

    def __init__(
        self, library: Library, config: ModelConfig, weights: RawWeights, quantization: Quantization, threads: int = 1
    ) -> None:
        self.config = config
        self.threads = threads
        self._library = library
        self._weights: RawWeights | None = weights
        self._quantization = quantization
        self._stored = with_head(config, weights.stored)
        planned = plan_model(library, config, weights.stored, quantization)
        self.large, self._balanced, self._grouped = planned.large, planned.balanced, planned.grouped
        self._arena = Arena(planned.nbytes)
        self._kept: list[Floats] = []
        self._kept_experts: list[object] = []
        self.of_bytes: list[MatrixStack] = []
        "Matrix stacks in the order of `matrices`, which are packed again with a balance."
        embedding = weights.take(EMBED)
        # Blocks and 16-bit numbers are kept; a token's row is unpacked on lookup.
        table = embedding if embedding.type in STORED and embedding.type != F32 else weights_as(embedding, EMBED, quantization)
        # A copy, never a view of the mapped file: a write to the file would change answers, and a truncation would end the
        # process with SIGBUS.
        self.embedding: Bytes = np.array(table.data)
        self.embedding_kind = STORED[table.type]
        self.blocks = (NativeLayerWeights * config.layers)(*(self._block(layer) for layer in range(config.layers)))
        self.final_norm = self._norm("final_norm")
        self.final_norm_weights = self._final_norm_weights()
        head = Slice(config.head_rows).cut(embedding) if config.tied_embeddings else weights.take(LM_HEAD)
        self.head = self._matrices(HEAD, {LM_HEAD: head})[0]
        weights.close()
        self._weights = None  # the files are not read any more: they are unmapped

    def matrices(self) -> list[Matrix]:
        """The matrices that may get a balance, in the order of packing. Of a layer's experts only the first: rows are quantised
        once for all."""
        found = []
        for block in self.blocks:
            found += [block.qkv, block.output, block.gate_up, block.down]
            found += [block.mixture.gate_up[0]] if block.mixture.gate_up else []
        return [*found, self.head]

    def _block(self, layer: int) -> NativeLayerWeights:
        """Packs the weights of one layer."""
        prefix, traits = f"layers.{layer}.", self.config.traits
        packed = {name: self._matrices(stack) for name, stack in layer_stacks(self.config, layer).items()}
        mixture = Mixture()
        if "router" in packed:
            experts = [(Matrix * len(packed[name]))(*packed[name]) for name in ("experts_gate_up", "experts_down")]
            self._kept_experts += experts  # kept alive: the library has only their address
            mixture = Mixture(*experts, packed["router"][0], self._correction(layer))
        return NativeLayerWeights(
            **{name: self._norm(f"{prefix}{name}") for name in layer_norms(self.config)},
            sinks=self._vector(f"{prefix}attention.sinks") if traits.sinks else None,
            q_norm=self._vector(f"{prefix}attention.q_norm.weight") if traits.qk_norm else None,
            k_norm=self._vector(f"{prefix}attention.k_norm.weight") if traits.qk_norm else None,
            **{name: packed[name][0] for name in ("qkv", "output", "gate_up", "down") if name in packed},
            mixture=mixture,
            window=self.config.window(layer) or 0,
        )

    def _correction(self, layer: int) -> int | None:
        experts = self.config.experts
        return self._vector(f"layers.{layer}.mlp.router.correction") if experts and experts.correction else None

    def _matrices(self, stack: Stack, given: Mapping[str, RawTensor] | None = None) -> list[Matrix]:
        """Packs the matrices of one layer. `given`: tensors that were already read."""
        planned = plan_stack(self._library, stack, self._stored, self._quantization, grouped=self._grouped)
        balance = np.ones(planned.matrix.inputs if planned.rotated else 0, np.float32)
        if planned.rotated:
            shared = self._arena.take(planned.corrections).view(np.float32)
            shared[:], balance = balance, shared
        packing = MatrixStack([], balance, np.zeros_like(balance))
        balanced = planned.rotated and stack.balanced and self._balanced
        matrices = []
        for names in stack.parts:
            matrix = self._placed(stack, planned, balance)
            for piece in self._pieces(matrix, stack, names, given or {}):
                packing.pack(self._library, piece, self.threads, sum_squares=balanced)
                packing.pieces.extend([piece] if balanced else [])
            matrices.append(matrix)
        if balanced:
            self.of_bytes.append(packing)
        return matrices

    def _placed(self, stack: Stack, planned: PlannedStack, balance: Floats) -> Matrix:
        """The next matrix of the stack, with its own memory. Matrices of rotated int8 share their input scales."""
        matrix = Matrix.from_buffer_copy(planned.matrix)
        matrix.paired = GATES[self.config.traits.activation] if stack.paired else 0
        matrix.numbers, matrix.scales = (self._arena.take(n).ctypes.data for n in (planned.numbers, planned.scales))
        corrections = balance if planned.rotated else self._arena.take(planned.corrections)
        matrix.corrections = corrections.ctypes.data
        return matrix

    def _pieces(self, matrix: Matrix, stack: Stack, names: Sequence[str], given: Mapping[str, RawTensor]) -> Iterator[FileRows]:
        sizes = [self._stored[f"{name}.weight"].rows for name in names]
        places = places_of(sizes, paired=stack.paired)
        for name, of_part in zip(names, places, strict=True):
            raw = given.get(f"{name}.weight") or self._take(f"{name}.weight")
            yield FileRows(matrix, raw if raw.type in STORED else converted(raw, F32), of_part)
        if stack.bias:
            bias = np.zeros(matrix.panels * PANEL, np.float32)
            for name, of_part in zip(names, places, strict=True):
                if not name.endswith(".shared_gate"):
                    bias[of_part] = dequantise(self._take(f"{name}.bias")).reshape(-1)
            matrix.bias = self._keep(bias)

    def _take(self, name: str) -> RawTensor:
        assert self._weights is not None
        return self._weights.take(name)

    def _norm(self, name: str) -> Norm:
        weight = self._vector(f"{name}.weight")
        return Norm(weight=weight, bias=self._vector(f"{name}.bias") if self.config.traits.norm_bias else None)

    def _final_norm_weights(self) -> tuple[Floats, Floats | None]:
        """Weight and bias of the final norm, which were stored last."""
        return (self._kept[-2], self._kept[-1]) if self.config.traits.norm_bias else (self._kept[-1], None)

    def _vector(self, name: str) -> int:
        return self._keep(dequantise(self._take(name)).reshape(-1))

    def _keep(self, array: NDArray[np.float32]) -> int:
        array = np.ascontiguousarray(array, np.float32)
        self._kept.append(array)
        return array.ctypes.data
