"""Types of the fields of OpenAI's two older endpoints, for /openapi.json. Numbers have theirs in limits.RANGES.

A test compares the tables with the fields that schemas.py reads, in both directions.
"""

from __future__ import annotations

from typing import Final

_BOTH: Final[dict[str, str]] = {
    "model": "string",
    "stream": "boolean",
    "stream_options": "object",
    "stop": "string or array",
    "include_stop_str_in_output": "boolean",
    "stop_token_ids": "array",
    "ignore_eos": "boolean",
    "stop_on_repetition": "boolean",
    "repetition_detection": "object",
    "disable_spec_decode": "boolean",
    "bad_words": "string or array",
    "bad_words_token_ids": "array",
    "logit_bias": "object",
    "echo": "boolean",
    "return_token_ids": "boolean",
    "skip_special_tokens": "boolean",
    "add_special_tokens": "boolean",
    "cache_salt": "string",
    "user": "string",
    "response_format": "object",
    "structured_outputs": "object",
    "guided_json": "string or object",
    "guided_regex": "string",
    "guided_choice": "array",
    "guided_grammar": "string",
    "guided_json_object": "boolean",
    "json_object": "boolean",
    "regex": "string",
    "ebnf": "string",
    "grammar": "string",
    "json_schema": "string or object",
}
CHAT: Final[dict[str, str]] = {
    **_BOTH,
    "messages": "array",
    "logprobs": "boolean",
    "tools": "array",
    "tool_choice": "string or object",
    "parallel_tool_calls": "boolean",
    "add_generation_prompt": "boolean",
    "continue_final_message": "boolean",
    "chat_template_kwargs": "object",
    "enable_thinking": "boolean",
    "reasoning_effort": "string",
    "reasoning": "object",
    "thinking": "boolean or object",
    "think": "boolean or string",
    "thinking_budget": "integer",
    "thinking_token_budget": "integer",
    "reasoning_budget": "integer",
    "reasoning_max_tokens": "integer",
    "include_reasoning": "boolean",
    "separate_reasoning": "boolean",
    "stream_reasoning": "boolean",
}
COMPLETION: Final[dict[str, str]] = {**_BOTH, "prompt": "string or array", "suffix": "string"}
