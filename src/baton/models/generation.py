"""Sampling defaults: the only place that decides the sampling of a request that sets none.

    folder          generation_config.json     temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens;
                                               do_sample: false is temperature 0
    GGUF file       general.sampling.*         the same under llama.cpp's names, without a length
    built-in model  models/aliases.py          the authors' recommendation; the file has none
    none of them    UNADVISED_SAMPLING         llama.cpp's defaults

API, chat page, `baton chat`, `baton run` and `LLM` all use `sampling_defaults`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from baton.config import GenerationConfig
from baton.errors import ModelFileBroken
from baton.protocol.request import OPENAI_SAMPLING, SamplingParams

HF_NAMES = {**{name: name for name in OPENAI_SAMPLING}, "max_new_tokens": "max_tokens"}
"""Our names of settings by their name in the file. max_new_tokens is the default length of an answer, as in vLLM; a request may
set more."""

UNADVISED_SAMPLING: Mapping[str, int | float] = MappingProxyType(
    {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.0}
)
"""llama.cpp's defaults, for files without a recommendation. Those are mostly small quantised models, and sampling from the
whole tail of their distribution (OpenAI's temperature 1.0) gives noise."""

GGUF_NAMES = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def recommended_by_hf(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Values under our names, unchecked; `sampling_defaults` checks them. do_sample: false means greedy, and transformers
    ignores the file's other sampling fields."""
    found = {ours: generation[name] for name, ours in HF_NAMES.items() if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        return {"temperature": 0.0, **{name: found[name] for name in ("repetition_penalty", "max_tokens") if name in found}}
    return found


def recommended_by_gguf(metadata: Mapping[str, Any]) -> dict[str, Any]:
    found = {ours: metadata[name] for name, ours in GGUF_NAMES.items() if name in metadata}
    # The file holds float32: 0.6 is read as 0.6000000238418579.
    return {name: float(f"{value:.7g}") if isinstance(value, float) else value for name, value in found.items()}


def sampling_defaults(recommended: Mapping[str, Any], use: GenerationConfig, origin: str) -> dict[str, int | float]:
    """A value for every name in OPENAI_SAMPLING, and for max_tokens if the model recommends a length.

    A partial recommendation is completed by OpenAI's defaults, as in vLLM. Raises ModelFileBroken.
    """
    if use == "none":
        return dict(OPENAI_SAMPLING)
    try:
        msgspec.convert(dict(recommended), SamplingParams)
    except msgspec.ValidationError as error:
        raise ModelFileBroken(
            f"{origin}: the recommended sampling cannot be used ({error}); `--generation-config none` does without it"
        ) from None
    if recommended.get("top_k") == 0:  # "all tokens" in transformers and llama.cpp
        recommended = {**recommended, "top_k": -1}
    advised = any(name in recommended for name in OPENAI_SAMPLING)
    return {**(OPENAI_SAMPLING if advised else UNADVISED_SAMPLING), **recommended}
