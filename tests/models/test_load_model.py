"""What load_model() gives besides the model: progress and ids."""

from __future__ import annotations

import json

import pytest
from gguf_files import write_gguf
from tiny_models import oracle_model

from baton.models.config_from_hf import config_from_hf
from baton.models.open import open_model
from dense_oracle import load_model


@pytest.fixture
def folder(tmp_path):
    oracle_model("llama").save_pretrained(tmp_path)
    return tmp_path


def test_progress_runs_from_nothing_to_all(folder, tmp_path):
    for path in (folder, write_gguf(tmp_path / "m.gguf", oracle_model("qwen2-tied"), "qwen2")):
        seen: list[tuple[int, int]] = []
        load_model(path, progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[0][0] == 0
        assert seen[-1][0] == seen[-1][1] > 0
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert len({total for _, total in seen}) == 1


def test_the_model_describes_itself(folder):
    assert repr(load_model(folder).model) == "<Decoder llama, 3 layers, 42 wide, 6/2 heads, torch.float32 on cpu>"


def test_opening_reads_no_weights(folder):
    opened = open_model(folder)
    assert opened.config.layers == 3
    assert len(opened.weights.stored()) == 30


def test_generation_config_knows_more_ends(folder):
    assert open_model(folder).config.eos_ids == (2,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert open_model(folder).config.eos_ids == (2, 9)
    assert open_model(folder).config.bos_id == 1


def test_a_config_that_says_nothing_of_it_has_a_head_of_its_own(folder):
    """transformers leaves out what is the default."""
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("tie_word_embeddings", None)
    assert not config_from_hf(raw).tied_embeddings
    assert config_from_hf({**raw, "tie_word_embeddings": True}).tied_embeddings


def test_configs_of_transformers_4(folder):
    raw = json.loads((folder / "config.json").read_text())
    modern = config_from_hf({**raw, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}})
    raw.pop("rope_parameters")
    old = config_from_hf({**raw, "rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert old == modern
    assert config_from_hf({**raw, "rope_theta": 5000.0, "rope_scaling": None}).rope.scaling is None


def test_an_absent_mistral_window_is_the_default_and_null_is_none(tmp_path):
    oracle_model("mistral").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert config_from_hf({**raw, "sliding_window": None}).window(0) is None
    raw.pop("sliding_window", None)
    assert config_from_hf(raw).window(2) == 4096


def test_qwen_windows_without_a_list_of_layer_types(tmp_path):
    """transformers 4 wrote only the first layer that has a window."""
    oracle_model("qwen2-window").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    listed = config_from_hf(raw).traits.layer_windows
    raw.pop("layer_types")
    assert config_from_hf(raw).traits.layer_windows == listed == (None, 4, 4)
    assert config_from_hf({**raw, "use_sliding_window": False}).traits.layer_windows == ()
