"""From a file's tensors to packed matrices: types that differ, embeddings of every kind, memory."""

from __future__ import annotations

import mmap
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from decoder_cases import Conversation
from kernels import GivenWeights, Team, pack, small_config
from product_oracle import bytes_product, random_matrix

from baton.config import WorkerConfig
from baton.errors import EngineError, InvariantBroken
from baton.models.config import ModelConfig
from baton.models.dequantise import dequantise
from baton.models.loaders.weights import StoredTensor
from baton.models.open import OpenedModel
from baton.models.parameters import expected_shapes
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import F16, F32, Q4_0, Q4_1, Q8_0
from baton.native.library import load_best, load_variant
from baton.native.packing import LARGE_PAGE, Arena, _kind_of, arena_bytes
from baton.native.variants import VARIANTS
from baton.worker.forward.native_forward import load_native

KINDS = pytest.mark.parametrize("kind", [F32, Q8_0, Q4_0, Q4_1], ids=lambda kind: kind.name)


def some(kind, rows: int = 8, width: int = 64, seed: int = 0) -> RawTensor:
    return random_matrix(np.random.default_rng(seed), kind, rows, width)


# Types


@pytest.mark.parametrize(
    ("kinds", "together"),
    [((Q4_1, Q4_1), Q4_1), ((Q4_0, Q4_1), Q8_0), ((Q4_0, Q8_0, Q4_1), Q8_0), ((Q8_0, Q4_1), Q8_0), ((Q4_1, F32), F32)],
)
def test_parts_of_different_types_become_what_loses_least(kinds, together):
    assert _kind_of(kinds) == together


def test_a_file_may_store_queries_keys_and_values_differently(library):
    config = small_config(hidden_size=64, heads=3, kv_heads=1, head_dim=10)
    parts = some(Q4_1, 30), some(Q8_0, 10, seed=1), some(Q4_0, 10, seed=2)
    packed = pack(library, config, {f"layers.0.attention.{n}.weight": p for n, p in zip("qkv", parts, strict=True)}, "auto")
    x = np.random.default_rng(3).standard_normal((5, 64), np.float32)
    with Team(library) as team:
        ours = team.product(packed.blocks[0].qkv, x, 50)
    at = 0
    for part in parts:
        expected = bytes_product(x, part)
        assert (np.abs(ours[:, at : at + part.shape[0]] - expected.values) <= 2 * expected.error_max).all()
        at += part.shape[0]


# Embeddings


@KINDS
@pytest.mark.parametrize("tied", [True, False])
def test_a_token_is_looked_up_exactly(library, kind, tied):
    """Seen through a model whose layer adds nothing."""
    config = small_config(hidden_size=96, vocab_size=50, tied_embeddings=tied)
    embedding = some(kind, 50, 96)
    nothing = {
        "layers.0.attention.o.weight": RawTensor.of_floats(np.zeros((96, config.q_size), np.float32)),
        "layers.0.mlp.down.weight": RawTensor.of_floats(np.zeros((96, config.intermediate_size), np.float32)),
    }
    source = GivenWeights(config, {"embed.weight": embedding, **nothing})
    opened = OpenedModel(None, config, source)  # type: ignore[arg-type]
    settings = WorkerConfig(threads=1, quantization="none" if kind == F32 else "auto")
    talk = Conversation(config, [50, 3])
    talk.tokens[0] = np.arange(50, dtype=np.int32)
    forward = talk.forward(load_native(library, opened, settings))
    for result, tokens in zip(talk.run(forward, [talk.all_at_once()]), talk.tokens, strict=True):
        assert np.array_equal(result.hidden, dequantise(embedding)[tokens])
    forward.close()


# Memory


def test_matrices_lie_one_after_the_other_and_never_across_a_line():
    arena = Arena(1 << 20)
    parts = [arena.take(size) for size in (1, 64, 65, 1000)]
    addresses = [part.ctypes.data for part in parts]
    assert addresses[0] % mmap.PAGESIZE == 0
    assert [b - a for a, b in pairwise(addresses)] == [64, 64, 128]
    assert [len(part) for part in parts] == [1, 64, 65, 1000]


def test_more_than_there_is_room_for_is_said():
    with pytest.raises(EngineError, match="cannot be reserved"):
        Arena(2**60)


def test_a_system_without_large_pages_will_do(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)  # the system says: what is that?
    assert len(Arena(100).take(100)) == 100


@pytest.mark.parametrize("quantization", ["none", "auto", "int8", "int4"])
def test_the_arena_holds_every_matrix(quantization):
    """Its size is worked out before anything is packed; what lay beyond it would be somebody else's memory."""
    for sizes in ({}, {"hidden_size": 2, "head_dim": 2, "intermediate_size": 1, "vocab_size": 1}, {"intermediate_size": 17}):
        config = small_config(layers=3, **sizes)
        packed = pack(load_best(), config, {}, quantization)
        begin = -packed._arena._bytes.ctypes.data % LARGE_PAGE
        assert packed._arena._used - begin == packed._arena.nbytes


def test_no_matrix_lies_beyond_the_arena():
    with pytest.raises(InvariantBroken, match="more than the 100 bytes"):
        Arena(100).take(LARGE_PAGE + 200)


def llama_8b() -> ModelConfig:
    return small_config(
        vocab_size=128256, layers=32, hidden_size=4096, heads=32, kv_heads=8, head_dim=128, intermediate_size=14336
    )


@pytest.mark.parametrize(("kind", "gigabytes"), [(Q4_0, 4.45), (Q4_1, 4.89), (Q8_0, 7.51)], ids=["Q4_0", "Q4_1", "Q8_0"])
def test_a_model_asks_for_the_memory_that_its_weights_take(kind, gigabytes):
    """8 billion weights of 4 bits asked for 28 GiB, as if they were float32, and machines of 24 GB refused them."""
    config = llama_8b()
    stored = {name: StoredTensor(kind, shape, 0, name) for name, shape in expected_shapes(config).items()}
    stored["lm_head.weight"] = replace(stored["lm_head.weight"], type=F16)  # becomes 8 bits
    plain = load_variant(VARIANTS[-1])
    asked = arena_bytes(plain, config, stored, "auto")
    assert asked == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert arena_bytes(load_best(), config, stored, "auto") == pytest.approx(asked, rel=0.15)  # tiles want a little more
