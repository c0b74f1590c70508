"""The tools of a chat request, and which of them the model may or must call.

    tools                functions with a JSON schema of their arguments
    tool_choice          auto (the default: the model decides), none, required (at least one), or a named tool.
                         {"type": "allowed_tools"} narrows auto and required to some tools
    parallel_tool_calls  false: at most one call

Without tools, "none" and "auto" have no effect. A required call is enforced by a grammar, and so are the arguments of a
`strict` tool (generate/answer_parts.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from baton.api.errors import ApiError, bad
from baton.api.fields import Fields, expect, shown
from baton.api.limits import Limits
from baton.text.chat_template import TemplateLimits

CALLS_MAX: Final = 128
"""Maximum of tool calls per answer; then the answer ends."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}", re.ASCII)
Choice = Literal["auto", "required"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """Tools that the model may call in one request."""

    listed: tuple[Mapping[str, Any], ...]
    "OpenAI's tool objects for the template."
    parameters: Mapping[str, Mapping[str, Any]]
    "JSON schema of the arguments, by name of a callable tool."
    choice: Choice = "auto"
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    "Tools whose arguments follow their schema even where calls are optional."

    @property
    def calls_max(self) -> int:
        return CALLS_MAX if self.parallel else 1


def read_tools(fields: Fields, limits: Limits) -> Tools | None:
    """The tools of a request. None if it has no tools or none may be called: the prompt does not mention them then."""
    parallel = fields.boolean("parallel_tool_calls", default=True)
    value, choice = fields.raw("tools"), fields.raw("tool_choice")
    if value is None or value == []:
        if choice not in (None, "none", "auto"):
            raise bad("tool_choice needs tools", "tool_choice")
        return None
    listed = _checked_tools(value, limits)
    wanted, names = _choice(choice, tuple(listed))
    if wanted == "none":
        return None
    schemas = {name: listed[name]["function"].get("parameters") or {"type": "object", "properties": {}} for name in names}
    strict = frozenset(name for name in names if listed[name]["function"].get("strict"))
    return Tools(listed=tuple(listed.values()), parameters=schemas, choice=wanted, parallel=parallel, strict=strict)


def _checked_tools(value: Any, limits: Limits) -> dict[str, dict[str, Any]]:
    """Checked tools by name. Unknown keys are passed on to the template."""
    most = TemplateLimits().tools_max
    expect(list, value, "tools")
    if len(value) > most:
        raise bad(f"tools has {len(value)} entries and at most {most} are allowed", "tools")
    try:
        size = len(msgspec.json.encode(value))
    except (UnicodeEncodeError, RecursionError, OverflowError):
        raise bad("tools has a string or a number that cannot be written as JSON", "tools") from None
    if size > limits.tools_bytes:
        raise bad(f"tools has {size} bytes and at most {limits.tools_bytes} are allowed", "tools")
    tools: dict[str, dict[str, Any]] = {}
    for place, entry in enumerate(value):
        tool = _checked_tool(entry, f"tools[{place}]")
        name = tool["function"]["name"]
        if name in tools:
            raise bad(f"tools[{place}].function.name is that of another tool", "tools")
        tools[name] = tool
    return tools


def _checked_tool(entry: Any, place: str) -> dict[str, Any]:
    """The tool in OpenAI's form, without null values. Raises ApiError for a wrong type or name. `place`: its path, for
    errors."""
    if not isinstance(entry, dict) or not isinstance(entry.get("type", "function"), str):
        raise bad(f"{place} must be an object with a type and a function, not {shown(entry)}", "tools")
    if entry.get("type", "function") != "function":
        raise ApiError(400, f'{place}.type: only "function" is supported', param="tools", code="unsupported")
    function: dict[str, Any] = expect(dict, entry.get("function"), f"{place}.function", "tools")
    name, description, schema = function.get("name"), function.get("description"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bad(f"{place}.function.name must be 1 to 128 letters, digits, '_', '-', '.', ':' or '/'", "tools")
    if description is not None and not isinstance(description, str):
        raise bad(f"{place}.function.description must be a string, not {shown(description)}", "tools")
    if schema is not None and not isinstance(schema, dict):
        raise bad(f"{place}.function.parameters must be a JSON schema, an object, not {shown(schema)}", "tools")
    if function.get("strict") not in (None, True, False):
        raise bad(f"{place}.function.strict must be true or false", "tools")
    # Templates test for the presence of a key, not for null.
    return {**entry, "type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(value: Any, names: tuple[str, ...]) -> tuple[Literal["auto", "none", "required"], tuple[str, ...]]:
    """The kind of choice, and the names of the callable tools."""
    match value:
        case None | "auto":
            return "auto", names
        case "none":
            return "none", names
        case "required" | "any":
            return "required", names
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "required", (_known(name, names),)
        case {"type": "allowed_tools", "allowed_tools": {"mode": ("auto" | "required") as mode, "tools": [*tools]}} if tools:
            allowed = dict.fromkeys(_known(_name_in(tool), names) for tool in tools)
            return mode, tuple(allowed)
    raise bad(
        'tool_choice must be "none", "auto", "required", {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
        "tool_choice",
    )


def _known(name: str, names: tuple[str, ...]) -> str:
    if name not in names:
        raise bad("tool_choice names a tool that is not among tools", "tool_choice")
    return name


def _name_in(tool: Any) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    return ""
