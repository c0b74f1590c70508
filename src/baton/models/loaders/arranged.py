"""Rearranges a file's parameters into the layout that every backend expects.

cut         splits queries, keys and values, or gate and up, or all experts of a layer, stored as one tensor
rotated      permutes rows of q and k: rotating pairs move from the file's places to ours (dimension i with i + head_dim/2;
            dimensions that do not rotate come last in each half). Both move alike, so no score changes.
folded      folds constant factors of a family into an existing weight: 1 + weight of its norms, the factor on the logits

Whole rows move, so blocks of quantised rows keep their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.architecture import RotaryPairs
from baton.models.config import ModelConfig
from baton.models.dequantise import dequantise
from baton.models.loaders.weights import StoredTensor, WeightSource
from baton.models.parameters import FINAL_NORM
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import F32, SCALE_BLOCK

ROTATED = re.compile(r"layers\.(\d+)\.attention\.([qk])(_norm)?\.(weight|bias)")
NORM = re.compile(r"(layers\.\d+\..*norm|final_norm)\.weight")
ALL_EXPERTS = re.compile(r"(layers\.\d+\.mlp\.)all_experts\.(gate|up|down)\.(weight|bias)")
FUSED = re.compile(r"(layers\.\d+\.)(attention\.qkv|mlp\.gate_up)\.(weight|bias)")

Order = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Differences of a file's layout from ours."""

    pairs: RotaryPairs = "halves"
    norm_plus_one: bool = False


def rotary_order(head_dim: int, rotated: int, pairs: RotaryPairs) -> Order:
    """Dimensions of the file's head in the order of our dimensions 0, 1, ..."""
    of_pair = np.arange(rotated).reshape(2, -1) if pairs == "halves" else np.arange(rotated).reshape(-1, 2).T
    rest = np.arange(rotated, head_dim).reshape(2, -1)
    return np.concatenate([of_pair[0], rest[0], of_pair[1], rest[1]])


