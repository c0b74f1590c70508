"""Models that also read images: their text part against transformers' whole model, given text alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ODD, PROMPTS, oracle_greedy, oracle_logits, transformers

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.config import LinearScaling
from baton.models.config_from_hf import config_from_hf
from baton.models.open import open_model
from dense_oracle import all_logits, greedy_tokens, load_model

safetensors = pytest.importorskip("safetensors.torch")
TEXT = {**ODD, "hidden_size": 48, "head_dim": 8, "tie_word_embeddings": True}
SIZES = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
VISION = {**SIZES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
MROPE = {"type": "mrope", "mrope_section": [1, 1, 2], "rope_type": "default"}


def wrapper(name: str) -> Any:
    """With random weights that make every part matter."""
    if name == "gemma3":
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        text = transformers.Gemma3TextConfig(**{**TEXT, "sliding_window": 5, "layer_types": kinds})
        vision = transformers.SiglipVisionConfig(**VISION)
        config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        model = transformers.Gemma3ForConditionalGeneration(config)
    elif name == "mistral3":
        text, vision = transformers.MistralConfig(**TEXT), transformers.PixtralVisionConfig(**VISION, head_dim=8)
        config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
        model = transformers.Mistral3ForConditionalGeneration(config)
    else:
        text = {key: value for key, value in TEXT.items() if key != "head_dim"} | {"rope_scaling": MROPE}
        vision = {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 48,
            "patch_size": 4,
        }
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
        model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            matrix = parameter.dim() == 2
            parameter.copy_(
                noise * (parameter.shape[-1] ** -0.5 if matrix else 0.3) + ("norm" in parameter_name and not matrix)
            )
    return model.eval().to(torch.float32)


@pytest.fixture(params=["gemma3", "mistral3", "qwen2.5-vl"])
def published(request, tmp_path) -> tuple[Path, Any]:
    model = wrapper(request.param)
    model.save_pretrained(tmp_path)
    return tmp_path, model


def changed(folder: Path, changes: dict[str, Any], *, flat: bool = False) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if flat:
        config |= config.pop("text_config") | {"model_type": "qwen2_5_vl"}
    path.write_text(json.dumps({**config, **changes}))


def test_logits_and_greedy_tokens_of_text_are_those_of_the_whole_model(published, caplog):
    folder, oracle = published
    with caplog.at_level(logging.INFO, logger="baton.models.open"):
        model = load_model(folder).model
    assert len(caplog.records) == 1
    assert "tensors for images are skipped" in caplog.text
    for prompt in PROMPTS:
        torch.testing.assert_close(all_logits(model, prompt), oracle_logits(oracle, prompt), atol=1e-4, rtol=0)
        found = greedy_tokens(model, prompt, 6)
        assert found == oracle_greedy(oracle, prompt, 6, found)


def test_a_tensor_that_is_of_neither_part_is_refused(published):
    folder, _ = published
    file = folder / "model.safetensors"
    tensors = safetensors.load_file(file)
    safetensors.save_file({**tensors, "audio_tower.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(ModelFileBroken, match=r"audio_tower"):
        load_model(folder)


def test_a_flat_config_of_an_older_file(tmp_path):
    oracle = wrapper("qwen2.5-vl")
    oracle.save_pretrained(tmp_path)
    expected = open_model(tmp_path).config
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 1_000_000.0, "rope_parameters": None}
    changed(tmp_path, {**rope, "architectures": ["Qwen2_5_VLForConditionalGeneration"]}, flat=True)
    assert open_model(tmp_path).config == expected


def test_gemma_3_4b_states_only_what_differs_from_the_defaults():
    """As published: heads, sizes of heads and the vocabulary are left out."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    ours = config_from_hf(raw)
    theirs = transformers.Gemma3TextConfig(**{**text, "rope_scaling": None})
    assert (ours.heads, ours.kv_heads, ours.head_dim) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim
    )  # fmt: skip
    assert (ours.vocab_size, ours.context_tokens_max) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (ours.norm_eps, ours.eos_ids, ours.tied_embeddings) == (theirs.rms_norm_eps, (1, 106), True)
    assert {ours.window(layer) for layer in range(34)} == {1024, None}
    assert ours.layer_rope(5).scaling == LinearScaling(factor=8.0)
    assert ours.layer_rope(0).scaling is None


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"text_config": {"model_type": "ministral3"}}, ModelUnsupported, "around ministral3"),
        ({"text_config": [1]}, ModelFileBroken, "text_config"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, ModelUnsupported, "LlavaForConditionalGeneration"),
    ],
)
def test_other_wrappers_are_refused_by_name(changes, error, word):
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mistral"}}
    with pytest.raises(error, match=word):
        config_from_hf({**raw, **changes})
