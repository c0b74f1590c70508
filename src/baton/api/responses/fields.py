"""Fields of the Responses API: the table (translate.py defines the rules), and the translation of a body to chat completions.

input        an assistant's turn is several items (reasoning, message, function_call...) and one message of a chat; so an item
             of the assistant joins the assistant's message before it, unless that has such a part already
text.format  is `response_format` of chat completions. That name is accepted too. The answer's `text.format` is the format that
             was applied, under whichever name it was given
tools
function     the client runs it
namespace    functions under a common name. The model sees them as namespace.name; a call has both apart (OutputItems)
others       web_search, mcp, ...: the server would have to run them, or they have no schema. They are left out and named in
             x-baton-ignored; refused only where tool_choice demands one
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from baton.api.errors import ApiError, bad
from baton.api.fields import expect, shown
from baton.api.front import Front
from baton.api.generate.options import ChatBody
from baton.api.limits import Limits
from baton.api.openai.structured import grammar_of_format
from baton.api.responses.store import StoredItems
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
from baton.text.chat_messages import TEXT_PARTS

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
    "reasoning": same("reasoning", "effort; with summary the thought is returned as its summary"),
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

LEFT_OUT: Final = (
    *("web_search", "file_search", "code_interpreter", "computer", "image_generation", "mcp"),
    *("local_shell", "shell", "apply_patch", "custom", "tool_search"),
)
"""Prefixes of the types of such tools: web_search_preview_2025_03_11, computer_use_preview, ..."""
OURS: Final = "text.format"
THEIRS: Final = "response_format"
_INCLUDABLE: Final = ("message.output_text.logprobs", "reasoning.encrypted_content")

Json = dict[str, Any]
FindItem = Callable[[str], Json | None]


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    chat: ChatBody
    conversation: list[Json]
    "Messages so far, without instructions: the next request continues them."
    store: bool
    summary: bool
    "Whether a summary of the reasoning is requested (OutputItems)."
    namespaces: Mapping[str, tuple[str, str]]
    "Namespace and name, by the tool name that the model sees."


def responses_body(front: Front, body: dict[str, Any], tenant: bytes) -> ResponsesRequest:
    """Translates a body of the Responses API to a chat body, with the facts that its answer needs."""
    asked = translated(body, RESPONSES)
    store = expect(bool, True if body.get("store") is None else body["store"], "store")
    stored = StoredItems(front.responses, tenant, front.limits.body_bytes)
    conversation = [*_previous(front, body, tenant), *messages_of(body.get("input"), stored.item)]
    instructions = expect(str, "" if body.get("instructions") is None else body["instructions"], "instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    asked["messages"] = [*system, *conversation]
    tools = tool_set(body.get("tools") or [])
    if tools.functions:
        asked["tools"] = tools.functions
    if body.get("tool_choice") is not None:
        asked["tool_choice"] = tool_choice(body["tool_choice"])
    asked[THEIRS], name = response_format_of(body)
    _include(asked, body)
    with errors_named_by((RESPONSES, ""), ({name: same(THEIRS)}, "")):
        chat = format_named(front.schema.chat(asked), name)
    left_out = [*tools.left_out, *unused_of_text(body), *_compaction(body.get("context_management"))]
    chat = also_ignored(chat, left_out, front.config.unknown_fields)
    refuse_two_formats(body, asked[THEIRS], front.limits)
    return ResponsesRequest(chat, conversation, store, _summary(body.get("reasoning")), tools.namespaces)


def _compaction(value: Any) -> Iterator[str]:
    """Yields the compaction edits: they would shorten a long conversation, which Baton does not do."""
    for index, edit in enumerate(value if isinstance(value, list) else [value] if value else []):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if kind != "compaction":
            raise bad("context_management may have entries of the type compaction", "context_management", code="unsupported")
        yield f"context_management[{index}].compaction"


def _previous(front: Front, body: dict[str, Any], tenant: bytes) -> list[Json]:
    name = body.get("previous_response_id")
    if name is None:
        return []
    stored = front.responses.get(tenant, name) if isinstance(name, str) else None
    if stored is None:
        message = "there is no stored response with that previous_response_id: not kept, deleted, or it made room for others"
        raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
    return stored.conversation


def _summary(reasoning: Any) -> bool:
    wanted = (reasoning.get("summary") or reasoning.get("generate_summary")) if isinstance(reasoning, dict) else None
    if wanted not in (None, "auto", "concise", "detailed"):
        raise bad(f'reasoning.summary must be "auto", "concise" or "detailed", not {shown(wanted)}', "reasoning")
    return wanted is not None


def _include(asked: dict[str, Any], body: dict[str, Any]) -> None:
    wanted = body.get("include") or []
    if not isinstance(wanted, list) or any(name not in _INCLUDABLE for name in wanted):
        raise bad(f"include may have {' and '.join(_INCLUDABLE)}", "include", code="unsupported")
    if _INCLUDABLE[0] in wanted:
        asked["logprobs"] = True
        asked["top_logprobs"] = body.get("top_logprobs")
    elif body.get("top_logprobs"):
        raise bad(f"top_logprobs needs {_INCLUDABLE[0]} in include", "top_logprobs")


def messages_of(value: Any, find: FindItem = lambda _: None) -> list[Json]:
    """Messages of the input. Raises ApiError with the place. `find`: returns an item of a stored answer by its id."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise bad(f"input must be a text or a list of items, not {shown(value)}", "input")
    messages: list[Json] = []
    for index, item in enumerate(value):
        place = f"input[{index}]"
        _add_item(messages, _referred(item, place, find), place)
    return messages


