"""Fields of Anthropic's requests: the table (translate.py defines the rules), and the translation of a body to OpenAI's.

user        text, tool_result     -> a message with the role tool for each result, and one of the user for the text between
assistant   thinking, text, tool_use -> one message with reasoning_content, content, tool_calls
the last one is the assistant's      -> the answer continues it

tools
custom, or no type   the client runs it
defer_loading        not offered before a tool_result has a tool_reference to it, unless Anthropic's server would do the search
others               web_search_20250305, ...: Anthropic's server would have to run them, or only Anthropic's models know their
                     schema. They are left out and named in x-baton-ignored; refused only where tool_choice demands one
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from baton.api.errors import ApiError, bad
from baton.api.fields import expect, shown
from baton.api.front import Front
from baton.api.generate.options import ChatBody
from baton.api.translate import (
    ONE_ANSWER,
    Table,
    also_ignored,
    errors_named_by,
    format_named,
    harmless,
    own,
    refused,
    same,
    translated,
)

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
    "logprobs": refused(False, about="log-probabilities come from /v1/chat/completions"),
    "top_logprobs": refused(0, about="log-probabilities come from /v1/chat/completions"),
}
"""Fields of /v1/messages; /v1/messages/count_tokens accepts the same and uses those that belong to the prompt."""

_SEARCH: Final = "tool_search_tool_"
LEFT_OUT: Final = (
    *("web_search_", "web_fetch_", "code_execution_", _SEARCH, "mcp_toolset", "advisor_"),
    *("bash_", "text_editor_", "computer_", "memory_"),
)
_COPIED: Final = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
_HARMLESS: Final = ("type", "cache_control", "eager_input_streaming", "defer_loading")
_ONLY_REMOVE: Final = ("clear_tool_uses_", "clear_thinking_", "compact_")

Json = dict[str, Any]


def messages_body(front: Front, body: dict[str, Any]) -> ChatBody:
    """Translates a body of /v1/messages to a chat body."""
    asked = translated(body, MESSAGES)
    messages: list[Any] = expect(list, body.get("messages"), "messages")
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


def _openai_messages(message: Any, place: str) -> list[Json]:
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


def _block(block: Any, place: str) -> Json:
    if isinstance(block, str):
        return {"type": "text", "text": block, "place": place}
    if not isinstance(block, dict) or not isinstance(block.get("type"), str):
        raise bad(f"{place} must be a block with a type, not {shown(block)}", "messages")
    return {**block, "place": place}


def _user(role: str, blocks: list[Json], place: str) -> list[Json]:
    messages: list[Json] = []
    texts: list[Json] = []
    for block in blocks:
        if block["type"] == "tool_result":
            if texts:
                messages.append({"role": role, "content": texts})
                texts = []
            messages.append(_tool_result(block))
        else:
            texts.append({"type": "text", "text": _text_of(block)})
    return [*messages, {"role": role, "content": texts}] if texts or not messages else messages


def _assistant(blocks: list[Json], place: str) -> Json:
    """A message of the assistant in OpenAI's form, from its blocks. `place`: path of the message, for errors."""
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block["type"]:
            case "thinking":
                thoughts.append(_string(block, "thinking"))
            case "redacted_thinking":
                continue  # only Anthropic can decrypt it
            case "tool_use":
                calls.append(_tool_use(block))
            case _:
                texts.append({"type": "text", "text": _text_of(block)})
    message: Json = {"role": "assistant", "content": texts}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Json) -> Json:
    arguments = json.dumps(expect(dict, block.get("input"), f"{block['place']}.input", "messages"))
    function = {"name": _string(block, "name"), "arguments": arguments}
    return {"id": _string(block, "id"), "type": "function", "function": function}


def _tool_result(block: Json) -> Json:
    message: Json = {"role": "tool", "tool_call_id": _string(block, "tool_use_id")}
    message["content"] = _result_text(block.get("content") or "", f"{block['place']}.content")
    if block.get("is_error") is True:
        message["is_error"] = True  # for templates that render it
    return message


