"""Items of a Responses request become messages of a chat.

An assistant's turn is several items there (reasoning, message, function_call...) and one message of a chat; so an item of the
assistant joins the message before it, where that is the assistant's too and has nothing of the kind yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from baton.api.errors import ApiError, bad
from baton.api.fields import shown
from baton.api.responses.tools import qualified
from baton.text.chat_messages import TEXT_PARTS

Message = dict[str, Any]
FindItem = Callable[[str], Message | None]


def messages_of(value: Any, find: FindItem = lambda _: None) -> list[Message]:
    """Raises ApiError naming the place. `find`: an item of an answer that was kept, by its id."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise bad(f"input must be a text or a list of items, not {shown(value)}", "input")
    messages: list[Message] = []
    for index, item in enumerate(value):
        place = f"input[{index}]"
        _add(messages, _referred(item, place, find), place)
    return messages


def _referred(item: Any, place: str, find: FindItem) -> Any:
    """An item, or the one that it is a reference to: {"type": "item_reference", "id": "msg_..."}, or the id alone."""
    is_reference = isinstance(item, dict) and (item.get("type") == "item_reference" or item.keys() == {"id"})
    if not is_reference:
        return item
    found = find(_string(item, "id", place))
    if found is None:
        message = f"{place} refers to an item that is not kept here: send the item itself, with store: false or without"
        raise ApiError(404, message, param="input", code="item_not_found")
    return found


def _add(messages: list[Message], item: Any, place: str) -> None:
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
            _turn(messages, "reasoning_content")["reasoning_content"] = thought
        case "function_call":
            name = qualified(_string(item, "name", place), item.get("namespace"))
            function = {"name": name, "arguments": _string(item, "arguments", place)}
            call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
            _turn(messages, "").setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item.get("output")
            content = output if isinstance(output, str | list) else None
            if content is None:
                raise bad(f"{place}.output must be a text, not {shown(output)}", "input")
            if isinstance(content, list):
                _require_text(content, f"{place}.output")
            messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", place), "content": content})
        case _:
            raise ApiError(
                400,
                f"{place}.type: only message, function_call, function_call_output, reasoning and item_reference are supported",
                param="input",
                code="unsupported",
            )


def _add_message(messages: list[Message], item: Message, place: str) -> None:
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise bad(f'{place}.role must be "user", "assistant", "system" or "developer"', "input")
    if isinstance(content, list):
        _require_text(content, f"{place}.content")
    elif not isinstance(content, str):
        raise bad(f"{place}.content must be a text or a list of parts, not {shown(content)}", "input")
    if role == "assistant":
        _turn(messages, "content")["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _turn(messages: list[Message], key: str) -> Message:
    """The assistant's message that an item belongs to: the last one, unless it has such a part, or what comes after it."""
    order = ("reasoning_content", "content", "tool_calls")
    later = order[order.index(key) :] if key else ()
    if messages and messages[-1]["role"] == "assistant" and not any(messages[-1].get(part) for part in later):
        return messages[-1]
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _require_text(parts: list[Any], place: str) -> None:
    """An image is refused here, with the place that the client knows: later it would be one of another message."""
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else "text"
        if kind not in TEXT_PARTS:
            message = f"{place}[{index}] is not a text part: only {', '.join(TEXT_PARTS)} are supported"
            raise bad(message, "input", code="unsupported")


def _string(item: Message, key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise bad(f"{place}.{key} must be a text, not {shown(value)}", "input")
    return value
