"""The text part of models that also read images: their config.json and tensors wrap those of a decoder that we run.

A wrapper is supported if its text part, for text alone, computes what the decoder computes; images are refused by the API.
Imports no numpy: models/support.py uses this before a download.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import ModelFileBroken, ModelUnsupported
from baton.models.missing_traits import missing_traits

WRAPPERS: dict[str, dict[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Mistral3ForConditionalGeneration": {"mistral": "MistralForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM", "qwen2_5_vl": "Qwen2ForCausalLM"},
}
"""Wrappers by name, each with the decoder of each `model_type` of its text part."""
OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "quantization_config")
"""Settings that a wrapper may state outside of its text part."""
TEXT_PREFIXES = {"language_model.": "", "model.language_model.": "model."}
VISION_PREFIXES = tuple(
    f"{whole}{part}." for whole in ("", "model.") for part in ("vision_tower", "visual", "multi_modal_projector")
)


def is_wrapper(raw: Mapping[str, Any]) -> bool:
    """Whether the model wraps a text model. `raw`: config.json."""
    names = raw.get("architectures")
    return isinstance(names, list) and any(name in WRAPPERS for name in names if isinstance(name, str))


def text_config(raw: Mapping[str, Any], origin: str) -> Mapping[str, Any]:
    """The config.json of the text part alone; `raw` itself if it wraps nothing."""
    if not is_wrapper(raw):
        return raw
    inner = raw.get("text_config", raw)  # older Qwen2.5-VL files are flat
    if not isinstance(inner, dict):
        raise ModelFileBroken(f"{origin}: text_config is {inner!r}; it must be a table of settings")
    wrapper = next(name for name in raw["architectures"] if isinstance(name, str) and name in WRAPPERS)
    kinds, kind = WRAPPERS[wrapper], inner.get("model_type")
    if not isinstance(kind, str) or kind not in kinds:
        missing = missing_traits(kind) if isinstance(kind, str) else ""
        reason = f" (Baton lacks {missing})" if missing else ""
        raise ModelUnsupported(f"{origin}: {wrapper} around {kind} is not supported{reason}; supported is {', '.join(kinds)}")
    outside = {key: raw[key] for key in OF_THE_WHOLE if raw.get(key) is not None}
    found = {**outside, **{key: value for key, value in inner.items() if value is not None or key not in outside}}
    if raw.get("tie_word_embeddings") is not None:  # transformers reads this setting from the wrapper, not from its text part
        found["tie_word_embeddings"] = raw["tie_word_embeddings"]
    return {**found, **_plain_rope(inner), "architectures": [kinds[kind]]}


def _plain_rope(inner: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings with `mrope` as plain rotation: positions of text are the same in all of its sections."""
    found = {}
    for key in ("rope_parameters", "rope_scaling"):
        settings = inner.get(key)
        if isinstance(settings, dict) and "mrope_section" in settings:
            kept = {name: value for name, value in settings.items() if name not in ("mrope_section", "type", "rope_type")}
            kind = settings.get("rope_type", settings.get("type"))
            found[key] = kept | ({} if kind in ("mrope", "default", None) else {"rope_type": kind})
    return found


def text_name(name: str) -> str:
    """The name of a wrapper's tensor in a file of the text part alone. Empty: it is not of the text part."""
    if name.startswith(VISION_PREFIXES):
        return ""
    for prefix, instead in TEXT_PREFIXES.items():
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name
