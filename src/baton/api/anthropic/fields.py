"""Fields of Anthropic's requests, and what becomes of each (translate.py says what the rules mean)."""

from __future__ import annotations

from typing import Final

from baton.api.translate import ONE_ANSWER, Table, harmless, own, refused, same

MESSAGES: Final[Table] = {
    **ONE_ANSWER,
    "model": same("model", "a served name"),
    "max_tokens": same("max_tokens"),
    "messages": own("user and assistant in turn; text, thinking, tool_use and tool_result blocks", "array"),
    "system": own("a text, or text blocks", "string or array"),
    "stop_sequences": same("stop"),
    "stream": same("stream"),
    "temperature": same("temperature"),
    "top_k": same("top_k"),
    "top_p": same("top_p"),
    "thinking": same("thinking", "reasoning on or off, and its budget"),
    "tools": own("name, description, input_schema, strict: tools of the client's own; Anthropic's are left out", "array"),
    "tool_choice": own("auto, any, tool or none; disable_parallel_tool_use", "object"),
    "output_config": own("format: a JSON schema; effort: how much reasoning", "object"),
    "output_format": own("the older name of output_config.format", "object"),
    "metadata": harmless("user_id is not kept"),
    "service_tier": harmless(),
    "speed": harmless(),
    "inference_geo": harmless(),
    "cache_control": harmless("prefixes are cached by themselves"),
    "diagnostics": harmless(),
    "user_profile_id": harmless(),
    "workspace_id": harmless(),
    "context_management": own("edits: nothing is taken out of a conversation", "object"),
    "container": refused(),
    "mcp_servers": refused([]),
    "stream_options": refused(),
    "logprobs": refused(False, about="log-probabilities are told by /v1/chat/completions"),
    "top_logprobs": refused(0, about="log-probabilities are told by /v1/chat/completions"),
}
"""/v1/messages/count_tokens takes the same, and uses what goes into the prompt."""
