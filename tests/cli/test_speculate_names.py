"""Draft models under the names of other engines."""

from __future__ import annotations

import pytest

from baton.config import ServeConfig
from baton.errors import InvalidConfig
from baton.llm.keywords import serve_settings

DRAFT = {"speculate": "draft:small", "speculative_tokens": 3}


@pytest.mark.parametrize(
    "given",
    [
        {"speculative_config": {"method": "draft_model", "model": "small", "num_speculative_tokens": 3}},
        {"speculative_config": '{"model": "small", "num_speculative_tokens": 3}'},
        {"speculative_model": "small", "num_speculative_tokens": 3},
        {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": "small", "speculative_num_draft_tokens": 3},
        {"model_draft": "small", "draft_max": 3},
    ],
)
def test_a_draft_model(given):
    assert serve_settings(given) == DRAFT
    assert ServeConfig(**DRAFT).engine().worker.speculate == "draft:small"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}}, 5),
        ({"speculative_config": {"model": "[ngram]"}}, None),
        ({"speculative_model": "[ngram]"}, None),
    ],
)
def test_ngram(given, expected):
    assert serve_settings(given) == {"speculate": "ngram"} | ({} if expected is None else {"speculative_tokens": expected})


@pytest.mark.parametrize("nothing", [None, "", "{}", "none", {}])
def test_nothing(nothing):
    assert serve_settings({"speculative_config": nothing}) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"speculative_config": {"method": "eagle3", "model": "head"}},
            "has the method eagle3: drafts are of",
        ),
        ({"speculative_config": {"method": "mtp"}}, "speculative_config has the method mtp"),
        ({"speculative_config": {"num_speculative_tokens": 3}}, "speculative_config names no model: use --speculate"),
        (
            {"speculative_config": {"model": "m", "draft_tensor_parallel_size": 2}},
            "has draft_tensor_parallel_size, which",
        ),
        ({"speculative_config": {"model": 5}}, "speculative_config has the model 5, which is no text"),
        ({"speculative_config": "small"}, "speculative_config is no JSON object: use --speculate"),
        ({"speculative_config": [1]}, "speculative_config is no JSON object"),
        ({"speculative_algorithm": "STANDALONE"}, "speculative_algorithm is STANDALONE: give --speculative-draft-model-path"),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "head"}, "given twice"),
    ],
)
def test_what_is_not_here_is_refused_in_words(given, words):
    with pytest.raises(InvalidConfig, match=words.replace("[", r"\[")):
        serve_settings(given)


@pytest.mark.parametrize("value", ["draft:", "draft: ", "draft", "small", "ngram:x"])
def test_what_is_no_draft_model(value):
    with pytest.raises(InvalidConfig, match=r"speculate is .* must be one of none, ngram, grammar, auto, draft:MODEL"):
        ServeConfig(speculate=value)
