"""Fields of the Responses API, and what becomes of each (translate.py says what the rules mean)."""

from __future__ import annotations

from typing import Final

from baton.api.translate import ONE_ANSWER, Table, harmless, own, refused, same

RESPONSES: Final[Table] = {
    **ONE_ANSWER,
    "model": same("model", "a served name"),
    "input": own(
        "a text, or items: message, function_call, function_call_output, reasoning, item_reference", "string or array"
    ),
    "instructions": own("a system message before all others; not carried over by previous_response_id", "string"),
    "previous_response_id": own("goes on with an answer that was stored", "string"),
    "store": own("keep the answer for previous_response_id and GET; true where it is not given", "boolean"),
    "max_output_tokens": same("max_tokens"),
    "temperature": same("temperature"),
    "top_p": same("top_p"),
    "stream": same("stream"),
    "tools": own("functions that the model may call, also in namespaces; built-in tools are left out", "array"),
    "tool_choice": own("auto, none, required, or a function", "string or object"),
    "parallel_tool_calls": same("parallel_tool_calls"),
    "text": own("format: text, json_object or json_schema", "object"),
    "response_format": own("text.format as chat completions have it; beside another text.format 400", "object"),
    "reasoning": same("reasoning", "effort; with summary the thought is told as its summary"),
    "include": own("message.output_text.logprobs", "array"),
    "top_logprobs": own("likeliest tokens to tell with message.output_text.logprobs", "integer"),
    "metadata": own("comes back with the answer", "object"),
    "user": same("user"),
    "truncation": refused("disabled", about="a prompt is never cut"),
    "background": refused(False),
    "conversation": refused(),
    "prompt": refused(about="there are no stored prompts"),
    "context_management": own("compaction: nothing is ever compacted", "array"),
    "moderation": refused(),
    "max_tool_calls": harmless("of built-in tools, which there are none of"),
    "stream_options": harmless("nothing is obfuscated"),
    "service_tier": harmless(),
    "safety_identifier": harmless(),
    "prompt_cache_key": harmless("prefixes are cached by themselves"),
    "prompt_cache_retention": harmless("prefixes are cached by themselves"),
    "prompt_cache_options": harmless("prefixes are cached by themselves"),
    "messages": refused(about="here it is called input"),
    "logprobs": refused(False, about="here it is in include"),
}
