"""Fields of other servers' requests, and their treatment. No field that changes an answer is ignored silently."""

from __future__ import annotations

from typing import Any, Final

INTERNAL: Final = (
    "kv_transfer_params",
    "disaggregate_info",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "ec_transfer_params",
    "handoff",
    "salt",
    "logits_processors",
    "prompt_embeds",
)

ALIASES: Final[dict[str, tuple[str, ...]]] = {
    "max_tokens": ("max_new_tokens", "n_predict", "num_predict", "max_output_tokens"),
    "min_tokens": ("min_new_tokens",),
    "stop": ("stop_sequences", "stopping_strings"),
    "repetition_penalty": ("repeat_penalty",),
    "disable_spec_decode": ("disable_speculative_decoding",),
}
"""Our names of fields, each with the names of other servers (Transformers, llama.cpp, Ollama, SGLang, TGI)."""

_CONSTRAINTS: Final[dict[str, tuple[Any, ...]]] = {
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    "response_schema": (),
    "format": ("",),
    "allowed_token_ids": (),
}
_SAMPLERS: Final[dict[str, tuple[Any, ...]]] = {
    "use_beam_search": (False,),
    "num_beams": (1,),
    "do_sample": (True,),
    "typical_p": (1,),
    "top_a": (0,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "no_repeat_ngram_size": (0,),
    "n_probs": (0,),
    "sampling_params": ({},),
    "options": ({},),
    "extra_body": ({},),
    "logits_processors_args": ({},),
    "temp_scaled_logprobs": (False,),
    "top_p_normalized_logprobs": (False,),
    "include_draft_logprobs": (False,),
    "response_max_tokens": (),
}
_INPUTS: Final[dict[str, tuple[Any, ...]]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "images": ([],),
    "image_data": (),
    "modalities": (["text"],),
    "mm_processor_kwargs": (),
    "web_search_options": (),
    "input_ids": (),
    "prompt_token_ids": ([],),
    "completion_token_ids": ([],),
    "disable_chat_template": (False,),
    "mm_hashes": (),
    "system": ("",),
    "instructions": ("",),
    "chat_template": (),
    "template": ("",),
    "documents": ([],),
    "lora_request": (),
    "lora_path": (),
    "lora": ([],),
}
UNSUPPORTED: Final[dict[str, tuple[Any, ...]]] = {**_CONSTRAINTS, **_SAMPLERS, **_INPUTS}
"""Neutral values of fields. Null is always neutral."""

CHAT_ONLY: Final[dict[str, tuple[Any, ...]]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "enable_thinking": (),
    "reasoning_effort": (),
    "thinking": ({"type": "disabled"}, False),
    "think": (False,),
    "thinking_budget": (-1,),
    "thinking_token_budget": (-1,),
    "reasoning_budget": (-1,),
    "reasoning_max_tokens": (-1,),
    "reasoning": ({},),
    "include_reasoning": (True, False),
    "separate_reasoning": (True, False),
    "stream_reasoning": (True, False),
}
"""Fields of chats (tools.py, thinking.py), with the values that are neutral for completions."""

COMPLETION_ONLY: Final[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}
"""Fields of completions, with the values that are neutral for chats."""

HINTS: Final[dict[str, str]] = {
    "functions": "send tools, which took its place",
    "suffix": "it is for /v1/completions",
    "function_call": "send tool_choice, which took its place",
    "chat_template": "templates come from the model or the operator, never from a request",
    "response_schema": "there is response_format",
    "format": "there is response_format",
    "modalities": 'only ["text"] is supported',
    "input_ids": "send token ids as the prompt of /v1/completions",
    "system": "send a message with the role system",
    "instructions": "send a message with the role system",
    "do_sample": "send temperature 0 for the likeliest tokens",
    "prompt_token_ids": "send token ids as the prompt of /v1/completions",
    "completion_token_ids": "send them behind the prompt, as token ids, to /v1/completions",
    "disable_chat_template": "send the prompt to /v1/completions",
    "logits_processors_args": "there are thinking_token_budget, logit_bias and bad_words",
    "temp_scaled_logprobs": "log-probabilities are those of the model, before temperature and top_p",
    "top_p_normalized_logprobs": "log-probabilities are those of the model, before temperature and top_p",
    "response_max_tokens": "there are max_tokens, for all of the answer, and thinking_token_budget",
    "n_probs": "there is logprobs",
    "options": "send its fields at the top level",
    "sampling_params": "send its fields at the top level",
    "extra_body": "send its fields at the top level",
}

HARMLESS: Final = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "guided_decoding_backend",
    "length_penalty",  # beams are refused, so their options change nothing
    "early_stopping",
    "max_streaming_response_tokens",  # affects only the chunk size
    "include_logprobs_decode_token",
    "speculative.n_min",  # drafts change no answer
    "speculative.p_min",
    "prediction",  # OpenAI's draft of the answer, for speed only
)


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether the value is neutral for its field. 1 and 1.0 are equal; true is not a number."""
    if value is None:
        return True
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
