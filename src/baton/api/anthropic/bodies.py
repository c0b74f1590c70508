"""The body of /v1/messages becomes OpenAI's: a message of blocks is one or several of theirs.

user        text, tool_result     -> a message with the role tool for each result, and one of the user for the text between
assistant   thinking, text, tool_use -> one message with reasoning_content, content, tool_calls
the last one is the assistant's      -> the answer goes on with it
"""

from __future__ import annotations

import json
from typing import Any

from baton.api.anthropic.fields import MESSAGES
from baton.api.anthropic.tools import choose_tool, openai_tools, unused_edits
from baton.api.errors import ApiError, bad
from baton.api.fields import shown
from baton.api.front import Front
from baton.api.generate.options import ChatBody
from baton.api.translate import also_ignored, errors_named_by, format_named, translated

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
    tools, unused, left_out = openai_tools(body.get("tools") or [], _referenced(messages))
    if tools:
        asked["tools"] = tools
    if body.get("tool_choice") is not None:
        choose_tool(asked, body["tool_choice"], left_out)
    _output(asked, body)
    unused += unused_edits(body.get("context_management"))
    with errors_named_by((MESSAGES, "")):
        chat = format_named(front.schema.chat(asked), "output_config.format")
    return also_ignored(chat, unused, front.config.unknown_fields)


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
    message["content"] = _result_text(content, f"{block['place']}.content")
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


def _result_text(value: Any, place: str) -> str:
    """As `_text`. A tool of the client's that looks for tools answers with references to those that it found."""
    if not isinstance(value, list):
        return _text(value, place)
    found = [
        {"type": "text", "text": f"The tool {block['tool_name']} can be called now."} if _is_reference(block) else block
        for block in value
    ]
    return _text(found, place)


def _is_reference(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_reference" and isinstance(block.get("tool_name"), str)


def _referenced(messages: list[Any]) -> frozenset[str]:
    """Names of the tools that results refer to. What is wrong with a message is found elsewhere."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    blocks = [block for content in contents if isinstance(content, list) for block in content if isinstance(block, dict)]
    results = [block.get("content") for block in blocks if block.get("type") == "tool_result"]
    return frozenset(part["tool_name"] for parts in results if isinstance(parts, list) for part in parts if _is_reference(part))


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
