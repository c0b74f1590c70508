"""From a file's tensors to packed matrices: types that differ, embeddings of every kind, memory."""

from __future__ import annotations

import mmap
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from decoder_cases import Conversation
from kernels import GivenWeights, Team, pack, small_config
from product_oracle import bytes_product, random_stored

from baton.config import WorkerConfig
from baton.errors import EngineError, InvariantBroken
from baton.models.config import ModelConfig
from baton.models.dequantise import dequantise
from baton.models.loaders.weights import StoredTensor
from baton.models.open import OpenedModel
from baton.models.parameters import expected_shapes
from baton.models.quantise import converted, type_for
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import F16, F32, Q4_0, Q4_1, Q4_K, Q6_K, Q8_0
from baton.native.library import load_best, load_variant
from baton.native.packing import LARGE_PAGE, STORED, Arena, PackedModel
from baton.native.plan import KINDS, kind_of, plan_model
from baton.native.variants import VARIANTS
from baton.worker.forward.native_forward import load_native


def some(kind, rows: int = 8, width: int = 64, seed: int = 0) -> RawTensor:
    return random_stored(np.random.default_rng(seed), kind, rows, width)


# Types


@pytest.mark.parametrize(
    ("kinds", "together"),
    [((Q4_1, Q4_1), Q4_1), ((Q4_0, Q4_1), Q8_0), ((Q4_0, Q8_0, Q4_1), Q8_0), ((Q8_0, Q4_1), Q8_0), ((Q4_1, F32), F32)],
)
def test_parts_of_different_types_become_what_loses_least(kinds, together):
    assert kind_of(kinds) == together


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


# What the library makes of a file's rows itself


def packed_bytes(library, raw: RawTensor, quantization: str, threads: int = 1) -> bytes:
    """All that the head of a model becomes in memory."""
    config = small_config(hidden_size=raw.shape[1], vocab_size=raw.shape[0], tied_embeddings=False)
    return arena_of(pack(library, config, {"lm_head.weight": raw}, quantization, threads))


def arena_of(packed: PackedModel) -> bytes:
    begin = -packed._arena._bytes.ctypes.data % LARGE_PAGE
    return packed._arena._bytes[begin : begin + packed._arena.nbytes].tobytes()


def test_float32_matrices_hold_the_numbers_of_the_format(library):
    for kind in STORED:
        raw = some(kind, 70, 256)
        floats = RawTensor.of_floats(dequantise(raw))
        assert packed_bytes(library, raw, "none") == packed_bytes(library, floats, "none"), kind.name


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_matrices_are_what_the_definition_of_quantising_makes(library, quantization):
    """numpy converts in the one, C in the other. Matrices of rotated bytes are made from the numbers, whatever they are stored
    as; the output head of a model of four bits is of the file's own bytes."""
    for kind in STORED:
        raw = some(kind, 70, 256)
        wanted = type_for(raw, "lm_head.weight", quantization)
        rotated = wanted == Q8_0 and (quantization != "int4" or library.has_tiles())
        converted_first = RawTensor.of_floats(dequantise(raw)) if rotated else converted(raw, wanted)
        packed = packed_bytes(library, raw, quantization)
        assert packed == packed_bytes(library, converted_first, quantization), kind.name


def test_floats_become_the_four_bits_of_the_definition(library):
    """Ranges that are tried, ties, blocks of zeros, blocks of one number, sizes of every order."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((64, 64), np.float32) * np.exp2(rng.integers(-30, 12, (64, 1))).astype(np.float32)
    values[3], values[4, :32] = 0.0, 0.25
    values[5, ::2] = np.linspace(-1, 1, 32)
    raw, config = RawTensor.of_floats(values), small_config(hidden_size=64, heads=4, kv_heads=2, head_dim=16, vocab_size=64)
    name = "layers.0.attention.o.weight"
    ours, wanted = (arena_of(pack(library, config, {name: each}, "int4")) for each in (raw, converted(raw, Q4_1)))
    assert ours == wanted


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_any_number_of_threads_packs_the_same(library, quantization):
    raw = some(F32, 1000, 96)
    assert len({packed_bytes(library, raw, quantization, threads) for threads in (1, 2, 5)}) == 1


def test_squares_of_weights_do_not_depend_on_threads(library):
    config = small_config(hidden_size=96, vocab_size=1000, tied_embeddings=False)
    found = [pack(library, config, {"lm_head.weight": some(F16, 1000, 96)}, "int8", n).of_bytes[-1].squares for n in (1, 2, 5)]
    assert all(np.array_equal(found[0], other) for other in found[1:])
    exact = (dequantise(some(F16, 1000, 96)).astype(np.float64) ** 2).sum(0)
    assert np.allclose(found[0], exact, rtol=1e-5)


# Embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_a_token_is_looked_up_exactly(library, tied):
    """Seen through a model whose layer adds nothing."""
    for kind in STORED:
        assert_tokens_are_looked_up_exactly(library, kind, tied)


def assert_tokens_are_looked_up_exactly(library, kind, tied):
    width = 256 if kind.block_elements == 256 else 96
    config = small_config(hidden_size=width, vocab_size=50, tied_embeddings=tied)
    embedding = some(kind, 50, width)
    nothing = {
        "layers.0.attention.o.weight": RawTensor.of_floats(np.zeros((width, config.q_size), np.float32)),
        "layers.0.mlp.down.weight": RawTensor.of_floats(np.zeros((width, config.intermediate_size), np.float32)),
    }
    source = GivenWeights(config, {"embed.weight": embedding, **nothing})
    opened = OpenedModel(None, config, source)  # type: ignore[arg-type]
    settings = WorkerConfig(threads=1, quantization="none" if kind == F32 else "auto")
    talk = Conversation(config, [50, 3])
    talk.tokens[0] = np.arange(50, dtype=np.int32)
    forward = talk.forward(load_native(library, opened, settings))
    for result, tokens in zip(talk.run(forward, [talk.all_at_once()]), talk.tokens, strict=True):
        assert np.array_equal(result.hidden, dequantise(embedding)[tokens]), kind.name
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
    asked = plan_model(plain, config, stored, "auto").nbytes
    assert asked == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert plan_model(load_best(), config, stored, "auto").nbytes == pytest.approx(asked, rel=0.15)  # tiles want a little more


@pytest.mark.parametrize(("kind", "balanced"), [(Q4_K, False), (Q8_0, True)], ids=["Q4_K", "Q8_0"])
def test_a_large_model_that_is_mostly_of_four_bits_gets_no_balance(kind, balanced):
    config = llama_8b()
    stored = {name: StoredTensor(kind, shape, 0, name) for name, shape in expected_shapes(config).items()}
    stored |= {name: replace(tensor, type=Q6_K) for name, tensor in stored.items() if name.endswith("mlp.down.weight")}
    planned = plan_model(load_best(), config, stored, "auto")
    assert planned.large
    assert planned.of_bytes > 1_000_000_000
    assert planned.balanced == balanced


def test_a_small_one_does(library):
    given = {f"layers.0.attention.{name}.weight": some(Q4_1, rows, 32) for name, rows in (("q", 32), ("k", 16), ("v", 16))}
    packed = pack(library, small_config(), given, "auto")
    assert packed.blocks[0].qkv.kind == KINDS[Q4_1]
    assert packed.of_bytes