def _referred(item: Any, place: str, find: FindItem) -> Any:
    """The item, or the stored one that it refers to: {"type": "item_reference", "id": "msg_..."}, or the id alone."""
    is_reference = isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})
    if not is_reference:
        return item
    found = find(_string(item, "id", place))
    if found is None:
        message = f"{place} refers to an item that is not kept here: send the item itself, with store: false or without"
        raise ApiError(404, message, param="input", code="item_not_found")
    return found


def _add_item(messages: list[Json], item: Any, place: str) -> None:
    """Adds one input item to the chat, as a message or as a part of the assistant's last message. `place`: path of the item,
    for errors."""
    if not isinstance(item, dict):
        raise bad(f"{place} must be an item, not {shown(item)}", "input")
    kind = item.get("type", "message")
    match kind:
        case "message":
            _add_message(messages, item, place)
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
            thought = "\n".join(text for text in texts if isinstance(text, str))
            _assistant_message(messages, "reasoning_content")["reasoning_content"] = thought
        case "function_call":
            name = qualified(_string(item, "name", place), item.get("namespace"))
            function = {"name": name, "arguments": _string(item, "arguments", place)}
            call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
            _assistant_message(messages, "").setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = item.get("output")
            if isinstance(content, list):
                _require_text(content, f"{place}.output")
            else:
                expect(str, content, f"{place}.output", "input")
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", place), "content": content})
        case _:
            raise ApiError(
                400,
                f"{place}.type: only message, function_call, function_call_output, reasoning and item_reference are supported",
                param="input",
                code="unsupported",
            )


