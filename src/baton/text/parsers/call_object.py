"""Parses one tool call in JSON, {"name": "weather", "arguments": {"city": "Oslo"}}, in pieces of any size.

    held        until it is certain that this is a call: the name is that of a tool, and the arguments begin
    streamed    from there on the text of the arguments is emitted as it arrives

Text that turns out not to be a call is returned (`held`). Invalid JSON inside the arguments ends the call there: sent text
cannot be withdrawn.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, Final

from baton.text.clean import has_lone_surrogate
from baton.text.parsers.base import ToolCallDelta
from baton.text.parsers.json_scan import JsonScan

HELD_CHARS_MAX: Final = 64 * 1024
"""Characters after which text that is not certain to be a call counts as none."""
_KEYS_MAX: Final = 16
_NAMES: Final = ("name", "function")
_ARGUMENTS: Final = ("arguments", "parameters")
_OTHERS: Final = ("type", "id")


class CallObject:
    def __init__(self, tools: Collection[str], index: int, *, known_keys_only: bool, name: str | None = None) -> None:
        """`name`: the name is already known, and the object is only the arguments."""
        self._scan = JsonScan()
        self._tools = tools
        self._index = index
        self._known_keys_only = known_keys_only
        self._name = name
        self._alone = name is not None
        self._arguments: str | None = None
        "Arguments, if they came before the name, or as a string."
        self._key = ""
        self._keys = 0
        self._held: list[str] = []
        self._held_chars = 0
        self._begin = 0
        "Start of the current key or value in the held text."
        self._mode = "held"
        self.deltas: list[ToolCallDelta] = []
        "New deltas; the caller clears the list."
        self.started = False
        self.done = False
        self.broken = False

    @property
    def held(self) -> str:
        return "".join(self._held)

    def feed(self, text: str, at: int) -> int:
        """Reads from text[at] until `done`, `broken` or the end of the text; returns the position after it."""
        if self._alone and not self.started:
            self._start("")
            self._mode = "arguments"
        while not (self.done or self.broken):
            end = len(text) if self.started else at + HELD_CHARS_MAX - self._held_chars
            event, to = self._scan.step(text if end >= len(text) else text[:end], at)
            self._take(text[at:to])
            at = to
            if event is None:
                self.broken = end < len(text)
                break
            if event == "broken":
                self.broken = True
            elif event == "end":
                self._end()
            elif not self._alone:
                self._at(event, text[at : at + 1])
        return at

    def _take(self, text: str) -> None:
        if self._mode == "arguments":
            if text:
                self.deltas.append(ToolCallDelta(self._index, arguments=text))
        elif not self.started:
            self._held.append(text)
            self._held_chars += len(text)

    def _at(self, event: str, char: str) -> None:
        if event == "key":
            self._keys += 1
            self.broken = self._keys > _KEYS_MAX
            self._begin = self._held_chars - 1  # with its quotation mark
        elif event == "value":
            self._key = str(_loaded(self.held[self._begin :].rstrip(": \t\r\n"))) if not self.started else ""
            self._begin = self._held_chars
            self._value_begins(char)
        elif event == "value_end":
            self._value_ended()

    def _value_begins(self, char: str) -> None:
        if self.started:
            return  # values after the arguments are ignored
        if self._key in _ARGUMENTS:
            if self._arguments is not None or char not in '{"n':
                self.broken = True
            elif char == "{" and self._name is not None:
                self._start("")
                self._mode = "arguments"
        elif self._key in _NAMES:
            self.broken = self._name is not None or char != '"'
        elif self._known_keys_only and self._key not in _OTHERS:
            self.broken = True

    def _value_ended(self) -> None:
        self._mode = "held"
        if self.started:
            return
        if self._key in _NAMES:
            name = _loaded(self.held[self._begin :])
            self._name = name if isinstance(name, str) else None
            self.broken = self._name not in self._tools
        elif self._key in _ARGUMENTS:
            self._arguments = _arguments_in(self.held[self._begin :])
            self.broken = self._arguments is None

    def _end(self) -> None:
        self.done = True
        if not self.started and self._name is None:
            self.done, self.broken = False, True
        elif not self.started:
            self._start(self._arguments or "{}")

    def _start(self, arguments: str) -> None:
        self.started = True
        self._held.clear()
        self.deltas.append(ToolCallDelta(self._index, name=self._name, arguments=arguments))


def _arguments_in(text: str) -> str | None:
    """Arguments as text: an object unchanged; null means none; a string contains the object, as some models write it."""
    if text.startswith("{"):
        return text
    value = _loaded(text)
    if value is None:
        return "{}"
    inside = _loaded(value) if isinstance(value, str) and not has_lone_surrogate(value) else None
    return str(value) if isinstance(inside, dict) else None


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
