"""Describes tools in plain text, for a model whose chat template does not support them.

    tools        a system message (or the end of an existing one) lists them and explains how to call one
    calls        of earlier turns become the JSON that the model wrote
    results      become a user message; consecutive results become one, because many templates want turns to alternate

The requested JSON is the style "json" of parsers/styles.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.text.chat_messages import Message

_INTRODUCTION = """You can call these tools:

{tools}

To call one, answer with a JSON object and nothing else, with its name and an object of arguments:
{{"name": "...", "arguments": {{...}}}}
To call several, answer with a list of such objects. If no tool helps, answer in plain text."""


def in_words(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """The messages with tools and calls in words. `messages`: plain messages (chat_messages.py)."""
    chat: list[Message] = []
    before = ""
    for message in messages:
        if message["role"] == "tool" == before:
            chat[-1]["content"] += "\n" + _result(message)
        elif message["role"] == "tool":
            chat.append({"role": "user", "content": _result(message)})
        elif "tool_calls" in message:
            chat.append({"role": message["role"], "content": _calls(message)})
        else:
            chat.append(message)
        before = message["role"]
    if not tools:
        return chat
    words = _INTRODUCTION.format(tools="\n".join(_json(tool.get("function", tool)) for tool in tools))
    if chat[0]["role"] == "system":
        return [{**chat[0], "content": f"{chat[0]['content']}\n\n{words}"}, *chat[1:]]
    return [{"role": "system", "content": words}, *chat]


def has_tool_turns(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def _result(message: Message) -> str:
    name = message.get("name")
    return f"Result of {name}: {message['content']}" if isinstance(name, str) else f"Result: {message['content']}"


def _calls(message: Message) -> str:
    functions = [call.get("function") for call in message["tool_calls"] if isinstance(call, Mapping)]
    calls = [
        {"name": function.get("name"), "arguments": function.get("arguments")}
        for function in functions
        if isinstance(function, Mapping)
    ]
    answer = _json(calls[0] if len(calls) == 1 else calls)
    return f"{message['content']}\n{answer}" if message["content"] else answer


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
