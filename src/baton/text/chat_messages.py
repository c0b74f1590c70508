"""Turns the `messages` of a chat request into plain dictionaries that any chat template can read.

role         1 to 64 letters, digits, '_', '-' or '.': a role cannot contain the template's marks. The template decides which
             roles exist.
content      a string, or a list of text parts, which are joined with a line feed (as vLLM and llama.cpp do). Null or
             missing means empty for an assistant, which may have only called tools, and is refused for others.
tool_calls   `arguments` given as a JSON string, as OpenAI's clients do, becomes the object that templates expect. A string that
             is not a JSON object is kept: a model may have written it, and the client returns it.
reasoning    vLLM's newer name for reasoning_content, which templates read.

Other keys (name, tool_call_id, reasoning_content, ...) are passed on. No error repeats the text of a message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import CallerError

Message = dict[str, Any]

PARTS_MAX = 1024
TOOL_CALLS_MAX = 256
_DEPTH_MAX = 64
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def plain_messages(messages: object, *, messages_max: int) -> list[Message]:
    """The messages as plain dictionaries. Raises CallerError with the place of the error, never the text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise CallerError(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise CallerError("messages is empty: a chat needs at least one message")
    if len(messages) > messages_max:
        raise CallerError(f"messages has {len(messages)} entries and at most {messages_max} are allowed")
    return [_plain_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain_message(message: object, place: str) -> Message:
    if not isinstance(message, Mapping):
        raise CallerError(f"{place} must be an object with a role and a content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise CallerError(f"{place}.role must be 1 to 64 letters, digits, '_', '-' or '.', such as 'user'")
    plain = {str(key): value for key, value in message.items()}
    plain["content"] = _text_of(message.get("content"), role, place)
    if isinstance(plain.get("reasoning"), str) and plain.get("reasoning_content") is None:
        plain["reasoning_content"] = plain["reasoning"]
    calls = message.get("tool_calls")
    if calls is None:
        plain.pop("tool_calls", None)  # templates test for the presence of the key, not for null
    else:
        plain["tool_calls"] = _plain_calls(calls, place)
    return plain


def _text_of(content: object, role: str, place: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise CallerError(f"{place}.content is missing: only an assistant's message may have none")
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise CallerError(f"{place}.content must be a string or a list of text parts, not {type(content).__name__}")
    if len(content) > PARTS_MAX:
        raise CallerError(f"{place}.content has {len(content)} parts and at most {PARTS_MAX} are allowed")
    return "\n".join(_part_text(part, f"{place}.content[{index}]") for index, part in enumerate(content))


def _part_text(part: object, place: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise CallerError(f"{place} must be a text part, not {type(part).__name__}")
    text = part.get("refusal" if part.get("type") == "refusal" else "text")
    if part.get("type") not in TEXT_PARTS or not isinstance(text, str):
        raise CallerError(f'{place} is not a text part: only {{"type": "text", "text": "..."}} is supported')
    return text


def _plain_calls(calls: object, place: str) -> list[Any]:
    if not isinstance(calls, Sequence) or isinstance(calls, str | bytes):
        raise CallerError(f"{place}.tool_calls must be a list")
    if len(calls) > TOOL_CALLS_MAX:
        raise CallerError(f"{place}.tool_calls has {len(calls)} entries and at most {TOOL_CALLS_MAX} are allowed")
    return [_plain_call(call, f"{place}.tool_calls[{index}]") for index, call in enumerate(calls)]


def _plain_call(call: object, place: str) -> Message:
    if not isinstance(call, Mapping):
        raise CallerError(f"{place} must be an object")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"].strip() or "{}")
    except (ValueError, RecursionError):
        return dict(call)
    if not isinstance(arguments, dict) or _is_deep(arguments):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _is_deep(value: Any) -> bool:
    """Whether the value nests deeper than the JSON of a request may: recursion over it would be unbounded."""
    level = [value]
    for _ in range(_DEPTH_MAX):
        containers = [inner for inner in level if isinstance(inner, dict | list)]
        level = [entry for inner in containers for entry in (inner.values() if isinstance(inner, dict) else inner)]
    return bool(level)