def _add_message(messages: list[Json], item: Json, place: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise bad(f'{place}.role must be "user", "assistant", "system" or "developer"', "input")
    if isinstance(content, list):
        _require_text(content, f"{place}.content")
    elif not isinstance(content, str):
        raise bad(f"{place}.content must be a text or a list of parts, not {shown(content)}", "input")
    if role == "assistant":
        _assistant_message(messages, "content")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _assistant_message(messages: list[Json], key: str) -> Json:
    """The assistant's message that an item joins: the last one, unless that already has this part or a later one."""
    order = ("reasoning_content", "content", "tool_calls")
    later = order[order.index(key) :] if key else ()
    if messages and messages[-1]["role"] == "assistant" and not any(messages[-1].get(part) for part in later):
        return messages[-1]
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _require_text(parts: list[Any], place: str) -> None:
    """Refuses images here, while the place is still the client's: translation moves items to other messages."""
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind not in TEXT_PARTS:
            message = f"{place}[{index}] is not a text part: only {', '.join(TEXT_PARTS)} are supported"
            raise bad(message, "input", code="unsupported")


def _string(item: Json, key: str, place: str) -> str:
    return expect(str, item.get(key), f"{place}.{key}", "input")


def response_format_of(body: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """The format as in chat completions, and the name of the client's field. None: no format."""
    form = _format(body.get("text"))
    if form is None:
        return body.get(THEIRS), THEIRS
    if form.get("type") != "json_schema":
        return form, OURS
    if form.get("schema") is None:
        raise bad(f"{OURS}.schema must be a JSON schema, not null", OURS)
    return {"type": "json_schema", "json_schema": {key: part for key, part in form.items() if key != "type"}}, OURS


def refuse_two_formats(body: Mapping[str, Any], used: dict[str, Any] | None, limits: Limits) -> None:
    """Raises if response_format is given beside `used` and means something else. `used` must be valid."""
    other = body.get(THEIRS)
    if other is None or used is None or other is used:
        return
    if grammar_of_format(other, limits) != grammar_of_format(used, limits):
        raise bad(f"{OURS} and {THEIRS} are the same setting and differ: give one of them", THEIRS)


def unused_of_text(body: Mapping[str, Any]) -> list[str]:
    """Other keys of `text` (verbosity), which no model here supports."""
    text = body.get("text") or {}
    return [f"text.{name}" for name, value in text.items() if name != "format" and value is not None]


def _format(text: Any) -> dict[str, Any] | None:
    if text is None:
        return None
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(text, dict) or (form is not None and not isinstance(form, dict)):
        raise bad("text must be an object with a format, which is an object", "text")
    return form


@dataclass(slots=True)
class ToolSet:
    functions: list[Json] = field(default_factory=list)
    "Tools in the form of chat completions."
    left_out: list[str] = field(default_factory=list)
    "Places and types of tools that are not offered to the model."
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    "Namespace and name, by the name that the model sees."


def qualified(name: Any, namespace: Any) -> Any:
    """The name that the model sees."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and isinstance(name, str) else name


def tool_set(value: Any) -> ToolSet:
    found, tools = ToolSet(), expect(list, value, "tools")
    for index, tool in enumerate(tools):
        _add_tool(found, tool, f"tools[{index}]")
    return found


def tool_choice(value: Any) -> Any:
    """The choice in the form of chat completions."""
    match value:
        case {"type": "function"}:
            return _chosen(value)
        case {"type": "allowed_tools", "tools": [*tools]}:
            offered = [_chosen(tool) for tool in tools if not _is_left_out(tool)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": offered}}
        case {"type": str(kind)} if _is_left_out(value):
            raise bad(
                f"tool_choice demands {kind[:64]!a}, a tool that this server cannot run", "tool_choice", code="unsupported"
            )
    return value


def _add_tool(found: ToolSet, tool: Any, place: str, namespace: str | None = None) -> None:
    """Adds a tool, or the tools of a namespace, to `found`. `place`: path of the tool, for errors."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "function":
        function = {key: part for key, part in tool.items() if key != "type" and part is not None}
        if namespace is not None:
            name = function.get("name")
            function["name"] = qualified(name, namespace)
            found.namespaces[str(function["name"])] = namespace, str(name)
        found.functions.append({"type": "function", "function": function})
    elif kind == "namespace" and namespace is None:
        name, members = tool.get("name"), tool.get("tools")
        if not isinstance(name, str) or not isinstance(members, list):
            raise bad(f"{place} must have a name and a list of tools", "tools")
        for index, member in enumerate(members):
            _add_tool(found, member, f"{place}.tools[{index}]", name)
    elif _is_left_out(tool):
        found.left_out.append(f"{place}.{kind}")
    else:
        raise bad(f"{place}.type: only functions and namespaces of functions are supported", "tools", code="unsupported")


def _chosen(tool: Any) -> Any:
    if not isinstance(tool, dict):
        return tool
    return {"type": "function", "function": {"name": qualified(tool.get("name"), tool.get("namespace"))}}


def _is_left_out(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind.startswith(LEFT_OUT)
