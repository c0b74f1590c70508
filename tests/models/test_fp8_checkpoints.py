"""Checkpoints in fp8 with scales of blocks: read as they are, and on a CPU what their numbers say in float32."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fp8_files import meant, write_in_fp8
from safetensors.torch import load_file, save_file
from tiny_models import CASES, ODD, PROMPTS, oracle_logits, oracle_model

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.dequantise import E4M3_VALUES, dequantise
from baton.models.open import open_model
from baton.models.raw_tensor import RawTensor
from baton.models.tensor_types import F8_E4M3
from dense_oracle import all_logits, load_model

sys.path.append(str(Path(__file__).parent.parent / "worker"))

# One and a half blocks wide, q of three and k of one and a half: the last block of each is smaller than the others.
WIDE = {**ODD, "hidden_size": 192, "intermediate_size": 320, "head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 3}
KEPT = ("model.layers.1.mlp.down_proj", "model.layers.2.self_attn.k_proj")


@pytest.fixture
def oracle(monkeypatch):
    monkeypatch.setitem(CASES, "wide", ("Qwen3", WIDE))
    return oracle_model("wide")


@pytest.fixture
def folder(oracle, tmp_path):
    oracle.save_pretrained(tmp_path)
    return tmp_path


def test_every_byte_is_the_number_that_torch_reads():
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3_VALUES, theirs)
    assert np.isnan(E4M3_VALUES).sum() == 2


@pytest.mark.parametrize("begin", [0, 1])
def test_every_pair_of_bytes_at_any_address(begin):
    """They are looked up in pairs: every pair, an odd byte in the end, and pairs that do not lie at whole words."""
    stored = np.zeros(begin + 3 * 43691, np.uint8)[begin:]
    stored[: 1 << 17] = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    stored[-1] = 0x81
    found = dequantise(RawTensor(F8_E4M3, (3, 43691), stored.reshape(3, -1)))
    np.testing.assert_array_equal(found.reshape(-1), E4M3_VALUES[stored])


@pytest.mark.parametrize("scale_type", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_weights_in_float32(oracle, folder, scale_type):
    before = oracle_logits(oracle, PROMPTS[3])
    true = write_in_fp8(folder, KEPT, scale_type)
    oracle.load_state_dict(true)
    model = load_model(folder).model
    assert (before - oracle_logits(oracle, PROMPTS[3])).abs().max() > 0.01, "rounding shows"
    for prompt in PROMPTS:
        torch.testing.assert_close(all_logits(model, prompt), oracle_logits(oracle, prompt), atol=1e-4, rtol=0)


def test_a_matrix_and_its_scales_are_one_tensor(folder):
    write_in_fp8(folder)
    raw, opened = load_file(folder / "model.safetensors"), open_model(folder)
    assert not [name for name in opened.weights.stored() if "scale" in name]
    name = "model.layers.0.mlp.down_proj.weight"
    found = opened.weights.raw("layers.0.mlp.down.weight")
    assert found.type.name == "F8_E4M3"
    assert found.data.tobytes() == raw[name].view(torch.uint8).numpy().tobytes(), "as it is stored"
    np.testing.assert_array_equal(dequantise(found), meant(raw[name], raw[f"{name}_scale_inv"]).numpy())


@pytest.mark.parametrize("quantization", ["none", "auto"])
def test_a_cpu_serves_it(oracle, folder, quantization):
    """With the C library: the same tokens as from the same weights in float32."""
    from rig import Rig, load_path

    true, answers = write_in_fp8(folder), {}
    for kind in ("fp8", "float32"):
        if kind == "float32":
            save_file(true, folder / "model.safetensors")
        rig = Rig(load_path(folder, compute="native", quantization=quantization), block_size=16, blocks=16)
        for number, prompt in enumerate(PROMPTS):
            rig.submit(f"{number}", prompt, max_tokens=6)
        answers[kind] = rig.run()
        rig.close()
    assert answers["fp8"] == answers["float32"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t, name: t.pop(f"{name}_scale_inv"), "fp8 without scales"),
        (lambda t, name: t.update({name: t[name].float()}), "belong to no matrix in fp8"),
        (lambda t, name: t.update({name: t[name][0], f"{name}_scale_inv": torch.ones(3)}), "belong to no matrix in fp8"),
        (lambda t, name: t.update({f"{name}_scale_inv": torch.ones(1, 1)}), r"are \[1, 1\]; .*\[192, 320\] .*has \[2, 3\]"),
    ],
)
def test_scales_that_do_not_fit(folder, edit, message):
    write_in_fp8(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors, "model.layers.0.mlp.down_proj.weight")
    save_file(tensors, path)
    with pytest.raises(ModelFileBroken, match=message):
        open_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"weight_block_size": [64, 64]}, r"supported are e4m3 with blocks of \[128, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme static"),
        ({"fmt": "e5m2"}, "supported are e4m3"),
        ({"quant_method": "compressed-tensors"}, "format is None; supported is pack-quantized"),
    ],
)
def test_other_kinds_of_fp8_are_refused(folder, changes, message):
    write_in_fp8(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match=message):
        open_model(folder)


def test_fp8_that_the_config_says_nothing_of(folder):
    write_in_fp8(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    with pytest.raises(ModelFileBroken, match=r"no quantization_config, but .*_proj.weight is in fp8"):
        open_model(folder)
