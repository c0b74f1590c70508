"""What quantisation costs: perplexity on a text that everybody has, Python's own language reference.

The file of SmolLM2 has 4-bit weights, which `none` makes float32 of without changing a number. So `auto` differs from it by the
rounding of activations and of keys and values alone, and `int8` by that of its bytes to those 4 bits as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pydoc_data.topics import topics

import pytest
from rig import Rig, RigModel, load

from baton.models.dequantise import dequantise
from baton.models.loaders.weights import StoredTensor, WeightSource
from baton.models.open import OpenedModel, open_model
from baton.models.raw_tensor import RawTensor
from baton.text.tokenizer import Tokenizer

WINDOW_TOKENS = 512
WINDOWS = 4


class AsFloats:
    """A file's weights as if it had stored float32."""

    def __init__(self, source: WeightSource) -> None:
        self.origin = source.origin
        self._source = source

    def stored(self) -> Mapping[str, StoredTensor]:
        return self._source.stored()

    def raw(self, name: str) -> RawTensor:
        return RawTensor.of_floats(dequantise(self._source.raw(name)))


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def windows(smollm2_path) -> list[list[int]]:
    tokens = Tokenizer.from_path(smollm2_path).encode(topics["objects"] + topics["types"])
    assert len(tokens) >= WINDOWS * WINDOW_TOKENS
    return [tokens[i * WINDOW_TOKENS :][:WINDOW_TOKENS] for i in range(WINDOWS)]


@pytest.fixture(scope="module")
def opened(smollm2_path) -> OpenedModel:
    return open_model(smollm2_path)


def perplexities(model: RigModel, windows: list[list[int]]) -> list[float]:
    """One a window: e to the mean surprise at its tokens, but for the first."""
    rig = Rig(model, block_size=16, blocks=200)
    for number, window in enumerate(windows):
        rig.submit(f"w{number}", window, max_tokens=1, prompt_logprobs=0)
    rig.run()
    found = []
    for number, window in enumerate(windows):
        words = rig.words(f"w{number}")
        assert sorted(words) == list(range(1, len(window)))
        found.append(math.exp(-sum(word.logprob for word in words.values()) / len(words)))
    rig.close()
    return found


def mean(values: list[float]) -> float:
    """Of all tokens: the windows are equally long."""
    return math.exp(sum(map(math.log, values)) / len(values))


@pytest.fixture(scope="module")
def exact(opened, windows) -> list[float]:
    return perplexities(load(opened, quantization="none", compute="native", threads=2), windows)


def test_the_text_is_one_that_the_model_understands(exact):
    assert 3 < mean(exact) < 20


@pytest.mark.parametrize(("quantization", "cost_max"), [pytest.param("int8", 0.005, marks=pytest.mark.slow), ("auto", 0.005)])
def test_quantised_weights_hardly_cost_anything(opened, windows, exact, quantization, cost_max):
    found = perplexities(load(opened, quantization=quantization, compute="native", threads=2), windows)
    cost = mean(found) / mean(exact) - 1
    print(f"{quantization}: perplexity {mean(found):.4f}, exact {mean(exact):.4f}, {cost:+.3%}")
    assert abs(cost) < cost_max


def test_of_a_file_of_four_bits_int4_is_auto(opened, windows):
    auto, int4 = (
        perplexities(load(opened, quantization=way, compute="native", threads=2), windows[:1]) for way in ("auto", "int4")
    )
    assert auto == int4


@pytest.mark.slow
def test_our_own_four_bits_are_as_good_as_the_file_s(opened, windows, exact):
    """From float32 to Q4_1 by models/quantise.py."""
    floats = OpenedModel(opened.path, opened.config, AsFloats(opened.weights))
    found = perplexities(load(floats, quantization="int4", compute="native", threads=2), windows[:1])
    cost = found[0] / exact[0] - 1
    print(f"Q4_1 of float32: perplexity {found[0]:.4f}, exact {exact[0]:.4f}, {cost:+.3%}")
    assert abs(cost) < 0.02
