"""Other engines' ways to ask for a draft model.

vLLM, FastDeploy    --speculative-config '{"model": "small", "num_speculative_tokens": 4}'
SGLang              --speculative-algorithm STANDALONE --speculative-draft-model-path small
llama.cpp           --model-draft small --draft-max 4
here                --speculate draft:small --speculative-tokens 4
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

NGRAM = ("ngram", "[ngram]", "ngram_match")
"""Words of other engines for drafts from the text so far."""
BY_SETTINGS = "use --speculate draft:MODEL, ngram, grammar or auto, and --speculative-tokens (docs/speculation.md)"
METHODS = f"drafts are of a smaller model or from the text so far: {BY_SETTINGS}"
CONFIG = "the keys method (draft_model or ngram), model and num_speculative_tokens; others are refused"
DRAFTS_BY_PRICE = "how many drafts run follows from their measured price"
IGNORED = frozenset({"prompt_lookup_max", "prompt_lookup_min"})
"""Names that change nothing: suffixes have fixed lengths here; a draft changes no answer."""


class Unusable(ValueError):
    """Raised if the value asks for an unsupported feature. The message begins with the option's name."""


def drafts_of(model: Any) -> str:
    """The value of `--speculate` with this draft model."""
    name = str(model).strip()
    if name in ("", "none", "None"):
        return "none"
    return "ngram" if name in NGRAM else f"draft:{name}"


def spread(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The names and values, with those of one option for several settings, and without a name that others make superfluous.
    Raises Unusable."""
    for name, value in given.items():
        if name == "speculative_config":
            yield from speculative_config(value).items()
        elif name == "speculative_algorithm" and str(value).upper() == "STANDALONE":
            if not given.get("speculative_draft_model_path"):
                raise Unusable(f"{name} is {value}: give --speculative-draft-model-path too, or --speculate draft:MODEL")
        else:
            yield name, value


def speculative_config(value: Any) -> dict[str, Any]:
    """Settings that a JSON object requests. Raises Unusable."""
    option = "speculative_config"
    try:
        asked = json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError:
        asked = None
        if value not in ("none", "None"):
            raise Unusable(f"{option} is no JSON object: {BY_SETTINGS}") from None
    if not asked:
        return {}
    if not isinstance(asked, dict):
        raise Unusable(f"{option} is no JSON object: {BY_SETTINGS}")
    model, tokens = asked.get("model"), asked.get("num_speculative_tokens")
    method = asked.get("method") or ("ngram" if model in NGRAM else "draft_model")
    if unknown := sorted(asked.keys() - {"method", "model", "num_speculative_tokens"} - IGNORED):
        raise Unusable(f"{option} has {unknown[0]}, which is no setting here: {BY_SETTINGS}")
    if method not in (*NGRAM, "draft_model"):
        raise Unusable(f"{option} has the method {method}: {METHODS}")
    if method == "draft_model" and not model:
        raise Unusable(f"{option} names no model: {BY_SETTINGS}")
    if model and not isinstance(model, str):
        raise Unusable(f"{option} has the model {model}, which is no text: {BY_SETTINGS}")
    found = {"speculate": "ngram" if method in NGRAM else drafts_of(model)}
    return found if tokens is None else found | {"speculative_tokens": tokens}
