"""gpt-oss as it is published: experts in MXFP4, as blocks and scales in safetensors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_models import PROMPTS, oracle_greedy, oracle_logits, oracle_model

from baton.errors import ModelFileBroken
from baton.models.open import open_model
from baton.models.tensor_types import MXFP4
from dense_oracle import all_logits, greedy_tokens, load_model

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def published(tmp_path):
    """A folder with blocks and scales, and transformers' model of the numbers that they stand for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    oracle, rng = oracle_model("gpt-oss"), np.random.default_rng(4)
    oracle.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.load_file(file)
    parameters = dict(oracle.named_parameters())
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.from_numpy(rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8))
        scales = torch.from_numpy(rng.integers(121, 126, (experts, outputs, inputs // 32), np.uint8))
        parameters[name].data.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    safetensors.save_file(tensors, file)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return tmp_path, oracle


def test_logits_and_greedy_tokens_are_those_of_transformers(published):
    folder, oracle = published
    model = load_model(folder).model
    for prompt in PROMPTS:
        torch.testing.assert_close(all_logits(model, prompt), oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
        found = greedy_tokens(model, prompt, 6)
        assert found == oracle_greedy(oracle, prompt, 6, found)


def test_experts_stay_in_4_bits_until_they_are_computed_with(published):
    weights = open_model(published[0]).weights
    name = "layers.1.mlp.experts.3.up.weight"
    stored, raw = weights.stored()[name], weights.raw(name)
    assert (stored.type, stored.shape, stored.nbytes) == (MXFP4, (32, 64), 32 * 2 * 17)
    assert (raw.type, raw.data.nbytes) == (MXFP4, stored.nbytes)


@pytest.mark.parametrize("wrong", ["scales missing", "blocks missing", "shape", "type"])
def test_what_does_not_belong_together_is_refused(published, wrong):
    folder, _ = published
    file, name = folder / "model.safetensors", "model.layers.1.mlp.experts.down_proj"
    tensors = safetensors.load_file(file)
    if wrong.endswith("missing"):
        del tensors[f"{name}_{wrong.split()[0]}"]
    elif wrong == "shape":
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"][:, :-1].contiguous()
    else:
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"].float()
    safetensors.save_file(tensors, file)
    with pytest.raises(ModelFileBroken, match=r"down_proj"):
        load_model(folder)
