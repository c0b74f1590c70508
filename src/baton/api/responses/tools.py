"""The tools of a Responses request become those of a chat.

function     the client runs it
namespace    functions under a common name. The model sees them as namespace.name; a call says both apart (OutputItems)
others       web_search, mcp, ...: the server would have to run them, or they have no schema. They are left out and named in
             x-baton-ignored; refused only where tool_choice demands one
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from baton.api.errors import bad
from baton.api.fields import shown

Json = dict[str, Any]

LEFT_OUT: Final = (
    "web_search",
    "file_search",
    "code_interpreter",
    "computer",
    "image_generation",
    "mcp",
    "local_shell",
    "shell",
    "apply_patch",
    "custom",
    "tool_search",
)
"""Types begin so: web_search_preview_2025_03_11, computer_use_preview, ..."""


@dataclass(slots=True)
class ToolSet:
    functions: list[Json] = field(default_factory=list)
    "As chat completions have them."
    left_out: list[str] = field(default_factory=list)
    "Places of those that are not offered to the model, with their types."
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)
    "By the name that the model sees: namespace and name."


def qualified(name: Any, namespace: Any) -> Any:
    """The name that the model sees."""
    return f"{namespace}.{name}" if isinstance(namespace, str) and isinstance(name, str) else name


def tool_set(value: Any) -> ToolSet:
    if not isinstance(value, list):
        raise bad(f"tools must be a list, not {shown(value)}", "tools")
    found = ToolSet()
    for index, tool in enumerate(value):
        _add(found, tool, f"tools[{index}]")
    return found


def tool_choice(value: Any) -> Any:
    """As chat completions have it."""
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


def _add(found: ToolSet, tool: Any, place: str, namespace: str | None = None) -> None:
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
            _add(found, member, f"{place}.tools[{index}]", name)
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
