"""How a model's files want embeddings pooled; and that vectors are those of transformers, pooled so by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "chaos"))
from chaos_model import make_model

from baton.errors import InvalidConfig, ModelFileBroken
from baton.llm import LLM
from baton.models.open import open_model
from baton.models.pooling import pooling_by_gguf, pooling_by_hf
from baton.models.scoring import scoring_by_gguf, scoring_by_hf

PROMPTS = [[5, 3, 60, 7, 7, 200], [11], [30, 2, 8, 9]]


def say_pooling(folder: Path, config: dict[str, object], path: str = "1_Pooling", *others: str) -> Path:
    """As sentence-transformers writes it."""
    modules = [("", "Transformer"), (path, "Pooling"), *((f"2_{other}", other) for other in others)]
    listed = [
        {"idx": i, "name": str(i), "path": at, "type": f"sentence_transformers.models.{kind}"}
        for i, (at, kind) in enumerate(modules)
    ]
    (folder / path).mkdir(parents=True, exist_ok=True)
    (folder / path / "config.json").write_text(json.dumps(config))
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def flags(*chosen: str) -> dict[str, object]:
    every = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    return {
        "word_embedding_dimension": 32,
        **{f"pooling_mode_{name}": name in chosen for name in every},
        "include_prompt": True,
    }


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (flags("lasttoken"), "last"),
        (flags("mean_tokens"), "mean"),
        (flags("cls_token"), "cls"),
        (flags("mean_sqrt_len_tokens"), "mean"),
        (flags("max_tokens"), "max_tokens"),
        (flags("mean_tokens", "max_tokens"), "mean and max_tokens"),
        ({"embedding_dimension": 32, "pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_what_a_folder_says(tmp_path, config, expected):
    assert pooling_by_hf(say_pooling(tmp_path, config)) == expected


def test_where_it_says_it(tmp_path):
    assert pooling_by_hf(tmp_path) == ""
    say_pooling(tmp_path, flags("lasttoken"))
    (tmp_path / "modules.json").unlink()
    assert pooling_by_hf(tmp_path) == "last", "1_Pooling alone"
    other = say_pooling(tmp_path / "other", flags("cls_token"), "7_Pooling")
    assert pooling_by_hf(other) == "cls", "where modules.json says that it is"
    assert pooling_by_hf(say_pooling(tmp_path / "normalised", flags("lasttoken"), "1_Pooling", "Normalize")) == "last"
    with_dense = say_pooling(tmp_path / "dense", flags("mean_tokens"), "1_Pooling", "Dense")
    assert pooling_by_hf(with_dense) == "a module that is not there (Dense)", "its vectors would be others"


def test_a_file_that_chooses_nothing_is_broken(tmp_path):
    for config in (flags(), {}):
        with pytest.raises(ModelFileBroken, match="no pooling mode"):
            pooling_by_hf(say_pooling(tmp_path, config))


@pytest.mark.parametrize(
    ("kind", "expected"), [(None, ""), (0, ""), (1, "mean"), (2, "cls"), (3, "last"), (4, "rank"), (9, "number 9")]
)
def test_what_a_gguf_file_says(kind, expected):
    metadata = {"general.architecture": "qwen3"} | ({} if kind is None else {"qwen3.pooling_type": kind})
    assert pooling_by_gguf(metadata) == expected


def test_a_gguf_file_is_asked(tmp_path):
    from gguf_files import write_gguf
    from tiny_models import oracle_model

    oracle = oracle_model("qwen3")
    assert open_model(write_gguf(tmp_path / "last.gguf", oracle, "qwen3", metadata={"pooling_type": 3})).pooling == "last"
    assert open_model(write_gguf(tmp_path / "none.gguf", oracle, "qwen3")).pooling == ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("embedding") / "model")


def expected_vectors(folder: Path, pooling: str) -> list[np.ndarray]:
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers (pip install 'baton-serve[oracle]')")
    import torch

    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for prompt in PROMPTS:
        with torch.no_grad():
            states = model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
        vector = {"last": states[-1], "mean": states.mean(0), "cls": states[0]}[pooling]
        found.append(vector / np.linalg.norm(vector))
    return found


@pytest.mark.parametrize(
    ("config", "pooling"), [(None, "mean"), (flags("lasttoken"), "last"), (flags("cls_token"), "cls")], ids=str
)
def test_vectors_are_those_of_transformers(folder, tmp_path, config, pooling):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    if config is not None:
        say_pooling(tmp_path, config)
    llm = LLM(str(tmp_path), quantization="none", kv_dtype="float32", kv_blocks=64, threads=1)
    answers = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS])
    for answer, expected in zip(answers, expected_vectors(folder, pooling), strict=True):
        np.testing.assert_allclose(answer.outputs.embedding, expected, atol=2e-5)
    chosen = llm.embed([{"prompt_token_ids": PROMPTS[0]}], pooling="mean")[0]
    np.testing.assert_allclose(chosen.outputs.embedding, expected_vectors(folder, "mean")[0], atol=2e-5)


def test_a_pooling_that_is_not_there_is_refused(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    say_pooling(tmp_path, flags("max_tokens"))
    llm = LLM(str(tmp_path), kv_blocks=64, threads=1)
    with pytest.raises(InvalidConfig, match="pooled by max_tokens"):
        llm.embed([{"prompt_token_ids": PROMPTS[0]}])
    assert len(llm.embed([{"prompt_token_ids": PROMPTS[0]}], pooling="last")) == 1


@pytest.mark.parametrize(
    ("name", "architecture", "module", "expected"),
    [
        ("Qwen3-Reranker-0.6B", "qwen3", "", "yes_no"),
        ("models--Qwen--Qwen3-Reranker-4B", "qwen3", "", "yes_no"),
        ("bge-reranker", "llama", "", ""),
        ("plain", "qwen3", "", ""),
        ("plain", "qwen3", "LogitScore", "yes_no"),
        ("plain", "qwen3", "Pooling", "vectors"),
    ],
)
def test_how_a_folder_scores_pairs(tmp_path, name, architecture, module, expected):
    folder = tmp_path / name / "snapshots" / "abc"
    folder.mkdir(parents=True)
    if module == "Pooling":
        say_pooling(folder, flags("lasttoken"))
    elif module:
        listed = [{"idx": 0, "name": "0", "path": "", "type": f"sentence_transformers.cross_encoder.modules.{module}"}]
        (folder / "modules.json").write_text(json.dumps(listed))
    assert scoring_by_hf(folder, architecture) == expected


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, ""),
        ({"qwen3.pooling_type": 4}, "yes_no"),
        ({"qwen3.pooling_type": 3}, "vectors"),
        ({"general.name": "Qwen3 Reranker 0.6B"}, "yes_no"),
        ({"tokenizer.chat_template.rerank": "x"}, "yes_no"),
    ],
)
def test_how_a_gguf_file_scores_pairs(metadata, expected):
    metadata = {"general.architecture": "qwen3", **metadata}
    assert scoring_by_gguf(Path("model.gguf"), "qwen3", metadata) == expected
