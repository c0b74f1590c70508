"""Ollama's bodies become OpenAI's."""

from __future__ import annotations

import json
from typing import Any

from baton.api.errors import bad
from baton.api.fields import shown
from baton.api.front import Front
from baton.api.generate.options import ChatBody, CompletionBody
from baton.api.ollama.fields import CHAT, GENERATE, OPTIONS
from baton.api.translate import Table, errors_named_by, format_named, translated


def chat_body(front: Front, body: dict[str, Any]) -> ChatBody | None:
    """None: no messages, which only asks whether the model is there."""
    messages = body.get("messages") or []
    if not isinstance(messages, list):
        raise bad(f"messages must be a list, not {shown(messages)}", "messages")
    asked = _common(front, body, CHAT)
    if body.get("tools"):
        asked["tools"] = body["tools"]
    asked["messages"] = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return _read_chat(front, asked) if messages else None


def generate_body(front: Front, body: dict[str, Any]) -> ChatBody | CompletionBody | None:
    """None: no prompt."""
    prompt, system, raw = body.get("prompt") or "", body.get("system") or "", body.get("raw") or False
    for name, text in (("prompt", prompt), ("system", system)):
        if not isinstance(text, str):
            raise bad(f"{name} must be a text, not {shown(text)}", name)
    if not isinstance(raw, bool):
        raise bad(f"raw must be true or false, not {shown(raw)}", "raw")
    asked = _common(front, body, GENERATE)
    if not prompt:
        return None
    if raw:
        if system:
            raise bad("system is not used where raw is true: write it into the prompt", "system")
        asked.setdefault("max_tokens", -1)
        with errors_named_by((OPTIONS, "options.")):
            return format_named(front.schema.completion({**asked, "prompt": prompt}), "format")
    spoken = [{"role": "system", "content": system}] if system else []
    return _read_chat(front, {**asked, "messages": [*spoken, {"role": "user", "content": prompt}]})


def model_name(front: Front, name: Any) -> Any:
    """Clients write name:latest for name."""
    if isinstance(name, str) and not front.model.is_called(name) and name.endswith(":latest"):
        return name.removesuffix(":latest")
    return name


def _read_chat(front: Front, asked: dict[str, Any]) -> ChatBody:
    with errors_named_by((OPTIONS, "options.")):
        return format_named(front.schema.chat(asked), "format")


def _common(front: Front, body: dict[str, Any], table: Table) -> dict[str, Any]:
    options = body.get("options") or {}
    if not isinstance(options, dict):
        raise bad(f"options must be an object, not {shown(options)}", "options")
    asked = {**translated(body, table), **translated(options, OPTIONS, "options.")}
    asked["model"] = model_name(front, body.get("model"))
    asked["stream"] = True if body.get("stream") is None else body["stream"]
    if asked.get("max_tokens") == -2:  # as -1: the context is the end either way
        asked["max_tokens"] = -1
    if body.get("format") not in (None, ""):
        asked["response_format"] = _response_format(body["format"])
    front.schema.require_model(asked["model"])
    return asked


def _response_format(value: Any) -> dict[str, Any]:
    if value == "json":
        return {"type": "json_object"}
    if not isinstance(value, dict):
        raise bad(f'format must be "json" or a JSON schema, not {shown(value)}', "format")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": value}}


def _message(message: Any, place: str) -> Any:
    """What is wrong with it otherwise is found where all chats are checked (text/chat_messages.py)."""
    if not isinstance(message, dict):
        return message
    if message.get("images"):
        raise bad(f"{place}.images is not supported: only text is", "messages", code="unsupported")
    plain = {key: value for key, value in message.items() if key not in ("images", "thinking", "tool_name")}
    if message.get("thinking"):
        plain["reasoning_content"] = message["thinking"]
    if message.get("tool_name"):
        plain["name"] = message["tool_name"]
    if plain.get("content") is None:
        plain["content"] = ""
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_call(call, index) for index, call in enumerate(calls)]
    return plain


def _call(call: Any, index: int) -> Any:
    """Ollama's have no id, and arguments as an object; OpenAI's have both as text."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), dict):
        function["arguments"] = json.dumps(function["arguments"])
    return {"id": f"call{index:05d}", "type": "function", **call, "function": function}
