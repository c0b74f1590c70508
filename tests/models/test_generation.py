"""How a model's files say it should be sampled, and what holds where they say nothing."""

from __future__ import annotations

import os

import pytest

from baton.errors import ModelFileBroken
from baton.models.aliases import ALIASES, recommended_by_authors
from baton.models.generation import UNADVISED_SAMPLING, recommended_by_gguf, recommended_by_hf, sampling_defaults
from baton.protocol.request import OPENAI_SAMPLING

QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}


def test_a_generation_config_is_taken_over_and_the_rest_is_openai_s():
    defaults = sampling_defaults(recommended_by_hf(QWEN), "auto", "model")
    assert defaults == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}


def test_a_recommended_length_comes_by_our_name():
    defaults = sampling_defaults(recommended_by_hf({**QWEN, "max_new_tokens": 2048}), "auto", "model")
    assert defaults["max_tokens"] == 2048


def test_nulls_say_nothing_and_a_top_k_of_0_is_all_tokens():
    defaults = sampling_defaults(recommended_by_hf({"temperature": None, "top_k": 0}), "auto", "model")
    assert defaults == OPENAI_SAMPLING


@pytest.mark.parametrize("silent", [{}, {"eos_token_id": 2, "do_sample": True}, {"temperature": None}])
def test_a_file_that_recommends_nothing_gets_llama_cpp_s_defaults(silent):
    assert sampling_defaults(recommended_by_hf(silent), "auto", "model") == UNADVISED_SAMPLING
    assert UNADVISED_SAMPLING == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.0}


def test_a_recommended_length_alone_is_no_recommendation_of_sampling():
    assert sampling_defaults(recommended_by_hf({"max_new_tokens": 7}), "auto", "model") == {
        **UNADVISED_SAMPLING,
        "max_tokens": 7,
    }


def test_do_sample_false_is_temperature_0_whatever_the_file_has_beside_it():
    """transformers ignores temperature, top_p and top_k then."""
    defaults = sampling_defaults(recommended_by_hf({**QWEN, "do_sample": False, "max_new_tokens": 9}), "auto", "model")
    assert defaults == {**OPENAI_SAMPLING, "temperature": 0.0, "repetition_penalty": 1.05, "max_tokens": 9}


@pytest.mark.parametrize("recommended", [{}, QWEN, {"temperature": "hot"}])
def test_without_the_model_s_recommendation_openai_s_defaults_hold(recommended):
    assert sampling_defaults(recommended_by_hf(recommended), "none", "model") == OPENAI_SAMPLING
    assert OPENAI_SAMPLING["temperature"] == 1.0


@pytest.mark.parametrize(
    "wrong", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": -7}, {"max_new_tokens": 0}, {"min_p": True}]
)
def test_a_recommendation_that_cannot_be_used_names_the_file_and_the_way_out(wrong):
    with pytest.raises(ModelFileBroken, match=r"^some/model: .*--generation-config none"):
        sampling_defaults(recommended_by_hf(wrong), "auto", "some/model")


def test_gguf_metadata_says_the_same_in_llama_cpp_s_words():
    metadata = {
        "general.architecture": "llama",
        "general.sampling.temp": 0.6000000238418579,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.949999988079071,
        "general.sampling.penalty_repeat": 1.0499999523162842,
        "general.sampling.mirostat": 0,
    }
    defaults = sampling_defaults(recommended_by_gguf(metadata), "auto", "model")
    assert defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05}


def test_the_built_in_model_has_its_authors_sampling_and_no_other_file_of_that_name_has(tmp_path):
    known = ALIASES["smollm2"]
    file = tmp_path / known.file
    with file.open("wb") as whole:
        whole.truncate(known.nbytes)
    assert recommended_by_authors(file) == {"temperature": 0.2, "top_p": 0.9}
    os.truncate(file, known.nbytes - 1)
    assert recommended_by_authors(file) == {}
