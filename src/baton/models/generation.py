"""How a model's makers want it sampled. The one place that decides what a request gets that does not say.

    folder       generation_config.json     temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens
    GGUF file    general.sampling.*         the same under llama.cpp's names, without a length
    neither      OpenAI's defaults          protocol/request.py

API, chat page, `baton chat`, `baton run` and `LLM` all use what `sampling_defaults` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton.config import GenerationConfig
from baton.errors import ModelFileBroken
from baton.protocol.request import OPENAI_SAMPLING, SamplingParams

HF_NAMES = {**{name: name for name in OPENAI_SAMPLING}, "max_new_tokens": "max_tokens"}
"""max_new_tokens is what an answer gets that names no length, as in vLLM; a request may ask for more."""

GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def recommended_by_hf(generation: Mapping[str, Any]) -> dict[str, Any]:
    """By our names, as the file has them: nothing is checked yet."""
    return {ours: generation[name] for name, ours in HF_NAMES.items() if generation.get(name) is not None}


def recommended_by_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {ours: metadata[name] for name, ours in GGUF_NAMES.items() if name in metadata}
    # The file holds float32: 0.6 comes as 0.6000000238418579.
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in found.items()}


def sampling_defaults(recommended: Mapping[str, Any], use: GenerationConfig, origin: str) -> dict[str, int | float]:
    """Of every name in OPENAI_SAMPLING, and of max_tokens where the model recommends a length."""
    if use == "none":
        return dict(OPENAI_SAMPLING)
    try:
        msgspec.convert(dict(recommended), SamplingParams)
    except msgspec.ValidationError as error:
        raise ModelFileBroken(
            f"{origin}: the recommended sampling cannot be used ({error}); `--generation-config none` does without it"
        ) from None
    if recommended.get("top_k") == 0:  # how transformers and llama.cpp write "of all tokens"
        recommended = {**recommended, "top_k": -1}
    return {**OPENAI_SAMPLING, **recommended}
