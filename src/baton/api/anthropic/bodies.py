"""The body of /v1/messages becomes OpenAI's: a message of blocks is one or several of theirs.

user        text, tool_result     -> a message with the role tool for each result, and one of the user for the text between
assistant   thinking, text, tool_use -> one message with reasoning_content, content, tool_calls
the last one is the assistant's      -> the answer goes on with it
"""

from __future__ import annotations

import json
from typing import Any

from baton.api.anthropic.fields import MESSAGES
from baton.api.errors import ApiError, bad
from baton.api.front import Front
from baton.api.openai.fields import shown
from baton.api.openai.schemas import ChatBody
from baton.api.translate import errors_named_by, format_named, translated

Message = dict[str, Any]


def messages_body(front: Front, body: dict[str, Any]) -> ChatBody:
    asked = translated(body, MESSAGES)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise bad(f"messages must be a list, not {shown(messages)}", "messages")
    spoken = [{"role": "system", "content": _text(body["system"], "system")}] if body.get("system") else []
    for index, message in enumerate(messages):
        spoken += _openai_messages(message, f"messages[{index}]")
    asked["messages"] = spoken
    if spoken and spoken[-1]["role"] == "assistant" and not spoken[-1].get("tool_calls"):
        asked["continue_final_message"] = True
    if body.get("tools"):
        asked["tools"] = _tools(body["tools"])
    if body.get("tool_choice") is not None:
        _choose(asked, body["tool_choice"])
    _output(asked, body)
    with errors_named_by((MESSAGES, "")):
        return format_named(front.schema.chat(asked), "output_config.format")


def _openai_messages(message: Any, place: str) -> list[Message]:
    if not isinstance(message, dict):
        raise bad(f"{place} must be an object with a role and a content, not {shown(message)}", "messages")
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise bad(f'{place}.role must be "user" or "assistant"', "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise bad(f"{place}.content must be a text or a list of blocks, not {shown(content)}", "messages")
    blocks = [_block(block, f"{place}.content[{index}]") for index, block in enumerate(content)]
    return [_assistant(blocks, place)] if role == "assistant" else _user(role, blocks, place)


def _block(block: Any, place: str) -> Message:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise bad(f"{place} must be a block with a type, not {shown(block)}", "messages")
    return {**block, "place": place}


def _user(role: str, blocks: list[Message], place: str) -> list[Message]:
    messages: list[Message] = []
    texts: list[Message] = []
    for block in blocks:
        if block["type"] == "tool_result":
            if texts:
                messages.append({"role": role, "content": texts})
                texts = []
            messages.append(_tool_result(block))
        else:
            texts.append({"type": "text", "text": _text_of(block)})
    return [*messages, {"role": role, "content": texts}] if texts or not messages else messages


def _assistant(blocks: list[Message], place: str) -> Message:
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block["type"]:
            case "thinking":
                thoughts.append(_string(block, "thinking"))
            case "redacted_thinking":
                continue  # nobody but its author can read it
            case "tool_use":
                calls.append(_tool_use(block))
            case _:
                texts.append({"type": "text", "text": _text_of(block)})
    message: Message = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Message) -> Message:
    arguments = block.get("input")
    if not isinstance(arguments, dict):
        raise bad(f"{block['place']}.input must be an object, not {shown(arguments)}", "messages")
    function = {"name": _string(block, "name"), "arguments": json.dumps(arguments)}
    return {"id": _string(block, "id"), "type": "function", "function": function}


def _tool_result(block: Message) -> Message:
    content = block.get("content") or ""
    message: Message = {"role": "tool", "tool_call_id": _string(block, "tool_use_id")}
    message["content"] = _text(content, f"{block['place']}.content")
    if block.get("is_error") is True:
        message["is_error"] = True  # for templates that know it
    return message


def _text(value: Any, place: str) -> str:
    """A text, or text blocks, which are joined as in any chat."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad(f"{place} must be a text or a list of text blocks, not {shown(value)}", place.split("[", 1)[0])
    return "\n".join(_text_of(_block(block, f"{place}[{index}]")) for index, block in enumerate(value))


def _text_of(block: Message) -> str:
    if block["type"] != "text":
        place = str(block["place"])
        message = f"{place}: only text, thinking, tool_use and tool_result blocks are supported, where they belong"
        raise ApiError(400, message, param=place.split("[", 1)[0], code="unsupported")
    return _string(block, "text")


def _string(block: Message, key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise bad(f"{block['place']}.{key} must be a text, not {shown(value)}", "messages")
    return value


def _tools(value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise bad(f"tools must be a list, not {shown(value)}", "tools")
    tools = []
    for index, tool in enumerate(value):
        if not isinstance(tool, dict):
            raise bad(f"tools[{index}] must be an object, not {shown(tool)}", "tools")
        if tool.get("type") not in (None, "custom"):
            raise bad(f"tools[{index}].type: only tools of the client's own are supported", "tools", code="unsupported")
        function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
        tools.append({"type": "function", "function": {key: part for key, part in function.items() if part is not None}})
    return tools


def _choose(asked: dict[str, Any], choice: Any) -> None:
    match choice:
        case {"type": "auto" | "none" as word}:
            asked["tool_choice"] = word
        case {"type": "any"}:
            asked["tool_choice"] = "required"
        case {"type": "tool", "name": str(name)}:
            asked["tool_choice"] = {"type": "function", "function": {"name": name}}
        case _:
            raise bad('tool_choice.type must be "auto", "any", "none", or "tool" with a name', "tool_choice")
    if choice.get("disable_parallel_tool_use") is not None:
        if not isinstance(choice["disable_parallel_tool_use"], bool):
            raise bad("tool_choice.disable_parallel_tool_use must be true or false", "tool_choice")
        asked["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]


def _output(asked: dict[str, Any], body: dict[str, Any]) -> None:
    config = body.get("output_config") or {}
    if not isinstance(config, dict):
        raise bad(f"output_config must be an object, not {shown(config)}", "output_config")
    if config.get("effort") is not None:
        asked["reasoning_effort"] = config["effort"]
    form = config.get("format") or body.get("output_format")
    if form is None:
        return
    match form:
        case {"type": "json_schema", "schema": dict(schema)}:
            asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
        case _:
            raise bad('output_config.format must be {"type": "json_schema", "schema": {...}}', "output_config")
