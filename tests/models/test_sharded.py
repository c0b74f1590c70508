"""The weights of single ranks: cut as the file stores them, and together the whole."""

import json
import struct
import tracemalloc
from dataclasses import replace
from math import prod

import numpy as np
import pytest

from baton.errors import InvalidConfig
from baton.models.config import Experts, ModelConfig, RopeConfig, Traits
from baton.models.dequantise import dequantise
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.safetensors import SafetensorsWeights
from baton.models.loaders.sharded import sharded, sharded_config
from baton.models.loaders.weights import RawWeights, StoredTensor
from baton.models.parameters import expected_shapes
from baton.models.quantise import converted
from baton.models.raw_tensor import RawTensor
from baton.models.shapes import SHAPES
from baton.models.shard import Shard
from baton.models.tensor_types import F8_E4M3, Q4_K, Q8_0, TensorType

TINY = ModelConfig(
    architecture="llama",
    vocab_size=131,
    layers=2,
    hidden_size=64,
    heads=6,
    kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rope=RopeConfig(),
    norm_eps=1e-5,
    tied_embeddings=False,
    traits=Traits(qkv_bias=True, output_bias=True, mlp_bias=True, sinks=True),
    context_tokens_max=64,
)
MOE = replace(
    TINY,
    traits=Traits(),
    experts=Experts(count=5, per_token=2, inner_size=32, normalised=True, shared_size=96, shared_gate=True, correction=True),
)
HEADS = {"q": 6, "k": 2, "v": 2}


def parts_of(config, ranks, source=None):
    return [sharded(config, source or DummyWeights(config), Shard(rank, ranks)) for rank in range(ranks)]


def values(source, name):
    return dequantise(source.raw(name))


