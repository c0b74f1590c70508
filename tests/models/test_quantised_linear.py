"""The oracle of quantised products: what it must give, number by number, and what it does to a whole model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from tiny_models import CASES, PROMPTS, oracle_model

from baton.models.config import ModelConfig, RopeConfig
from baton.models.dequantise import dequantise
from baton.models.layers.linear import Linear, QuantisedLinear, Wide, rounded_activations
from baton.models.loaders.dummy import DummyWeights
from baton.models.loaders.gguf_reader import GGUFFile
from baton.models.quantise import to_q4_1, to_q8_0, weights_as
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import Q4_0, Q8_0
from dense_oracle import all_logits, dummy_model, greedy_tokens, load_model

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=61,
    layers=2,
    hidden_size=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rope=RopeConfig(),
    norm_eps=1e-6,
    tied_embeddings=False,
    context_tokens_max=64,
)


def naive_rounding(x: np.ndarray, wide: Wide = Wide.LARGE) -> np.ndarray:
    """One number at a time."""
    out = np.zeros_like(x)
    for row in range(x.shape[0]):
        sizes = [np.abs(part).max() for part in x[row].reshape(-1, 32)]
        bits = [int.from_bytes(size.tobytes(), "little") for size in sizes]
        mean = sum(max(each, max(bits) - 16 * 2**23) for each in bits) // len(bits)
        for group, largest in enumerate(sizes):
            if largest == 0:
                continue
            large = bits[group] > mean + 9 * 2**19
            most = np.float32({Wide.NONE: 127.0, Wide.LARGE: 8159.0 if large else 127.0, Wide.ALL: 8159.0}[wide])
            for i in range(32 * group, 32 * group + 32):
                q = min(most, max(-most, np.rint(x[row, i] * (most / largest))))
                out[row, i] = np.float32(q) * (largest / most)
    return out


@pytest.mark.parametrize("wide", Wide)
def test_activations_are_rounded_group_by_group(wide):
    x = np.random.default_rng(0).standard_normal((5, 96), np.float32) * np.float32(3.0)
    x[1, 32:64] = 0.0
    x[2, :32] *= 1e-30
    x[3, 5] = 1000.0  # costs its own group, and no other
    ours = rounded_activations(torch.from_numpy(x), wide).numpy()
    assert np.array_equal(ours, naive_rounding(x, wide))
    assert (np.abs(ours - x)[3, :32].max() < 0.07) == (wide != Wide.NONE)


def test_ties_go_to_the_even_one_and_tiny_groups_become_zeros():
    x = torch.zeros(1, 64)
    x[0, :5] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5])
    x[0, 32:] = 1e-40
    assert rounded_activations(x, Wide.NONE)[0, :5].tolist() == [127.0, 0.0, 2.0, 2.0, 0.0]
    assert all(not rounded_activations(x, wide)[0, 32:].any() for wide in Wide)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(poison):
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    x[1, 40] = poison
    linear = QuantisedLinear.of(to_q8_0(np.ones((8, 64), np.float32)))
    assert linear(x).isnan().all(-1).tolist() == [False, True, False]


def q4_0_blocks(values: np.ndarray) -> RawTensor:
    gguf = pytest.importorskip("gguf", reason="Q4_0 is made by the gguf package (pip install 'baton-serve[oracle]')")
    return RawTensor(Q4_0, values.shape, gguf.quantize(values, gguf.GGMLQuantizationType.Q4_0))


@pytest.mark.parametrize("quantise", [to_q8_0, to_q4_1, q4_0_blocks])
def test_the_product_is_that_of_the_rounded_values(quantise):
    rng = np.random.default_rng(3)
    raw = quantise(rng.standard_normal((24, 96), np.float32))
    x, bias = rng.standard_normal((7, 96), np.float32), rng.standard_normal(24).astype(np.float32)
    exact = (
        naive_rounding(x, Wide.NONE if raw.type == Q8_0 else Wide.LARGE).astype(np.float64)
        @ dequantise(raw).astype(np.float64).T
        + bias
    )
    ours = QuantisedLinear.of(raw, torch.from_numpy(bias))(torch.from_numpy(x)).numpy()
    assert np.abs(ours - exact).max() < 1e-4


def test_a_row_does_not_see_its_neighbours():
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    together = rounded_activations(x, Wide.LARGE)
    assert all(torch.equal(together[i : i + 1], rounded_activations(x[i : i + 1], Wide.LARGE)) for i in range(6))


# Whole models


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_linear_is_quantised_and_the_lookup_is_not(quantization, tied, monkeypatch):
    config = ModelConfig(**{**{name: getattr(CONFIG, name) for name in CONFIG.__slots__}, "tied_embeddings": tied})
    model = dummy_model(config, seed=2, quantization=quantization)
    linears = [model.head, *(x for layer in model.layers for x in (layer.attention.qkv, layer.attention.output))]
    linears += [x for layer in model.layers for x in (layer.mlp.gate_up, layer.mlp.down)]
    assert all(type(linear) is QuantisedLinear for linear in linears)
    stored = DummyWeights(config, 2)
    embedding = dequantise(weights_as(stored.raw("embed.weight"), "embed.weight", quantization))
    assert np.array_equal(model.embedding.numpy(), embedding)
    assert (model.head.weight.data_ptr() == model.embedding.data_ptr()) == tied


def test_none_is_exact_and_int8_is_nearer_to_it_than_int4():
    exact, same, int8, int4 = (
        all_logits(dummy_model(CONFIG, seed=2, quantization=mode), PROMPTS[1]) for mode in ("none", "none", "int8", "int4")
    )
    assert torch.equal(exact, same)
    far8, far4 = float((int8 - exact).square().mean()), float((int4 - exact).square().mean())
    assert 0 < far8 < far4 / 4
    assert torch.cosine_similarity(int8, exact, dim=-1).min() > 0.998
    assert torch.cosine_similarity(int4, exact, dim=-1).min() > 0.93


def test_rows_that_are_no_whole_blocks_stay_exact(tmp_path):
    """The tiny models are 42 wide."""
    oracle_model("llama-tied").save_pretrained(tmp_path)
    model = load_model(tmp_path, quantization="int8").model
    assert type(model.layers[0].mlp.gate_up) is type(model.head) is Linear
    assert type(model.layers[0].attention.output) is QuantisedLinear  # 6 heads of 16: rows of 96


@pytest.fixture
def wide_oracle(monkeypatch):
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6, "head_dim": 32}
    monkeypatch.setitem(CASES, "wide", ("Llama", sizes))
    return oracle_model("wide")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "F16"])
def test_a_file_s_own_blocks_are_computed_on(kind, wide_oracle, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", wide_oracle, "llama", kind=kind)
    exact, auto = load_model(path).model, load_model(path, quantization="auto").model
    if kind in ("Q8_0", "Q4_0", "Q4_1"):
        assert torch.equal(auto.layers[0].mlp.down.weight, exact.layers[0].mlp.down.weight)
    difference = (all_logits(auto, PROMPTS[1]) - all_logits(exact, PROMPTS[1])).abs().max()
    assert 0 < difference < 0.2  # logits reach 4 here


def test_smollm2_still_makes_sense_in_blocks(smollm2_path):
    loaded = load_model(smollm2_path, quantization="auto")
    vocabulary = {token: i for i, token in enumerate(GGUFFile(smollm2_path).metadata["tokenizer.ggml.tokens"])}
    prompt = [vocabulary[piece] for piece in ["The", "Ġcapital", "Ġof", "ĠFrance", "Ġis"]]
    assert greedy_tokens(loaded.model, prompt, 1) == [vocabulary["ĠParis"]]