class ArrangedWeights:
    """A WeightSource that rearranges the parameters of another."""

    def __init__(self, source: WeightSource, config: ModelConfig, arrangement: Arrangement) -> None:
        self.origin = source.origin
        self._source, self._config, self._arrangement = source, config, arrangement
        self._cuts = self._find_cuts()

    def stored(self) -> Mapping[str, StoredTensor]:
        return self._stored

    def raw(self, name: str) -> RawTensor:
        return self.part(name, lambda raw: raw)

    def part(self, name: str, cut: Callable[[RawTensor], RawTensor]) -> RawTensor:
        """A part of the parameter, whole heads of it: it is cut out before anything is copied."""
        return self._folded(name, self._in_our_pair_order(name, cut(self._cut(name))))

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        theirs = self._source.stored()
        fused = {name for name, _, _ in self._cuts.values()}
        found = {name: tensor for name, tensor in theirs.items() if name not in fused}
        for name, (whole, begin, end) in self._cuts.items():
            tensor, rows = theirs[whole], end - begin
            vector = len(tensor.shape) == 1
            shape = (rows,) if vector else _shape_of_cut(name, rows, tensor.row_elements)
            nbytes = tensor.type.row_bytes(rows) if vector else tensor.type.row_bytes(tensor.row_elements) * rows
            found[name] = replace(tensor, shape=shape, nbytes=nbytes)
        return {name: self._as_folded(name, tensor) for name, tensor in found.items()}

    def _as_folded(self, name: str, tensor: StoredTensor) -> StoredTensor:
        if name.endswith(".correction") and tensor.shape[:-1] in ((), (1,)):  # ERNIE stores one row
            tensor = replace(tensor, shape=tensor.shape[-1:])
        if name.endswith(".shared_gate.weight") and len(tensor.shape) == 1:  # llama.cpp stores a vector
            tensor = replace(tensor, shape=(1, *tensor.shape))
        return tensor if self._folds(name) is None else replace(tensor, type=F32)

    def _find_cuts(self) -> dict[str, tuple[str, int, int]]:
        """Parts of fused parameters: source, first and last row, by name."""
        cuts: dict[str, tuple[str, int, int]] = {}
        stored = self._source.stored()
        for whole, tensor in stored.items():
            begin = 0
            for part, rows in self._parts(whole):
                if part in stored:
                    raise ModelFileBroken(f"{tensor.origin}: {part} is also stored as {stored[part].origin}")
                cuts[part] = (whole, begin, begin + rows)
                begin += rows
            rows = tensor.rows if len(tensor.shape) > 1 else tensor.row_elements
            if begin and rows != begin:  # the check of shapes would not see extra rows
                raise ModelFileBroken(f"{tensor.origin}: it has {rows} rows, but the config asks for {begin}")
        return cuts

    def _parts(self, whole: str) -> list[tuple[str, int]]:
        """Our names of the parts of a fused tensor, each with its number of rows. Empty: it is not fused."""
        config, experts = self._config, self._config.experts
        match = ALL_EXPERTS.fullmatch(whole)
        if match is not None and experts is not None:
            rows = config.hidden_size if match[2] == "down" else experts.inner_size
            rows = 1 if match[3] == "bias" else rows
            return [(f"{match[1]}experts.{expert}.{match[2]}.{match[3]}", rows) for expert in range(experts.count)]
        match = FUSED.fullmatch(whole)
        if match is None:
            return []
        prefix, fused, kind = match.groups()
        owner = f"{prefix}{fused.rpartition('.')[0]}."
        inner, sizes = config.intermediate_size, {"q": config.q_size, "k": config.kv_size, "v": config.kv_size}
        parts = sizes if fused.endswith("qkv") else {"gate": inner, "up": inner}
        return [(f"{owner}{part}.{kind}", rows) for part, rows in parts.items()]

    def _cut(self, name: str) -> RawTensor:
        if name not in self._cuts:
            return self._source.raw(name)
        whole, begin, end = self._cuts[name]
        raw = self._source.raw(whole)
        if raw.scales is not None and (begin % SCALE_BLOCK or (end % SCALE_BLOCK and end != raw.rows)):
            raise ModelUnsupported(f"{whole}: blocks of fp8 scales reach over the parts of this matrix")
        scales = None if raw.scales is None else raw.scales[begin // SCALE_BLOCK : -(-end // SCALE_BLOCK)]
        if len(raw.shape) == 1:
            return RawTensor.of_floats(dequantise(raw).reshape(-1)[begin:end])
        return RawTensor(raw.type, _shape_of_cut(name, end - begin, raw.row_elements), raw.data[begin:end], scales)

    def _in_our_pair_order(self, name: str, raw: RawTensor) -> RawTensor:
        """The tensor with the rows of its heads in our order of rotary dimensions. Other tensors are returned as they are."""
        match = ROTATED.fullmatch(name)
        if match is None:
            return raw
        config = self._config
        rotated = config.rotary_dimensions(config.layer_rope(int(match[1])))
        order = rotary_order(config.head_dim, rotated, self._arrangement.pairs)
        if rotated == 0 or np.array_equal(order, np.arange(config.head_dim)):
            return raw
        heads = raw.shape[0] // config.head_dim
        rows = (np.arange(heads)[:, None] * config.head_dim + order).reshape(-1)
        if len(raw.shape) == 1:  # a bias or a norm, in which single numbers move
            return RawTensor.of_floats(dequantise(raw).reshape(-1)[rows])
        if raw.scales is not None and SCALE_BLOCK % config.head_dim and config.head_dim % SCALE_BLOCK:
            raise ModelUnsupported(f"{name}: heads of {config.head_dim} rows share blocks of fp8 scales")
        if raw.scales is not None and config.head_dim > SCALE_BLOCK:
            raise ModelUnsupported(f"{name}: a head of {config.head_dim} rows has several blocks of fp8 scales")
        return RawTensor(raw.type, raw.shape, raw.data[rows], raw.scales)

    def _folded(self, name: str, raw: RawTensor) -> RawTensor:
        if name.endswith(".correction"):
            return RawTensor.of_floats(dequantise(raw).reshape(-1))
        if name.endswith(".shared_gate.weight"):
            return replace(raw, shape=(1, raw.row_elements))
        fold = self._folds(name)
        if fold is None:
            return raw
        plus, times = fold
        return RawTensor.of_floats((dequantise(raw).reshape(-1) + np.float32(plus)) * np.float32(times))

    def _folds(self, name: str) -> tuple[float, float] | None:
        """Summand and factor of a norm's weight. None: unchanged."""
        plus = 1.0 if self._arrangement.norm_plus_one and NORM.fullmatch(name) else 0.0
        times = self._config.traits.logits_scale if name in (FINAL_NORM, "final_norm.bias") else 1.0
        return None if (plus, times) == (0.0, 1.0) else (plus, times)


def _shape_of_cut(name: str, rows: int, width: int) -> tuple[int, ...]:
    """Shape of a cut-out part. The bias of one of several experts is a row of a matrix."""
    return (width,) if name.endswith(".bias") else (rows, width)
