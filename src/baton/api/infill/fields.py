"""Fields of /infill (translate.py defines the rules)."""

from __future__ import annotations

from typing import Final

from baton.api.translate import ONE_ANSWER, Table, harmless, own, refused

INFILL: Final[Table] = {
    **ONE_ANSWER,
    "model": own("a served name", "string"),
    "input_prefix": own("what is before the gap", "string"),
    "input_suffix": own("what is after it", "string"),
    "input_extra": own("other files: objects with filename and text", "array"),
    "prompt": own("how what is filled in begins", "string"),
    "n_predict": own(
        "tokens at most; -1, the default: up to the context; 0: compute the prompt, so that it is cached", "integer"
    ),
    "response_fields": own("answer with these fields alone, by path, such as timings/prompt_n", "array"),
    "logprobs": refused(False, about="log-probabilities come from /v1/completions"),
    "stream_options": refused(),
    "cache_prompt": harmless("prompts are always cached"),
    "id_slot": harmless("the scheduler chooses"),
    "n_indent": harmless("indentation is the model's"),
    "n_keep": harmless("a prompt is cut around the gap"),
    "n_cache_reuse": harmless("equal beginnings are reused"),
    "samplers": harmless("their order is fixed"),
    "t_max_prompt_ms": harmless("there is timeout"),
    "t_max_predict_ms": harmless("there is timeout"),
}
