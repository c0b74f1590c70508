"""Plans the matrices of a model: their parameters, kinds and sizes. Several tensors with the same input become one matrix:
queries, keys and values; gate and up, whose outputs alternate in groups of sixteen so that both come out of the same product;
the router and the gate of the shared expert. All experts of a layer have one kind, so that a row is quantised once for all
(csrc/experts.h)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ctypes import c_int64
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from baton.config import Quantization
from baton.models.config import ModelConfig
from baton.models.parameters import EMBED, LM_HEAD
from baton.models.quantise import FOUR_BITS, type_for
from baton.models.raw_tensor import TensorFacts
from baton.models.tensor_types import F32, MXFP4, Q4_0, Q4_1, Q8_0, TensorType
from baton.native import library as c
from baton.native.library import Library, Matrix

PANEL = 32
PAIR = PANEL // 2
LINE = 64

KINDS: dict[TensorType, int] = {F32: c.F32, Q8_0: c.Q8_0, Q4_0: c.Q4_0, Q4_1: c.Q4_1, MXFP4: c.MXFP4}
"""Names of the kinds of matrices."""
LARGE_WEIGHTS = 1 << 30
"""Number of weights above which a model is large."""

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of one shape, kind and balance: all experts of a layer. Any other matrix is a stack of one."""

    parts: tuple[tuple[str, ...], ...]
    "Names of the linears, for each matrix."
    paired: bool = False
    "Whether the first of two linears is the gate of the second."
    bias: bool = False
    balanced: bool = True
    "Whether int8 matrices may get a balance (native/balance.py)."

    @property
    def weights(self) -> list[str]:
        return [f"{name}.weight" for names in self.parts for name in names]


HEAD = Stack((("lm_head",),))


def layer_stacks(config: ModelConfig, layer: int) -> dict[str, Stack]:
    """Stacks in the order of packing. `gate_up` and `down`: of the MLP, or of the shared expert."""
    traits, mlp, experts = config.traits, f"layers.{layer}.mlp.", config.layer_experts(layer)
    attention = f"layers.{layer}.attention."
    stacks = {
        "qkv": Stack((tuple(f"{attention}{name}" for name in "qkv"),), bias=traits.qkv_bias),
        "output": Stack(((f"{attention}o",),), bias=traits.output_bias),
    }
    if experts is None:
        return stacks | _mlp([mlp], "", bias=traits.mlp_bias)
    if experts.shared_size:
        stacks |= _mlp([f"{mlp}shared."], "")
    gate = (f"{mlp}shared_gate",) if experts.shared_gate else ()
    stacks["router"] = Stack(((f"{mlp}router", *gate),), bias=experts.bias)
    # Inputs of the experts' last products are unrelated: there is no common balance.
    prefixes = [f"{mlp}experts.{expert}." for expert in config.own_experts]
    return stacks | _mlp(prefixes, "experts_", bias=experts.bias, balanced=False)


def _mlp(prefixes: Sequence[str], name: str, *, bias: bool = False, balanced: bool = True) -> dict[str, Stack]:
    """Stacks of an MLP. `balanced`: of `down`."""
    gates = tuple((f"{prefix}gate", f"{prefix}up") for prefix in prefixes)
    downs = tuple((f"{prefix}down",) for prefix in prefixes)
    return {f"{name}gate_up": Stack(gates, paired=True, bias=bias), f"{name}down": Stack(downs, bias=bias, balanced=balanced)}


def kind_of(types: Iterable[TensorType]) -> TensorType:
    """The common kind of the parts of one matrix: if they differ, the one that loses least."""
    kinds = set(types)
    return kinds.pop() if len(kinds) == 1 else F32 if F32 in kinds else Q8_0


def places_of(sizes: Sequence[int], *, paired: bool) -> list[Places]:
    """Output index of each part's rows. Gate i and up i are PAIR outputs apart."""
    if not paired:
        return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    rows = np.arange(sizes[0])
    gates = rows // PAIR * PANEL + rows % PAIR
    return [gates, gates + PAIR]


