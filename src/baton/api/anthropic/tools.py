"""The tools of /v1/messages become OpenAI's, and its edits of the context are looked at.

custom, or no type   the client runs it
defer_loading        not offered before a tool_result has a tool_reference to it, unless Anthropic's server would do the search
others               web_search_20250305, ...: Anthropic's server would have to run them, or only Anthropic's models know their
                     schema. They are left out and named in x-baton-ignored; refused only where tool_choice demands one
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from baton.api.errors import bad
from baton.api.fields import shown

Json = dict[str, Any]

LEFT_OUT: Final = (
    "web_search_",
    "web_fetch_",
    "code_execution_",
    "tool_search_tool_",  # _SEARCH
    "mcp_toolset",
    "advisor_",
    "bash_",
    "text_editor_",
    "computer_",
    "memory_",
)
_COPIED: Final = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
_HARMLESS: Final = ("type", "cache_control", "eager_input_streaming", "defer_loading")
_SEARCH: Final = "tool_search_tool_"
_ONLY_REMOVE: Final = ("clear_tool_uses_", "clear_thinking_", "compact_")


def openai_tools(value: Any, referenced: frozenset[str]) -> tuple[list[Json], list[str], frozenset[str]]:
    """The tools, what of them is not used (with its place), and the names of those that are left out.

    `referenced`: tools that the conversation has a reference to."""
    if not isinstance(value, list):
        raise bad(f"tools must be a list, not {shown(value)}", "tools")
    kinds = [tool.get("type") for tool in value if isinstance(tool, dict)]
    all_at_once = any(isinstance(kind, str) and kind.startswith(_SEARCH) for kind in kinds)
    tools: list[Json] = []
    unused: list[str] = []
    names: list[str] = []
    for index, tool in enumerate(value):
        place = f"tools[{index}]"
        if not isinstance(tool, dict):
            raise bad(f"{place} must be an object, not {shown(tool)}", "tools")
        kind = tool.get("type")
        if isinstance(kind, str) and kind.startswith(LEFT_OUT):
            unused.append(f"{place}.{kind}")
            names.append(str(tool.get("name")))
            continue
        if kind not in (None, "custom"):
            raise bad(f"{place}.type: only tools of the client's own are supported", "tools", code="unsupported")
        name = tool.get("name")
        # A name that is no text is not left out: the schema of tools refuses it with its place.
        if tool.get("defer_loading") is True and not all_at_once and isinstance(name, str) and name not in referenced:
            continue
        function = {to: tool[name] for name, to in _COPIED.items() if tool.get(name) is not None}
        unused += [f"{place}.{key}" for key in tool if key not in (*_COPIED, *_HARMLESS) and tool[key] not in (None, False)]
        tools.append({"type": "function", "function": function})
    return tools, unused, frozenset(names)


def choose_tool(asked: Json, choice: Any, left_out: frozenset[str]) -> None:
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
    """Of context_management: names of edits that would take something out of a long conversation, which is not done here.

    Claude Code sends clear_thinking with keep: "all" in every request, which asks for nothing."""
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