def _text(value: Any, place: str) -> str:
    """The text of a content field: text blocks are joined as in any chat; a plain text is returned as it is."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad(f"{place} must be a text or a list of text blocks, not {shown(value)}", place.split("[", 1)[0])
    return "\n".join(_text_of(_block(block, f"{place}[{index}]")) for index, block in enumerate(value))


def _result_text(value: Any, place: str) -> str:
    """Text of a tool result, as `_text`. References to tools that the client's tool search found become sentences."""
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
    """Names of the tools that tool results refer to. Malformed messages are skipped: the schema reports them."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    blocks = [block for content in contents if isinstance(content, list) for block in content if isinstance(block, dict)]
    results = [block.get("content") for block in blocks if block.get("type") == "tool_result"]
    return frozenset(part["tool_name"] for parts in results if isinstance(parts, list) for part in parts if _is_reference(part))


def _text_of(block: Json) -> str:
    if block["type"] != "text":
        place = str(block["place"])
        message = f"{place}: only text, thinking, tool_use and tool_result blocks are supported, where they belong"
        raise ApiError(400, message, param=place.split("[", 1)[0], code="unsupported")
    return _string(block, "text")


def _string(block: Json, key: str) -> str:
    return expect(str, block.get(key), f"{block['place']}.{key}", "messages")


def _output(asked: dict[str, Any], body: dict[str, Any]) -> None:
    config: Json = expect(dict, body.get("output_config") or {}, "output_config")
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


def openai_tools(value: Any, referenced: frozenset[str]) -> tuple[list[Json], list[str], frozenset[str]]:
    """Returns the tools in OpenAI's form, the places of unused ones, and the names of those left out. `referenced`: names of
    tools that the conversation has a tool_reference to."""
    given: list[Any] = expect(list, value, "tools")
    kinds = [tool.get("type") for tool in given if isinstance(tool, dict)]
    all_at_once = any(isinstance(kind, str) and kind.startswith(_SEARCH) for kind in kinds)
    tools: list[Json] = []
    unused: list[str] = []
    names: list[str] = []
    for index, tool in enumerate(given):
        place = f"tools[{index}]"
        kind = expect(dict, tool, place, "tools").get("type")
        if isinstance(kind, str) and kind.startswith(LEFT_OUT):
            unused.append(f"{place}.{kind}")
            names.append(str(tool.get("name")))
            continue
        if kind not in (None, "custom"):
            raise bad(f"{place}.type: only tools of the client's own are supported", "tools", code="unsupported")
        name = tool.get("name")
        # A tool whose name is not a string is kept: the schema of tools refuses it with its place.
        if tool.get("defer_loading") is True and not all_at_once and isinstance(name, str) and name not in referenced:
            continue
        function = {to: tool[name] for name, to in _COPIED.items() if tool.get(name) is not None}
        unused += [f"{place}.{key}" for key in tool if key not in (*_COPIED, *_HARMLESS) and tool[key] not in (None, False)]
        tools.append({"type": "function", "function": function})
    return tools, unused, frozenset(names)


def choose_tool(asked: Json, choice: Any, left_out: frozenset[str]) -> None:
    """Sets OpenAI's tool_choice in `asked` from Anthropic's `choice`. `left_out`: names of tools that are not offered."""
    match choice:
        case {"type": "auto" | "none" as word}:
            asked["tool_choice"] = word
        case {"type": "any"}:
            asked["tool_choice"] = "required"
        case {"type": "tool", "name": str(name)} if name in left_out:
            message = "tool_choice demands a tool that this server cannot run"
            raise bad(message, "tool_choice", code="unsupported")
        case {"type": "tool", "name": str(name)}:
            asked["tool_choice"] = {"type": "function", "function": {"name": name}}
        case _:
            raise bad('tool_choice.type must be "auto", "any", "none", or "tool" with a name', "tool_choice")
    if choice.get("disable_parallel_tool_use") is not None:
        if not isinstance(choice["disable_parallel_tool_use"], bool):
            raise bad("tool_choice.disable_parallel_tool_use must be true or false", "tool_choice")
        asked["parallel_tool_calls"] = not choice["disable_parallel_tool_use"]


def unused_edits(value: Any) -> Iterator[str]:
    """Yields the edits of context_management that would remove something from a long conversation, which Baton does not do.
    Claude Code sends clear_thinking with keep: "all" in every request; that edit removes nothing."""
    if value is None:
        return
    edits = value.get("edits") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(edits, list | None) or value.keys() - {"edits"}:
        raise bad("context_management must be an object with a list of edits", "context_management")
    for index, edit in enumerate(edits or []):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not isinstance(kind, str) or not kind.startswith(_ONLY_REMOVE):
            message = f"context_management.edits[{index}].type must begin with {', '.join(_ONLY_REMOVE)}"
            raise bad(message, "context_management", code="unsupported")
        if not (kind.startswith("clear_thinking_") and edit.get("keep") == "all"):
            yield f"context_management.edits[{index}].{kind}"
