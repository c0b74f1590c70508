"""Checkpoints with heads that predict further tokens (MTP), as GLM-4.5 and ERNIE 4.5 are published: the heads are skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import gguf
from safetensors.torch import load_file, save_file
from test_gguf_families import FAMILIES, write
from tiny_models import PROMPTS, oracle_logits, oracle_model

from baton.errors import ModelFileBroken
from dense_oracle import all_logits, load_model

HEADS = {
    "glm4-moe": ("model.layers.3.", ("self_attn.q_proj.weight", "eh_proj.weight", "enorm.weight", "shared_head.norm.weight")),
    "ernie-moe": ("model.mtp_", ("block.0.self_attn.q_proj.weight", "emb_norm.0.weight", "linear_proj.0.weight")),
}


def published(folder: Path, case: str, **settings: Any) -> Any:
    """The checkpoint of a small model, with a head beside it. Returns the oracle, which has none."""
    oracle = oracle_model(case)
    oracle.save_pretrained(folder)
    prefix, names = HEADS[case]
    assert oracle.config.num_hidden_layers == 3
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **{prefix + name: torch.ones(4, 4) for name in names}}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return oracle


@pytest.mark.parametrize("case", HEADS)
def test_heads_of_a_folder_are_skipped(case, tmp_path):
    oracle = published(tmp_path, case, num_nextn_predict_layers=1)
    model = load_model(tmp_path).model
    torch.testing.assert_close(all_logits(model, PROMPTS[0]), oracle_logits(oracle, PROMPTS[0]), atol=2e-4, rtol=0)


def test_a_layer_too_many_is_refused_where_the_config_has_no_heads(tmp_path):
    published(tmp_path, "glm4-moe", num_nextn_predict_layers=0)
    with pytest.raises(ModelFileBroken, match="no place in a model of this config"):
        load_model(tmp_path)


def test_heads_of_a_gguf_file_are_skipped(tmp_path, monkeypatch):
    oracle = oracle_model("glm4-moe")
    architecture, names, settings = FAMILIES["glm4-moe"]
    layers = oracle.config.num_hidden_layers
    add = gguf.GGUFWriter.write_header_to_file

    def with_a_head(writer: Any) -> None:
        for name in ("attn_q", "nextn.eh_proj", "nextn.enorm"):
            writer.add_tensor(f"blk.{layers}.{name}.weight", torch.ones(4, 4).numpy())
        add(writer)

    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", with_a_head)
    path = write(
        tmp_path / "m.gguf", oracle, architecture, names, {**settings, "block_count": layers + 1, "nextn_predict_layers": 1}
    )
    model = load_model(path).model
    assert model.config.layers == layers
    torch.testing.assert_close(all_logits(model, PROMPTS[0]), oracle_logits(oracle, PROMPTS[0]), atol=2e-4, rtol=0)
