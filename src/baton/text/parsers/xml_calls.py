r"""Calls as Qwen3-Coder writes them: every argument is text between tags.

    <tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>

The tool's schema gives the type: a string is emitted as it arrives, with JSON's escapes; any other value is held until it is
complete, and is JSON, or Python's True, False or None; anything else becomes a string. A line feed after the opening tag and
one before the closing tag belong to the tags. Some answers omit <tool_call>.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from baton.text.parsers.calls import overlap
from baton.text.parsers.text_calls import NoCall, TextCalls, of_json, to_json

_FUNCTION, _PARAMETER = "<function=", "<parameter="
_END_FUNCTION, _END_PARAMETER, _END_CALL = "</function>", "</parameter>", "</tool_call>"
_NAME_CHARS_MAX: Final = 512
_PYTHON: Final[dict[str, Any]] = {"True": True, "False": False, "None": None}


class XmlCalls(TextCalls):
    _schema: Mapping[str, Any] = {}
    _types: frozenset[str] = frozenset()

    def _begun(self, mark: str) -> None:
        self._step = self._name if mark == _FUNCTION else self._function

    def _function(self) -> bool:
        self._step = self._name if self._mark(_FUNCTION) else self._step
        return self._step == self._name

    def _name(self) -> bool:
        name = self._until(">", _NAME_CHARS_MAX)
        if name is None:
            return False
        self._schema = self._tools.get(name.strip(), {})
        self._start(name.strip())
        self._step = self._argument
        return True

    def _argument(self) -> bool:
        mark = self._mark(_PARAMETER, _END_FUNCTION)
        if mark == _END_FUNCTION:
            self._end()
        elif mark:
            self._step = self._key
        return bool(mark)

    def _key(self) -> bool:
        key = self._until(">", _NAME_CHARS_MAX)
        if key is None:
            return False
        try:
            self._member(key.strip())
        except ValueError:
            raise NoCall from None
        self._types = _types(self._schema, key.strip())
        self._step = self._string_begins if self._types == {"string"} else self._value
        return True

    def _value(self) -> bool:
        text = self._until(_END_PARAMETER)
        if text is not None:
            self._add_arguments(_as_json(_inner(text), self._types))
            self._step = self._argument
        return text is not None

    def _string_begins(self) -> bool:
        if self._at == len(self._text):
            return False
        self._at += self._text[self._at] == "\n"
        self._add_arguments('"')
        self._step = self._string
        return True

    def _string(self) -> bool:
        text, begin = self._text, self._at
        place = text.find(_END_PARAMETER, begin)
        if place >= 0:
            value = text[begin:place]
            self._at = place + len(_END_PARAMETER)
            self._add_arguments(_escaped(value.removesuffix("\n")) + '"')
            self._step = self._argument
            return True
        self._at = len(text) - max(overlap("\n" + _END_PARAMETER, text, begin), overlap(_END_PARAMETER, text, begin))
        self._add_arguments(_escaped(text[begin : self._at]))
        return False

    def _after(self) -> bool:
        mark = self._mark(_END_CALL, _FUNCTION, "<tool_call>")
        if mark == _END_CALL:
            self._back_to_content()
        elif mark:
            self._begun(mark)
        return bool(mark)

    def _cut(self, rest: str) -> None:
        if self._step == self._string:
            self._add_arguments(_escaped(rest))


def _inner(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")


def _escaped(text: str) -> str:
    try:
        return to_json(text)[1:-1]
    except ValueError:
        return to_json(text.encode("utf-8", "replace").decode())[1:-1]


def _types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON types of the argument; empty: any type."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    given = found.get("type") if isinstance(found, Mapping) else None
    return frozenset([given] if isinstance(given, str) else [kind for kind in given or () if isinstance(kind, str)])


def _as_json(text: str, types: frozenset[str]) -> str:
    bare = text.strip()
    try:
        value = _PYTHON[bare] if bare in _PYTHON else of_json(bare)
        if not types or _type_of(value) & types:
            return to_json(value)
    except ValueError:
        pass
    return f'"{_escaped(text)}"'


def _type_of(value: Any) -> frozenset[str]:
    if value is None or isinstance(value, bool):
        return frozenset(["null" if value is None else "boolean"])
    if isinstance(value, int | float):
        return frozenset(["number", "integer"] if value == int(value) else ["number"])
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return frozenset([names[type(value)]])
