"""Core and runner together give the greedy tokens of transformers, for every architecture, in chunks of any size."""

from __future__ import annotations

import numpy as np
import pytest
from packed_folders import METHODS, write_packed
from rig import forward_of, generate, load_path, one_step
from tiny_models import CASES, PROMPTS, oracle_greedy, oracle_logits, oracle_model

from baton.errors import ModelUnsupported
from baton.models.dequantise import dequantise
from baton.models.open import open_model
from dense_oracle import all_logits, load_model

OUTPUT_TOKENS = 8
EVERY_PROMPT = {f"p{i}": prompt for i, prompt in enumerate(PROMPTS)}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A model's folder, what transformers says to the prompts (given our answers), and its logits of the longest one."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = oracle_model(request.param)
    oracle.save_pretrained(folder)
    greedy = {}

    def expected(answers):
        return greedy or greedy.update(oracle_answers(oracle, answers)) or greedy

    return folder, expected, oracle_logits(oracle, PROMPTS[3]).numpy()


def oracle_answers(oracle, answers):
    return {(name, 0): oracle_greedy(oracle, p, OUTPUT_TOKENS, answers[name, 0]) for name, p in EVERY_PROMPT.items()}


def test_what_the_c_kernels_lack_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("baton.worker.platforms.cpu.native_lacks", lambda model: ["attention sinks"])
    oracle_model("gpt-oss").save_pretrained(tmp_path)
    with pytest.raises(ModelUnsupported, match="attention sinks"):
        load_path(tmp_path, compute="native")


@pytest.mark.parametrize("chunk", [1, pytest.param(7, marks=pytest.mark.slow), 64])
def test_every_architecture(case, chunk):
    folder, expected, logits = case
    model = load_path(folder, compute="native")
    forward = forward_of(model)
    np.testing.assert_allclose(forward.logits(forward.hidden(one_step([PROMPTS[3]]))), logits, atol=1e-4, rtol=0)
    forward.close()
    answers = generate(model, EVERY_PROMPT, max_tokens=OUTPUT_TOKENS, rig={"chunk": chunk, "block_size": 4})
    assert answers == expected(answers)


@pytest.mark.parametrize("method", METHODS)
def test_folders_in_four_bits(method, tmp_path):
    """AWQ, GPTQ, compressed-tensors."""
    oracle = write_packed(tmp_path, method)
    expected = None
    for settings in ({"quantization": "none"}, {"quantization": "auto"}):
        model = load_path(tmp_path, compute="native", **settings)
        answers = generate(model, EVERY_PROMPT, max_tokens=OUTPUT_TOKENS, rig={"chunk": 7, "block_size": 16})
        if settings["quantization"] == "none":
            expected = oracle_answers(oracle, answers)
            assert answers == expected
        assert [answer[0] for answer in answers.values()] == [answer[0] for answer in expected.values()]


@pytest.mark.parametrize(
    ("method", "case", "group"),
    [
        ("awq", "qwen2", 32),
        ("gptq", "phi3", 32),
        ("compressed-tensors", "llama", -1),
        *(
            pytest.param(*packed, marks=pytest.mark.slow)
            for packed in (
                ("gptq", "llama", 128),
                ("awq", "llama", 128),
                ("gptq-zeros", "llama", -1),
                ("compressed-zeros", "phi3", 32),
                ("gptq", "qwen2", 32),
                ("gptq", "qwen3-moe", 32),
            )
        ),
    ],
)
def test_folders_in_four_bits_of_other_groups_and_families(method, case, group, tmp_path):
    """Groups of other sizes, biases, fused matrices and experts."""
    oracle = write_packed(tmp_path, method, case, group)
    forward = forward_of(load_path(tmp_path, compute="native", quantization="none"))
    logits = forward.logits(forward.hidden(one_step([PROMPTS[3]])))
    forward.close()
    if method in ("gptq", "compressed-tensors"):
        np.testing.assert_allclose(logits, oracle_logits(oracle, PROMPTS[3]), atol=1e-4, rtol=0)
        return
    # Elsewhere minima are rounded: the values are near those of the folder, and the logits are those of the values.
    values = oracle.get_parameter("model.layers.0.mlp.down_proj.weight").detach().numpy()
    weights = open_model(tmp_path).weights
    np.testing.assert_allclose(dequantise(weights.raw("layers.0.mlp.down.weight")), values, atol=0.05 * 11 * 2**-11, rtol=0)
    np.testing.assert_allclose(logits, all_logits(load_model(tmp_path).model, PROMPTS[3]), atol=1e-4, rtol=0)


def test_without_a_compiler(case):
    folder, expected, _ = case
    model = load_path(folder, compute="torch")
    answers = generate(model, EVERY_PROMPT, max_tokens=OUTPUT_TOKENS, rig={"block_size": 16})
    assert answers == expected(answers)
