"""AWQ, GPTQ and compressed-tensors: the values of the folder, the logits of transformers, and clear refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from packed_folders import METHODS, settings_of, write_packed
from safetensors.torch import load_file, save_file
from tiny_models import PROMPTS, oracle_greedy, oracle_logits

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.dequantise import dequantise
from baton.models.open import open_model
from dense_oracle import all_logits, greedy_tokens, load_model

KINDS = {"awq": "Q4_1", "gptq": "Q4_0", "gptq-zeros": "Q4_1", "gptq-order": "F32", "compressed-tensors": "Q4_0"}
DOWN = "layers.0.mlp.down.weight"


@pytest.mark.parametrize("method", METHODS)
def test_values_and_logits_are_those_of_the_folder(method, tmp_path):
    oracle = write_packed(tmp_path, method)
    weights = open_model(tmp_path).weights
    kind = weights.stored()[DOWN].type.name
    assert kind == KINDS.get(method, "Q4_1")
    tolerance = 1e-2 if kind == "Q4_1" else 2e-4  # minima are rounded
    values = oracle.get_parameter("model.layers.0.mlp.down_proj.weight").detach().numpy()
    np.testing.assert_allclose(dequantise(weights.raw(DOWN)), values, atol=0.05 * 11 * 2**-11, rtol=0)
    model = load_model(tmp_path).model
    for prompt in PROMPTS:
        torch.testing.assert_close(all_logits(model, prompt), oracle_logits(oracle, prompt), atol=tolerance, rtol=0)
        found = greedy_tokens(model, prompt, 6)
        assert found == oracle_greedy(oracle, prompt, 6, found)


def test_symmetric_numbers_are_exact(tmp_path):
    oracle = write_packed(tmp_path, "gptq")
    values = oracle.get_parameter("model.layers.0.mlp.down_proj.weight").detach().numpy()
    assert np.array_equal(dequantise(open_model(tmp_path).weights.raw(DOWN)), values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bits": 8}, "quantization_config.bits is 8; supported is 4"),
        ({"group_size": 0}, "group_size is 0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported is gptq, gptq_v2"),
    ],
)
def test_other_settings_are_refused(change, words, tmp_path):
    write_packed(tmp_path, "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnsupported, match=words):
        open_model(tmp_path)


def test_compressed_tensors_of_eight_bits_are_refused(tmp_path):
    write_packed(tmp_path, "compressed-tensors")
    settings = settings_of("compressed-tensors")
    settings["config_groups"]["group_0"]["weights"]["num_bits"] = 8
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(ModelUnsupported, match="num_bits is 8; supported is 4"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("part", "tensor", "words"),
    [
        ("scales", None, "scales of this matrix is missing"),
        ("qweight", None, "its numbers are missing"),
        ("scales", torch.ones(1, 64).half(), "its matrix asks for"),
        ("g_idx", torch.full((96,), 9).int(), "names groups that are not there"),
        ("bias", torch.ones(64).half(), "no place in a model of this config"),
    ],
)
def test_damaged_parts_are_refused(part, tensor, words, tmp_path):
    write_packed(tmp_path, "gptq")
    with_part(tmp_path, part, tensor)
    with pytest.raises(ModelFileBroken, match=words):
        load_model(tmp_path)


def with_part(folder, part, tensor):
    """Another tensor for a part of one matrix; None removes it."""
    name = f"model.layers.0.mlp.down_proj.{part}"
    tensors = {key: value for key, value in load_file(folder / "model.safetensors").items() if key != name}
    save_file(tensors if tensor is None else {**tensors, name: tensor.contiguous()}, folder / "model.safetensors")


def part_of(folder, part):
    return load_file(folder / "model.safetensors")[f"model.layers.0.mlp.down_proj.{part}"]


@pytest.mark.parametrize(
    ("part", "tensor", "words"),
    [
        ("weight_shape", torch.tensor([999, 7]), r"weight_shape: it is \[999, 7\], and the numbers are of a matrix \[64, 96\]"),
        ("weight_packed", torch.zeros(0, 12).int(), r"weight_packed: \[0, 12\] is no part"),
        ("qzeros", torch.zeros(3, 8).int(), r"qzeros: .* is no part of a matrix in 4 bits of compressed-tensors"),
    ],
)
def test_damaged_parts_of_compressed_tensors_are_refused(part, tensor, words, tmp_path):
    write_packed(tmp_path, "compressed-tensors")
    with_part(tmp_path, part, tensor)
    with pytest.raises(ModelFileBroken, match=words):
        open_model(tmp_path)


@pytest.mark.parametrize("group", [32, -1])
def test_numbers_without_inputs_are_refused(group, tmp_path):
    write_packed(tmp_path, "gptq")
    with_part(tmp_path, "qweight", torch.zeros(0, 64).int())
    set_quantization(tmp_path, settings_of("gptq") | {"group_size": group})
    with pytest.raises(ModelFileBroken, match=r"qweight: \[0, 64\] is no part"):
        open_model(tmp_path)


def set_quantization(folder, settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def test_an_empty_bias_has_no_place(tmp_path):
    write_packed(tmp_path, "gptq")
    with_part(tmp_path, "bias", torch.zeros(0, 3))
    with pytest.raises(ModelFileBroken, match="no place in a model of this config"):
        load_model(tmp_path)


def test_zeros_that_the_config_promises_must_be_there(tmp_path):
    write_packed(tmp_path, "compressed-tensors")
    set_quantization(tmp_path, settings_of("compressed-zeros"))
    with pytest.raises(ModelFileBroken, match="weight_zero_point of this matrix is missing"):
        open_model(tmp_path)


@pytest.mark.parametrize("factor", [1e7, 1e-7, 1.0001], ids=["large", "small", "between"])
def test_scales_that_are_no_float16_stay_exact(factor, tmp_path):
    write_packed(tmp_path, "gptq")
    scales = part_of(tmp_path, "scales").float() * factor
    with_part(tmp_path, "scales", scales)
    weights = open_model(tmp_path).weights
    assert weights.stored()[DOWN].type.name == "F32"
    words = part_of(tmp_path, "qweight")
    codes = np.stack([(words.numpy() >> (4 * at)) & 15 for at in range(8)], 1).reshape(96, 64)
    expected = ((codes.astype(np.float32) - 8) * np.repeat(scales.numpy(), 32, 0)).T
    assert np.array_equal(dequantise(weights.raw(DOWN)), expected)


def test_minima_beyond_float16_are_refused(tmp_path):
    write_packed(tmp_path, "gptq-zeros")
    with_part(tmp_path, "scales", torch.full((3, 64), 60000.0).half())
    with pytest.raises(ModelUnsupported, match="minima beyond the range of float16"):
        load_model(tmp_path)


def test_a_matrix_beside_its_packed_numbers_is_refused(tmp_path):
    write_packed(tmp_path, "awq")
    with_part(tmp_path, "weight", torch.zeros(64, 96))
    with pytest.raises(ModelFileBroken, match=r"down_proj\.weight: also stored as .*down_proj\.qweight"):
        open_model(tmp_path)
