"""The body of /v1/responses becomes OpenAI's older one, with the conversation that it goes on with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.api.errors import ApiError, bad
from baton.api.fields import shown
from baton.api.front import Front
from baton.api.generate.options import ChatBody
from baton.api.responses.fields import RESPONSES
from baton.api.responses.items import Message, messages_of
from baton.api.responses.stored_items import StoredItems
from baton.api.responses.text_format import THEIRS, echoed_text, refuse_two_formats, response_format_of, unused_of_text
from baton.api.responses.tools import tool_choice, tool_set
from baton.api.translate import also_ignored, errors_named_by, format_named, same, translated

_INCLUDABLE = ("message.output_text.logprobs", "reasoning.encrypted_content")
_METADATA_MAX = 16


@dataclass(frozen=True, slots=True)
class Asked:
    chat: ChatBody
    conversation: list[Message]
    "What was said until now, without instructions: what the next request goes on with."
    store: bool
    summary: bool
    "A summary of the thought is asked for (output_items.py)."
    echoed: dict[str, Any]
    "Settings that come back with the answer."
    namespaces: Mapping[str, tuple[str, str]]
    "By the name of a tool that the model sees: namespace and name."


def responses_body(front: Front, body: dict[str, Any], tenant: bytes) -> Asked:
    asked = translated(body, RESPONSES)
    store = True if body.get("store") is None else body["store"]
    if not isinstance(store, bool):
        raise bad(f"store must be true or false, not {shown(store)}", "store")
    stored = StoredItems(front.responses, tenant, front.limits.body_bytes)
    conversation = [*_previous(front, body, tenant), *messages_of(body.get("input"), stored.item)]
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise bad(f"instructions must be a text, not {shown(instructions)}", "instructions")
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
    echoed = {**_echoed(body, chat, store), "text": echoed_text(body, chat.options, front.limits)}
    return Asked(chat, conversation, store, _summary(body.get("reasoning")), echoed, tools.namespaces)


def _compaction(value: Any) -> Iterator[str]:
    """Would only ever shorten a long conversation, which is never done here."""
    for index, edit in enumerate(value if isinstance(value, list) else [value] if value else []):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if kind != "compaction":
            raise bad("context_management may have entries of the type compaction", "context_management", code="unsupported")
        yield f"context_management[{index}].compaction"


def _previous(front: Front, body: dict[str, Any], tenant: bytes) -> list[Message]:
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


def _echoed(body: dict[str, Any], chat: ChatBody, store: bool) -> dict[str, Any]:
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict) or len(metadata) > _METADATA_MAX:
        raise bad(f"metadata must be an object with at most {_METADATA_MAX} keys", "metadata")
    options = chat.options
    reasoning = body.get("reasoning")
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": options.max_tokens,
        "metadata": metadata,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": reasoning if isinstance(reasoning, dict) else {"effort": None, "summary": None},
        "store": store,
        "temperature": options.temperature,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": options.logprobs or 0,
        "top_p": options.top_p,
        "truncation": "disabled",
        "user": body.get("user"),
        "background": False,
    }
