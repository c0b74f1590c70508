"""The weights of one rank (models/shard.py), cut while they load: no rank holds more than its part and the tensor at hand.

rows       q, k, v and sinks by head; gate and up of an MLP; the output head by tokens
columns    o by head; down of an MLP. What these add up to is summed over ranks
wholes     experts: each rank has some. Embedding, norms, routers: each rank has them
first      biases that are added once, to such a sum: on the first rank; the others have zeros

Blocks of quantised rows, and blocks of fp8 scales, stay whole. Of fewer key/value heads than ranks, each is on several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from baton.errors import InvalidConfig
from baton.models.config import ModelConfig
from baton.models.dequantise import dequantise
from baton.models.loaders.arranged import ArrangedWeights
from baton.models.loaders.weights import StoredTensor, WeightSource
from baton.models.parameters import LM_HEAD
from baton.models.raw_tensor import Bytes, RawTensor
from baton.models.shard import Shard
from baton.models.tensor_types import F8_E4M3, SCALE_BLOCK, TensorType

LINEAR = re.compile(r"layers\.\d+\.(attention|mlp|mlp\.shared)\.(q|k|v|o|gate|up|down)\.(weight|bias)")
SINKS = re.compile(r"layers\.\d+\.attention\.sinks")
EXPERT = re.compile(r"layers\.\d+\.mlp\.experts\.(\d+)\..*")
UNIT = 32
"""Smallest part of an MLP's width, if the width consists of such units: rows of them can be quantised."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows or columns of a parameter."""

    places: range
    columns: bool = False

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[:-1], len(self.places)) if self.columns else (len(self.places), *whole[1:])

    def cut(self, raw: RawTensor) -> RawTensor:
        begin, end = self.places.start, self.places.stop
        if len(raw.shape) == 1:
            return RawTensor.of_floats(dequantise(raw).reshape(-1)[begin:end])
        blocks, scales = slice(begin // SCALE_BLOCK, -(-end // SCALE_BLOCK)), raw.scales
        if self.columns:
            data = raw.data[:, raw.type.row_bytes(begin) : raw.type.row_bytes(end)]
            scales = None if scales is None else scales[:, blocks]
        else:
            data, scales = raw.data[begin:end], None if scales is None else scales[blocks]
        return RawTensor(raw.type, self.shape(raw.shape), data if _is_mapped(data) else data.copy(), scales)


def _is_mapped(data: Bytes) -> bool:
    """Whether these bytes are a view of a file. A view of memory would keep the whole tensor."""
    while isinstance(data.base, np.ndarray):
        data = data.base
    return data.base is not None


def sharded(config: ModelConfig, source: WeightSource, shard: Shard) -> tuple[ModelConfig, WeightSource]:
    """The config and the weights of this rank. Reads no tensor; raises InvalidConfig if the model cannot be divided so."""
    if shard.is_whole:
        return config, source
    part = sharded_config(config, shard, _unit(config, source.stored(), shard.ranks))
    return part, ShardedWeights(source, config, part)


def sharded_config(config: ModelConfig, shard: Shard, unit: int = UNIT) -> ModelConfig:
    """The config of this rank. `unit`: the smallest part of an MLP's width."""
    ranks, heads, kv_heads, experts = shard.ranks, config.heads, config.kv_heads, config.experts
    if heads % ranks:
        raise _refused(ranks, f"the model has {heads} query heads, which {ranks} ranks cannot share evenly")
    if kv_heads % ranks and ranks % kv_heads:
        raise _refused(ranks, f"the model has {kv_heads} key/value heads: neither is a multiple of the other")
    if config.traits.qk_norm_across_heads:
        raise _refused(ranks, "the norm of queries and keys goes across all heads (qk_norm_across_heads), which no rank has")
    if experts is not None and experts.count < ranks:
        raise _refused(ranks, f"the model has {experts.count} experts, fewer than ranks")
    if -(-config.vocab_size // UNIT) < ranks:
        raise _refused(ranks, f"the vocabulary has {config.vocab_size} tokens, and each rank has at least {UNIT}")

    def width(size: int) -> int:
        if size and -(-size // unit) < ranks:
            raise _refused(ranks, f"an MLP of width {size} has {-(-size // unit)} blocks of {unit}, fewer than ranks")
        return len(shard.share(size, unit))

    return replace(
        config,
        heads=heads // ranks,
        kv_heads=max(kv_heads // ranks, 1),
        intermediate_size=width(config.intermediate_size) if _has_mlp(config) else config.intermediate_size,
        experts=None if experts is None else replace(experts, shared_size=width(experts.shared_size)),
        shard=shard,
    )


def _has_mlp(config: ModelConfig) -> bool:
    return config.experts is None or not all(config.experts.layers or (True,))


def _refused(ranks: int, why: str) -> InvalidConfig:
    return InvalidConfig(f"--tensor-parallel-size {ranks}: {why}")


def _unit(config: ModelConfig, stored: Mapping[str, StoredTensor], ranks: int) -> int:
    """The smallest part of the width of MLPs that leaves every block whole."""
    parts = [(LINEAR.fullmatch(name), tensor) for name, tensor in stored.items()]
    blocks = [_block(tensor.type, columns=match[2] == "down") for match, tensor in parts if match and "mlp" in match[1]]
    widths = [config.intermediate_size if _has_mlp(config) else 0, config.experts.shared_size if config.experts else 0]
    in_units = all(width % UNIT == 0 and (not width or width // UNIT >= ranks) for width in widths)
    return max([UNIT if in_units else 1, *blocks])


def _block(kind: TensorType, *, columns: bool) -> int:
    return SCALE_BLOCK if kind == F8_E4M3 else kind.block_elements if columns else 1


class ShardedWeights:
    """A WeightSource that cuts this rank's parts from another."""

    def __init__(self, source: WeightSource, whole: ModelConfig, part: ModelConfig) -> None:
        self.origin = source.origin
        self._source, self._whole, self._part = source, whole, part
        self._unit = _unit(whole, source.stored(), part.shard.ranks)
        for name, tensor in self.stored().items():
            self._check(name, tensor)

    def stored(self) -> Mapping[str, StoredTensor]:
        return self._stored

    def raw(self, name: str) -> RawTensor:
        if self._is_of_first(name):
            return RawTensor.of_floats(np.zeros(self._stored[name].shape, np.float32))
        cut = self._slice(name)
        if cut is None:
            return self._source.raw(name)
        return self._take(name)(cut.cut)

    def _take(self, name: str) -> Callable[[Callable[[RawTensor], RawTensor]], RawTensor]:
        source = self._source
        if isinstance(source, ArrangedWeights):
            return partial(source.part, name)
        return lambda cut: cut(source.raw(name))

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        found = {}
        for name, tensor in self._source.stored().items():
            expert, cut = EXPERT.fullmatch(name), self._slice(name)
            if expert is not None and int(expert[1]) not in self._part.own_experts:
                continue
            shape = tensor.shape if cut is None else cut.shape(tensor.shape)
            rows = 1 if len(shape) == 1 else shape[0]
            found[name] = (
                tensor if cut is None else replace(tensor, shape=shape, nbytes=tensor.type.row_bytes(shape[-1]) * rows)
            )
        return found

    def _is_of_first(self, name: str) -> bool:
        """Whether this is a bias of the first rank, on another."""
        match = LINEAR.fullmatch(name)
        return match is not None and match[2] in ("o", "down") and match[3] == "bias" and self._part.shard.rank > 0

    def _slice(self, name: str) -> Slice | None:
        """The part of a parameter that this rank has. None: the whole parameter."""
        if name == LM_HEAD:
            return Slice(self._part.head_rows)
        if SINKS.fullmatch(name):
            return Slice(self._heads(self._whole.heads, 1))
        match = LINEAR.fullmatch(name)
        if match is None:
            return None
        owner, linear, kind = match.groups()
        if linear in ("o", "down") and kind == "bias":
            return None
        return Slice(self._places(owner, linear), columns=linear in ("o", "down"))

    def _places(self, owner: str, linear: str) -> range:
        whole = self._whole
        if owner == "attention":
            return self._heads(whole.kv_heads if linear in "kv" else whole.heads, whole.head_dim)
        shared = owner == "mlp.shared" and whole.experts is not None
        size = whole.experts.shared_size if shared and whole.experts is not None else whole.intermediate_size
        return self._part.shard.share(size, self._unit)

    def _heads(self, heads: int, width: int) -> range:
        """Places of this rank's heads. If there are fewer heads than ranks, each is on several ranks in a row."""
        shard = self._part.shard
        first, count = shard.rank * heads // shard.ranks, max(heads // shard.ranks, 1)
        return range(first * width, (first + count) * width)

    def _check(self, name: str, tensor: StoredTensor) -> None:
        """Checks that no block is cut. Raises InvalidConfig."""
        cut = self._slice(name)
        if cut is None or len(tensor.shape) < 2:
            return
        block, end = _block(tensor.type, columns=cut.columns), self._source.stored()[name].shape[cut.columns]
        if cut.places.start % block or (cut.places.stop % block and cut.places.stop != end):
            raise _refused(
                self._part.shard.ranks,
                f"{name} is stored in blocks of {block} ({tensor.type.name}), and a rank's part of its {end} "
                f"{'columns' if cut.columns else 'rows'} would be {len(cut.places)}",
            )
