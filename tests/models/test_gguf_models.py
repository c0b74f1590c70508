"""A model read from a GGUF file is the model it was converted from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gguf_files import gguf, interleaved, write_gguf
from tiny_models import CASES, PROMPTS, oracle_greedy, oracle_logits, oracle_model

from baton.errors import ModelLoadError
from baton.models.config import FrequencyDivisors
from baton.models.dequantise import dequantise
from baton.models.load import build_model
from baton.models.loaders.arranged import ArrangedWeights
from baton.models.loaders.gguf_reader import GGUFFile
from baton.models.open import open_model
from dense_oracle import all_logits, greedy_tokens, load_model

TOLERANCE = 1e-4


def assert_same(model, oracle):
    for prompt in PROMPTS:
        expected = oracle_logits(oracle, prompt)
        torch.testing.assert_close(all_logits(model, prompt), expected, atol=TOLERANCE, rtol=0)
        found = greedy_tokens(model, prompt, 6)
        assert found == oracle_greedy(oracle, prompt, 6, found)


@pytest.mark.parametrize(
    ("case", "architecture"),
    [
        ("llama", "llama"),
        ("llama-tied", "llama"),
        ("llama-biases", "llama"),
        ("mistral", "llama"),
        ("qwen2", "qwen2"),
        ("qwen2-tied", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_float32_files(case, architecture, tmp_path):
    oracle = oracle_model(case)
    loaded = load_model(write_gguf(tmp_path / "m.gguf", oracle, architecture))
    assert_same(loaded.model, oracle)
    assert loaded.config.tied_embeddings == oracle.config.tie_word_embeddings
    assert (loaded.config.bos_id, loaded.config.eos_ids) == (1, (2, 7, 9))


@pytest.mark.parametrize(
    ("case", "metadata"),
    [
        ("mistral-window", {"attention.sliding_window": 5}),
        ("llama-linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0}),
        ("llama-linear", {"rope.scaling.factor": 3.0}),  # linear is what llama.cpp takes where no type is named
        ("llama-linear", {"rope.scale_linear": 3.0}),
        ("llama", {"rope.scaling.type": "none", "rope.scaling.factor": 3.0}),
        (
            "llama-yarn",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 16,
            },
        ),
        (
            "llama-yarn-attention-factor",  # a file has it as a factor of what follows from the other settings
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 2.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.attn_factor": 1.2 / (0.1 * math.log(2.0) + 1.0),
            },
        ),
    ],
)
def test_settings_in_the_metadata(case, metadata, tmp_path):
    oracle = oracle_model(case)
    assert_same(load_model(write_gguf(tmp_path / "m.gguf", oracle, "llama", metadata=metadata)).model, oracle)


def test_yarn_without_a_factor_is_refused(tmp_path):
    oracle = oracle_model("llama")
    path = write_gguf(tmp_path / "m.gguf", oracle, "llama", metadata={"rope.scaling.type": "yarn"})
    with pytest.raises(ModelLoadError, match=r"rope\.scaling\.factor"):
        load_model(path)


def test_llama3_scaling_is_a_tensor_of_divisors(tmp_path):
    oracle = oracle_model("llama-llama3")
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    divisors = (plain / oracle.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors.min() == 1.0
    assert divisors.max() == 4.0
    loaded = load_model(write_gguf(tmp_path / "m.gguf", oracle, "llama", extra={"rope_freqs.weight": divisors}))
    assert isinstance(loaded.config.rope.scaling, FrequencyDivisors)
    assert_same(loaded.model, oracle)


def test_both_config_readers_agree(tmp_path):
    oracle = oracle_model("qwen3")
    oracle.save_pretrained(tmp_path / "hf")
    from_hf = open_model(tmp_path / "hf").config
    from_gguf = open_model(write_gguf(tmp_path / "m.gguf", oracle, "qwen3")).config
    assert from_gguf.norm_eps == pytest.approx(from_hf.norm_eps)
    for field in ("architecture", "vocab_size", "layers", "hidden_size", "heads", "kv_heads", "head_dim"):
        assert getattr(from_gguf, field) == getattr(from_hf, field)
    for field in ("intermediate_size", "rope", "tied_embeddings", "traits", "context_tokens_max", "bos_id"):
        assert getattr(from_gguf, field) == getattr(from_hf, field)


@pytest.fixture
def wide_oracle(monkeypatch):
    """Quantised rows must be a multiple of 32 long."""
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_attention_heads": 6, "head_dim": 32}
    monkeypatch.setitem(CASES, "wide", ("Llama", sizes))
    return oracle_model("wide")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_files_and_their_raw_bytes(kind, wide_oracle, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", wide_oracle, "llama", kind=kind)
    opened = open_model(path)
    source = opened.weights
    assert isinstance(source, ArrangedWeights)
    config, quantised = opened.config, gguf.GGMLQuantizationType[kind]
    for ours, theirs, heads in [
        ("layers.1.attention.q.weight", "model.layers.1.self_attn.q_proj.weight", config.heads),
        ("layers.2.attention.k.weight", "model.layers.2.self_attn.k_proj.weight", config.kv_heads),
        ("layers.0.mlp.down.weight", "model.layers.0.mlp.down_proj.weight", None),
    ]:
        values = wide_oracle.state_dict()[theirs].numpy()
        raw = source.raw(ours)
        assert raw.type.name == kind
        assert raw.shape == values.shape
        # Quantising row by row commutes with moving rows, so the raw rows are those of the unconverted matrix.
        assert np.array_equal(raw.data, gguf.quantize(values, quantised).view(np.uint8))
        if heads is not None:
            stored = GGUFFile(path).tensors[f"blk.{ours.split('.')[1]}.attn_{ours.split('.')[3]}.weight"]
            in_file = np.frombuffer(path.read_bytes(), np.uint8, stored.nbytes, stored.offset).reshape(len(values), -1)
            assert np.array_equal(in_file, interleaved(raw.data, heads))
        assert np.array_equal(dequantise(raw), gguf.dequantize(gguf.quantize(values, quantised), quantised))
    exact, half = (build_model(config, source, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(half.embedding, exact.embedding.to(torch.bfloat16))


def test_the_reader_finds_what_the_gguf_package_finds(wide_oracle, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", wide_oracle, "llama", kind="Q4_1")
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
    assert list(ours.metadata) == keys
    for key in keys:
        assert ours.metadata[key] == theirs.fields[key].contents()
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