@pytest.mark.parametrize("size", [1, 7, 96, 1000])
@pytest.mark.parametrize("unit", [1, 32])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shares_follow_each_other_and_differ_by_a_unit(size, unit, ranks):
    shares = [Shard(rank, ranks).share(size, unit) for rank in range(ranks)]
    assert [place for share in shares for place in share] == list(range(size))
    lengths = [-(-len(share) // unit) for share in shares]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("config", [TINY, replace(TINY, tied_embeddings=True), MOE], ids=["dense", "tied", "experts"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ranks_tensors_are_those_that_its_config_asks_for(config, ranks):
    config = config if ranks == 2 else replace(config, kv_heads=1)
    for part, source in parts_of(config, ranks):
        for name, shape in expected_shapes(part).items():
            assert source.stored()[name].shape == shape == source.raw(name).shape, name
        RawWeights(source, part)  # compares both, and finds nothing that is too much


def test_rows_and_columns_of_all_ranks_are_the_whole():
    whole = DummyWeights(TINY)
    parts = [source for _, source in parts_of(TINY, 2)]
    for name in whole.stored():
        of_ranks = [values(source, name) for source in parts]
        linear = name.split(".")[-2]
        if name == "lm_head.weight" or linear in ("q", "k", "v", "gate", "up") or name.endswith("sinks"):
            joined = np.concatenate(of_ranks)
        elif linear in ("o", "down") and name.endswith("weight"):
            joined = np.concatenate(of_ranks, 1)
        elif linear in ("o", "down"):
            joined = sum(of_ranks)
        else:
            assert np.array_equal(*of_ranks)
            joined = of_ranks[0]
        assert np.array_equal(joined, values(whole, name)), name


def test_each_expert_is_on_one_rank():
    found = [{name for name in source.stored() if ".experts." in name} for _, source in parts_of(MOE, 2)]
    assert not found[0] & found[1]
    assert found[0] | found[1] == {name for name in DummyWeights(MOE).stored() if ".experts." in name}
    assert [list(part.own_experts) for part, _ in parts_of(MOE, 2)] == [[0, 1], [2, 3, 4]]


def test_fewer_key_heads_than_ranks_are_on_several():
    config = replace(TINY, heads=8, kv_heads=2)
    parts, whole = parts_of(config, 4), values(DummyWeights(config), "layers.0.attention.k.weight").reshape(2, 16, -1)
    for rank, (part, source) in enumerate(parts):
        assert (part.heads, part.kv_heads) == (2, 1)
        # query heads 2 r and 2 r + 1 read key head r // 2, as in the whole model
        assert np.array_equal(values(source, "layers.0.attention.k.weight"), whole[rank // 2])


class Quantised:
    """Dummy weights in another type."""

    origin = "quantised"

    def __init__(self, config, kind: TensorType):
        self.plain, self.kind = DummyWeights(config), kind

    def stored(self):
        return {name: self._stored(tensor) for name, tensor in self.plain.stored().items()}

    def _stored(self, tensor: StoredTensor) -> StoredTensor:
        if len(tensor.shape) < 2:
            return tensor
        return replace(tensor, type=self.kind, nbytes=tensor.shape[0] * self.kind.row_bytes(tensor.shape[1]))

    def raw(self, name):
        raw = self.plain.raw(name)
        if len(raw.shape) < 2 or self.kind != Q8_0:
            return raw
        return converted(raw, self.kind)


def test_quantised_rows_are_cut_at_block_borders():
    config = replace(TINY, heads=4, intermediate_size=96)
    whole = Quantised(config, Q8_0)
    widths = [part.intermediate_size for part, _ in parts_of(config, 2, whole)]
    assert widths == [32, 64]
    for name in ("layers.1.mlp.down.weight", "layers.0.attention.o.weight"):
        joined = np.concatenate([values(source, name) for _, source in parts_of(config, 2, whole)], 1)
        assert np.array_equal(joined, values(whole, name))


def test_a_cut_through_a_block_is_refused_with_the_numbers():
    with pytest.raises(InvalidConfig, match=r"blocks of 32 \(Q8_0\), and a rank's part of its 96 columns would be 48"):
        parts_of(TINY, 2, Quantised(TINY, Q8_0))
    wide = replace(TINY, heads=32, hidden_size=512, intermediate_size=512)
    assert [part.intermediate_size for part, _ in parts_of(wide, 2, Quantised(wide, Q4_K))] == [256, 256]
    with pytest.raises(InvalidConfig, match="an MLP of width 512 has 2 blocks of 256, fewer than ranks"):
        parts_of(replace(wide, kv_heads=4), 4, Quantised(wide, Q4_K))


def test_scales_of_fp8_are_cut_with_their_blocks():
    config = replace(
        TINY, vocab_size=512, heads=16, head_dim=32, intermediate_size=512, hidden_size=256, kv_heads=8, traits=Traits()
    )

    class Fp8(Quantised):
        def raw(self, name):
            raw = self.plain.raw(name)
            if len(raw.shape) < 2:
                return raw
            rng = np.random.default_rng(1)
            scales = rng.random([-(-n // 128) for n in raw.shape], np.float32)
            return RawTensor(F8_E4M3, raw.shape, rng.integers(0, 120, raw.shape, np.uint8), scales)

    whole = Fp8(config, F8_E4M3)
    for name, axis in (("layers.0.mlp.down.weight", 1), ("layers.0.mlp.up.weight", 0), ("layers.0.attention.k.weight", 0)):
        joined = np.concatenate([values(source, name) for _, source in parts_of(config, 2, whole)], axis)
        assert np.array_equal(joined, values(whole, name)), name


@pytest.mark.parametrize(
    ("change", "ranks", "why"),
    [
        ({}, 4, "the model has 6 query heads, which 4 ranks cannot share evenly"),
        ({"heads": 9, "kv_heads": 3}, 2, "9 query heads"),
        ({"heads": 12, "kv_heads": 3}, 2, "the model has 3 key/value heads: neither is a multiple of the other"),
        ({"traits": Traits(qk_norm=True, qk_norm_across_heads=True)}, 2, "qk_norm_across_heads"),
        ({"vocab_size": 32}, 2, "the vocabulary has 32 tokens"),
        ({"experts": Experts(count=2, per_token=1, inner_size=8, normalised=True)}, 3, "2 experts, fewer than ranks"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused_with_the_numbers(change, ranks, why):
    change = {"kv_heads": 1, **change} if ranks == 3 else change
    with pytest.raises(InvalidConfig, match=f"--tensor-parallel-size {ranks}: .*{why}"):
        sharded_config(replace(TINY, **change), Shard(0, ranks))


def write_safetensors(path, tensors):
    """In bytes: the file's own layout, without a library."""
    table, at = {}, 0
    for name, values in tensors.items():
        table[name] = {"dtype": "F32", "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    head = json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + b"".join(values.tobytes() for values in tensors.values()))


def test_a_rank_holds_its_part_and_one_tensor(tmp_path):
    """Parts of a file are views, so only their bytes are read. What is made in memory is copied, and the whole is released."""
    config = replace(SHAPES["qwen3-0.6b"], layers=1, vocab_size=4096)
    dummy = DummyWeights(config)
    shapes = expected_shapes(config)
    write_safetensors(tmp_path / "model.safetensors", {name: values(dummy, name) for name in shapes})
    file = SafetensorsWeights(tmp_path, lambda name: name)
    for source, most in ((file, 1 << 20), (dummy, None)):
        part, weights = sharded(config, source, Shard(1, 4))
        largest = max(tensor.nbytes for tensor in source.stored().values())
        tracemalloc.start()
        kept = {name: weights.raw(name) for name in expected_shapes(part)}
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        held = sum(raw.data.nbytes for raw in kept.values())
        assert held == sum(4 * prod(shape) for shape in expected_shapes(part).values())
        assert peak < (most or held + 2 * largest)
        divided = sum(4 * prod(shape) for name, shape in shapes.items() if len(shape) == 2 and name != "embed.weight")
        rest = sum(4 * prod(shape) for name, shape in shapes.items() if len(shape) == 1 or name == "embed.weight")
        assert held == divided // 4 + rest


def test_the_identity_text_does_not_have_the_rank():
    assert repr(replace(TINY, shard=Shard(1, 2))) == repr(TINY)
