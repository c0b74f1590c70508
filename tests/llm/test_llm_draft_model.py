"""LLM with a draft model: the same answers, one pool more, and refusals before any weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from chaos_model import make_model

from baton.config import WorkerConfig
from baton.errors import InvalidConfig, ModelNotFound, ModelUnsupported
from baton.llm import LLM, SamplingParams
from baton.models.loaders.safetensors import SafetensorsWeights
from baton.worker.build import build_worker

SETTINGS: dict[str, Any] = {"threads": 1, "device": "cpu", "block_size": 16, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def no_weights(monkeypatch):
    def raw(self, name: str):
        raise AssertionError("weights were read")

    monkeypatch.setattr(SafetensorsWeights, "raw", raw)


def test_the_same_weights_are_right_and_change_nothing(tiny):
    prompts, params = ["abcabc", "hello", "hello you"], SamplingParams(temperature=0.0, max_tokens=40, logprobs=2)
    with (
        LLM(str(tiny), kv_blocks=64, **SETTINGS) as plain,
        LLM(str(tiny), kv_blocks=64, speculate=f"draft:{tiny}", **SETTINGS) as drafting,
    ):
        drafting._runner._draft_model._price = None  # all drafts run
        expected, answers = plain.generate(prompts, params), drafting.generate(prompts, params)
        stats = drafting.instance.stats
        assert drafting.config.speculate == f"draft:{tiny}"
        for one, other in zip(expected, answers, strict=True):
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
            if plain._runner.executor.name != "torch":
                assert one.outputs[0].logprobs == other.outputs[0].logprobs
                assert sum(stats.accepted_drafts) == stats.drafts > 0


def test_the_load_of_the_draft_model_is_announced_and_reported(tiny):
    """A start without news for 600 s is given up."""
    seen: list[object] = []
    config = WorkerConfig(model=str(tiny), threads=1, slots=4, blocks=8, speculate=f"draft:{tiny}")
    build_worker(config, progress=lambda done, total: seen.append((done, total)), announce=seen.append)
    at = seen.index("loading the draft model")
    for part in (seen[:at], seen[at:]):
        shares = [each for each in part if isinstance(each, tuple)]
        assert shares
        assert shares[-1][0] == shares[-1][1] > 0


def test_drafts_are_right_after_an_interrupted_call(tiny):
    """The runner is emptied, and its blocks are given to other sequences."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with (
        LLM(str(tiny), kv_blocks=12, **SETTINGS) as plain,
        LLM(str(tiny), kv_blocks=12, speculate=f"draft:{tiny}", **SETTINGS) as drafting,
    ):
        drafting._runner._draft_model._price = None
        for prompts in (["abcabc", "hello"], ["hello you", "abcabc"], ["hello"]):
            stream = drafting.stream([*prompts, "another"], params)
            for _ in range(9):
                next(stream)
            stream.close()
            expected, answers = plain.generate(prompts, params), drafting.generate(prompts, params)
            assert [one.outputs[0].token_ids for one in answers] == [one.outputs[0].token_ids for one in expected]
            stats = drafting.instance.stats
            if plain._runner.executor.name != "torch":
                assert sum(stats.accepted_drafts) == stats.drafts > 0


def test_both_pools_share_the_memory_but_not_the_number_of_blocks(tiny):
    with (
        LLM(str(tiny), kv_memory_gib=0.0001, **SETTINGS) as plain,
        LLM(str(tiny), kv_memory_gib=0.0001, speculate=f"draft:{tiny}", **SETTINGS) as drafting,
    ):
        assert drafting._runner.pool.blocks == plain._runner.pool.blocks // 2


def changed(tiny: Path, folder: Path, change) -> Path:
    """A copy with another tokenizer."""
    shutil.copytree(tiny, folder)
    words = json.loads((folder / "tokenizer.json").read_text())
    change(words)
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return folder


def swapped(words: dict) -> None:
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def special(words: dict) -> None:
    """Makes an ordinary token special."""
    words["added_tokens"].append(dict(words["added_tokens"][0], id=words["model"]["vocab"]["a"], content="a"))


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (swapped, "token 66 is 'a' in the main model and 'b' in the draft model"),
        (special, "token 66 is special in one of them only"),
    ],
)
def test_another_vocabulary(tiny, tmp_path, change, said):
    other = changed(tiny, tmp_path / "other", change)
    with pytest.raises(InvalidConfig, match=f"draft:{other}: a draft model must have the main model's vocabulary, and {said}"):
        LLM(str(tiny), kv_blocks=16, speculate=f"draft:{other}", **SETTINGS)


@pytest.mark.usefixtures("no_weights")
def test_an_encoder_drafts_nothing(tiny, tmp_path):
    folder = tmp_path / "encoder"
    shutil.copytree(tiny, folder)
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidConfig, match=f"draft:{folder}: the model is an encoder"):
        LLM(str(tiny), kv_blocks=16, speculate=f"draft:{folder}", **SETTINGS)


def test_the_error_of_a_draft_model_names_the_setting(tiny, tmp_path):
    """The main model's errors are alike."""
    with pytest.raises(ModelNotFound, match=f"--speculate draft:{tmp_path}: {tmp_path}: neither a config.json nor"):
        LLM(str(tiny), kv_blocks=16, speculate=f"draft:{tmp_path}", **SETTINGS)
    (tmp_path / "config.json").write_text('{"architectures": ["FooForCausalLM"], "model_type": "foo"}')
    with pytest.raises(ModelUnsupported, match=f"--speculate draft:{tmp_path}: .* FooForCausalLM is not supported"):
        LLM(str(tiny), kv_blocks=16, speculate=f"draft:{tmp_path}", **SETTINGS)


def test_a_draft_model_of_a_shorter_context(tiny, tmp_path, caplog):
    short = make_model(tmp_path / "short", max_position_embeddings=20)
    with LLM(str(tiny), kv_blocks=64, speculate=f"draft:{short}", **SETTINGS) as drafting:
        assert "no drafts behind the first 20" in caplog.text
        drafting._runner._draft_model._price = None
        (answer,) = drafting.generate(["abc"], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    with LLM(str(tiny), kv_blocks=64, **SETTINGS) as plain:
        (expected,) = plain.generate(["abc"], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
    assert 0 < drafting.instance.stats.drafts <= 20
