"""Every architecture and setting gives the logits and the greedy tokens of transformers in float32."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_models import CASES, PROMPTS, oracle_greedy, oracle_logits, oracle_model

from dense_oracle import all_logits, greedy_tokens, load_model

TOLERANCE = 1e-4


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_equal_transformers(case, tmp_path):
    oracle = oracle_model(case)
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path).model
    for prompt in PROMPTS:
        expected = oracle_logits(oracle, prompt)
        torch.testing.assert_close(all_logits(model, prompt), expected, atol=TOLERANCE, rtol=0)
        found = greedy_tokens(model, prompt, 8)
        assert found == oracle_greedy(oracle, prompt, 8, found)


@pytest.mark.parametrize("case", ["llama-theta", "llama-llama3", "llama-yarn", "qwen2-window", "mistral-window"])
def test_every_setting_matters(case, tmp_path):
    """The oracle test would be blind to a setting that changes nothing at these sizes."""
    oracle = oracle_model(case)
    oracle.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw.pop("rope_parameters")
    path.write_text(json.dumps({**raw, "rope_theta": 10000.0, "sliding_window": None, "use_sliding_window": False}))
    model = load_model(tmp_path).model
    difference = (all_logits(model, PROMPTS[3]) - oracle_logits(oracle, PROMPTS[3])).abs().max()
    assert difference > 100 * TOLERANCE


@pytest.mark.parametrize("case", ["glm4-moe", "ernie-moe"])
def test_the_correction_of_the_choice_matters(case, tmp_path):
    from safetensors.torch import load_file, save_file

    oracle = oracle_model(case)
    oracle.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    corrections = [name for name in tensors if name.endswith("correction_bias")]
    assert corrections
    save_file({**tensors, **{name: torch.zeros_like(tensors[name]) for name in corrections}}, file, {"format": "pt"})
    difference = (all_logits(load_model(tmp_path).model, PROMPTS[3]) - oracle_logits(oracle, PROMPTS[3])).abs().max()
    assert difference > 100 * TOLERANCE


@pytest.mark.parametrize("case", ["llama", "qwen2-tied", "qwen3"])
def test_shards_are_the_same_model(case, tmp_path):
    oracle = oracle_model(case)
    oracle.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    torch.testing.assert_close(
        all_logits(load_model(tmp_path).model, PROMPTS[1]),
        oracle_logits(oracle, PROMPTS[1]),
        atol=TOLERANCE,
        rtol=0,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_compute_in_float32(dtype, tmp_path):
    oracle_model("llama").to(dtype).save_pretrained(tmp_path)
    # Read back and not cast back: casting a transformers model also rounds its rotary frequencies.
    from transformers import LlamaForCausalLM  # seconds of importing, in every process that collects tests

    oracle = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = load_model(tmp_path).model
    assert model.dtype == torch.float32
    expected = oracle_logits(oracle, PROMPTS[1])
    torch.testing.assert_close(all_logits(model, PROMPTS[1]), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", ["llama-tied", "qwen3"])
def test_bfloat16_models_compute_in_bfloat16(case, tmp_path):
    oracle = oracle_model(case)
    oracle.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16).model
    logits, expected = all_logits(model, PROMPTS[1]), oracle_logits(oracle, PROMPTS[1])
    assert logits.dtype == torch.bfloat16
    assert torch.cosine_similarity(logits.float(), expected, dim=-1).min() > 0.999


def test_a_stored_head_is_ignored_where_the_embedding_is_the_head(tmp_path):
    from safetensors.torch import load_file, save_file

    oracle = oracle_model("llama-tied")
    oracle.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    # Llama 2 files of old also carry the rotary frequencies.
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**tensors, "lm_head.weight": torch.zeros(97, 42), **derived}, file)
    expected = oracle_logits(oracle, PROMPTS[1])
    torch.testing.assert_close(all_logits(load_model(tmp_path).model, PROMPTS[1]), expected, atol=TOLERANCE, rtol=0)
