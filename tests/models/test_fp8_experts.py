"""Mixtures of experts in fp8, in the layout of Qwen3-30B-A3B-FP8: each expert has matrices and scales of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from fp8_files import is_quantised, meant, write_in_fp8, write_unpacked
from safetensors.torch import load_file, save_file
from tiny_models import CASES, MOE, PROMPTS, oracle_logits, oracle_model, transformers

from baton.errors import ModelFileBroken
from dense_oracle import all_logits, load_model

# One block and a half of hidden, one and a quarter of an expert: the last block of every matrix is smaller than the others.
WIDE = {**MOE, "hidden_size": 192, "moe_intermediate_size": 160, "head_dim": 64, "num_key_value_heads": 3}
KEPT = ("model.layers.1.mlp.experts.3.down_proj", "model.layers.2.self_attn.k_proj")
EXPERT = "model.layers.2.mlp.experts.4.up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders with the same weights in fp8, with scales in float32 and in bfloat16, and what they are in float32."""
    CASES["experts in fp8"] = ("Qwen3Moe", WIDE)
    plain = tmp_path_factory.mktemp("plain")
    oracle_model("experts in fp8").save_pretrained(plain)
    folders = {}
    for scale_type in (torch.float32, torch.bfloat16):
        folder = tmp_path_factory.mktemp("fp8")
        shutil.copytree(plain, folder, dirs_exist_ok=True)
        folders[scale_type] = (folder, write_in_fp8(folder, KEPT, scale_type))
    return folders


@pytest.fixture
def folder(made, tmp_path):
    return Path(shutil.copytree(made[torch.float32][0], tmp_path / "model"))


def stored(folder):
    return load_file(folder / "model.safetensors")


def test_the_layout_is_that_of_published_checkpoints(folder):
    """The generator's own test: what it writes is what the others are about."""
    tensors = stored(folder)
    for part, shape in (("gate", (160, 192)), ("up", (160, 192)), ("down", (192, 160))):
        name = f"model.layers.0.mlp.experts.2.{part}_proj.weight"
        assert (tensors[name].dtype, tuple(tensors[name].shape)) == (torch.float8_e4m3fn, shape)
        assert tensors[f"{name}_scale_inv"].shape == (2, 2)
    assert tensors["model.layers.0.mlp.gate.weight"].dtype == tensors["lm_head.weight"].dtype == torch.float32
    assert sum(name.endswith("_scale_inv") for name in tensors) == 3 * (4 + 3 * 5) - len(KEPT)
    kept = json.loads((folder / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert set(KEPT) < set(kept)
    assert "model.layers.0.mlp.gate" in kept


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16], ids=str)
def test_experts_are_what_bytes_times_scales_say(made, scale_type):
    folder, _ = made[scale_type]
    tensors, model = stored(folder), load_model(folder).model

    def wanted(name):
        return meant(tensors[name], tensors[f"{name}_scale_inv"]) if is_quantised(name, KEPT) else tensors[name]

    for number, layer in enumerate(model.layers):
        for expert in range(5):
            prefix = f"model.layers.{number}.mlp.experts.{expert}."
            gate, up, down = (wanted(f"{prefix}{part}_proj.weight") for part in ("gate", "up", "down"))
            assert torch.equal(layer.mlp.mlps[expert].gate_up.weight, torch.cat((gate, up)))
            assert torch.equal(layer.mlp.mlps[expert].down.weight, down)
        assert torch.equal(layer.mlp.router.weight, tensors[f"model.layers.{number}.mlp.gate.weight"])


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_those_of_transformers_with_the_weights_in_float32(made, tmp_path, scale_type):
    folder, true = made[scale_type]
    model = load_model(folder).model
    plain = write_unpacked(Path(shutil.copytree(folder, tmp_path / "plain")), true)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    oracle = transformers.Qwen3MoeForCausalLM.from_pretrained(plain, **eager).eval()
    for prompt in PROMPTS:
        torch.testing.assert_close(all_logits(model, prompt), oracle_logits(oracle, prompt), atol=1e-4, rtol=0)


def test_scales_may_be_in_another_shard_than_their_matrix(made, folder):
    tensors = stored(folder)
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        shards["b.safetensors" if name.endswith("_scale_inv") else "a.safetensors"][name] = tensor
    (folder / "model.safetensors").unlink()
    for name, part in shards.items():
        save_file(part, folder / name)
    places = {tensor: file for file, part in shards.items() for tensor in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    found, whole = load_model(folder).model, load_model(made[torch.float32][0]).model
    for one, other in zip(found.layers, whole.layers, strict=True):
        for ours, theirs in zip(one.mlp.linears(), other.mlp.linears(), strict=True):
            assert torch.equal(ours.weight, theirs.weight)


def scales_of(rows, columns):
    return {f"{EXPERT}_scale_inv": torch.ones(rows, columns)}


BROKEN = {
    "no scales": ([f"{EXPERT}_scale_inv"], {}, rf"{EXPERT}: fp8 without scales \(_scale_inv\)"),
    "scales alone": ([EXPERT], {}, f"{EXPERT}_scale_inv: these scales belong to no matrix in fp8"),
    "other scales": ([], scales_of(2, 1), r"scales are \[2, 1\]; a matrix of \[160, 192\] in blocks of 128 x 128 has \[2, 2\]"),
    "no expert": ([EXPERT, f"{EXPERT}_scale_inv"], {}, r"1 of \d+ tensors are missing: layers.2.mlp.experts.4.up.weight"),
    "a smaller expert": (
        [],
        {EXPERT: torch.zeros(128, 192, dtype=torch.float8_e4m3fn), **scales_of(1, 2)},
        rf"{EXPERT}: the shape is \[128, 192\], but the config asks for \[160, 192\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_with_one_expert_is_said(folder, case):
    lost, others, message = BROKEN[case]
    tensors = {name: tensor for name, tensor in stored(folder).items() if name not in lost} | others
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelFileBroken, match=message):
        load_model(folder)