@dataclass(frozen=True, slots=True)
class PlannedStack:
    matrix: Matrix
    "One matrix of the stack, not yet in memory."
    numbers: int
    "Bytes per matrix, like scales and corrections."
    scales: int
    corrections: int
    count: int

    @property
    def rotated(self) -> bool:
        return bool(self.matrix.kind == c.Q8_0)

    @property
    def nbytes(self) -> int:
        """Bytes of the stack. Matrices of rotated int8 share their input scales."""
        each = whole_lines(self.numbers) + whole_lines(self.scales)
        return self.count * each + whole_lines(self.corrections) * (1 if self.rotated else self.count)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """Sizes of a model's matrices."""

    nbytes: int
    "Bytes of all matrices."
    weights: int
    of_bytes: int
    "Number of weights that are computed as rotated int8."
    grouped: bool
    "Whether an int8 head keeps its groups."

    @property
    def large(self) -> bool:
        return self.weights > LARGE_WEIGHTS

    @property
    def balanced(self) -> bool:
        """Whether int8 matrices get a balance."""
        return not self.large or 2 * self.of_bytes > self.weights


Stored = Mapping[str, TensorFacts]


def plan_model(library: Library, config: ModelConfig, stored: Stored, quantization: Quantization) -> PlannedModel:
    """The plan of a model, computed from the file's list of tensors, without reading them."""
    stored = with_head(config, stored)
    of_layers = [stack for layer in range(config.layers) for stack in layer_stacks(config, layer).values()]
    kinds = (type_for(stored[name], name, quantization) for stack in of_layers for name in stack.weights)
    grouped = keeps_groups(library, kinds, quantization)
    nbytes = weights = of_bytes = 0
    for stack in (*of_layers, HEAD):
        planned = plan_stack(library, stack, stored, quantization, grouped=grouped)
        nbytes += planned.nbytes
        numbers = planned.count * planned.matrix.outputs * planned.matrix.inputs
        weights += numbers
        of_bytes += numbers if planned.rotated else 0
    return PlannedModel(nbytes, weights, of_bytes, grouped)


def with_head(config: ModelConfig, stored: Stored) -> Stored:
    return {**stored, LM_HEAD: _Rows(stored[EMBED], config.head_rows)} if config.tied_embeddings else stored


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a tensor that become rows of a matrix."""

    of: TensorFacts
    places: range

    @property
    def type(self) -> TensorType:
        return self.of.type

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, self.of.row_elements)

    @property
    def rows(self) -> int:
        return len(self.places)

    @property
    def row_elements(self) -> int:
        return self.of.row_elements


def keeps_groups(library: Library, kinds: Iterable[TensorType], quantization: Quantization) -> bool:
    """Whether an int8 output head keeps a scale per 32 weights (csrc/matmul_q4.h). True for models with 4-bit matrices
    (`kinds`: of the layers), which would lose most by rotated int8 with one scale per row (docs/internals/quantisation.md).
    False on AMX tiles, which lack such a product."""
    return quantization != "int8" and not library.has_tiles() and not set(FOUR_BITS).isdisjoint(kinds)


def plan_stack(
    library: Library, stack: Stack, stored: Stored, quantization: Quantization, *, grouped: bool = False
) -> PlannedStack:
    """The plan of a stack. `grouped`: an int8 output head keeps its groups."""
    kind = KINDS[kind_of(type_for(stored[name], name, quantization) for name in stack.weights)]
    tensors = [stored[f"{name}.weight"] for name in stack.parts[0]]
    outputs = 1 + int(places_of([tensor.rows for tensor in tensors], paired=stack.paired)[-1][-1])
    keeps = grouped and stack == HEAD and kind == c.Q8_0
    matrix = Matrix(c.GROUPED_INT8 if keeps else kind, stack.paired, outputs, tensors[0].row_elements)
    sizes = (c_int64 * 3)()
    library.plan(matrix, sizes)
    numbers, scales, corrections = sizes
    return PlannedStack(matrix, numbers, scales, corrections, len(stack.parts))


def whole_lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE
