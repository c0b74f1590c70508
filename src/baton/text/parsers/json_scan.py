r"""Scans one JSON value incrementally and reports where it ends, or where it is invalid.

    {"name": "weather", "arguments": {"city": "Oslo"}}
    |key  ' |value    ' |key        ' |value         '|end

Events are reported for the outermost object only (for a bare value only the end), with the position of the next character: the
caller slices values out of the text itself. Every character is read once; the state is a few fields and the bounded stack of
open brackets. Exactly JSON: no trailing commas, no single quotes, no NaN.
"""

from __future__ import annotations

import re
from typing import Final, Literal

Event = Literal["key", "value", "value_end", "end", "broken", None]
"""Events of the scan. key: its first quotation mark is before the position. value: begins there. value_end, end: ended before
it. broken: the character there is invalid. None: all of the text is read."""

DEPTH_MAX: Final = 64
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE: Final = frozenset(" \t\r\n")
_DIGITS: Final = frozenset("0123456789")
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_LITERALS: Final = {"t": "rue", "f": "alse", "n": "ull"}
_CLOSER: Final = {"{": "}", "[": "]"}

# Transitions of a number, by state. Upper-case states may be the last.
_NUMBER: Final[dict[str, tuple[tuple[frozenset[str], str], ...]]] = {
    "minus": ((frozenset("0"), "ZERO"), (_DIGITS, "WHOLE")),
    "ZERO": ((frozenset("."), "point"), (frozenset("eE"), "e")),
    "WHOLE": ((_DIGITS, "WHOLE"), (frozenset("."), "point"), (frozenset("eE"), "e")),
    "point": ((_DIGITS, "FRACTION"),),
    "FRACTION": ((_DIGITS, "FRACTION"), (frozenset("eE"), "e")),
    "e": ((frozenset("+-"), "sign"), (_DIGITS, "EXPONENT")),
    "sign": ((_DIGITS, "EXPONENT"),),
    "EXPONENT": ((_DIGITS, "EXPONENT"),),
}


class JsonScan:
    """Scan of one value, which must be an object, a list or a string: the end of a bare number is not detectable."""

    def __init__(self) -> None:
        self._state = "begin"
        self._stack: list[str] = []
        self._is_key = False
        self._left = ""
        "The rest of a literal, or the state of a number."
        self._hex = 0

    def step(self, text: str, at: int) -> tuple[Event, int]:
        """Scans from text[at] to the next event."""
        size = len(text)
        while at < size:
            event, at = self._one(text, at)
            if event is not None:
                return event, at
        return None, at

    def _one(self, text: str, at: int) -> tuple[Event, int]:
        state, char = self._state, text[at]
        if state == "string":
            return self._string(text, at)
        if state == "number":
            return self._number(char, at)
        if state in ("escape", "hex"):
            return self._escaped(char, at)
        if state == "literal":
            if char != self._left[0]:
                return "broken", at
            self._left = self._left[1:]
            return self._ended(at + 1) if not self._left else (None, at + 1)
        if char in _SPACE and state != "begin":
            return None, at + 1
        return self._structure(state, char, at)

    def _structure(self, state: str, char: str, at: int) -> tuple[Event, int]:
        """Consume a character outside of strings and literals. Returns the event, if any, and the next place."""
        outer = len(self._stack) == 1 and self._stack[0] == "{"
        if state == "begin":
            return self._value(char, at) if char in '{["' else ("broken", at)
        if state in ("first_key", "next_key"):
            if char == '"':
                self._state, self._is_key = "string", True
                return ("key" if outer else None), at + 1
            return self._closed(char, at) if state == "first_key" else ("broken", at)
        if state == "colon":
            self._state = "value"
            return (None, at + 1) if char == ":" else ("broken", at)
        if state == "value" and outer:
            self._state = "reported_value"
            return "value", at
        if state in ("value", "reported_value"):
            return self._value(char, at)
        if state == "first":
            return self._closed(char, at) if char == "]" else self._value(char, at)
        if char == ",":  # after a value
            self._state = "next_key" if self._stack[-1] == "{" else "value"
            return None, at + 1
        return self._closed(char, at)

    def _value(self, char: str, at: int) -> tuple[Event, int]:
        if char in "{[":
            if len(self._stack) == DEPTH_MAX:
                return "broken", at
            self._stack.append(char)
            self._state = "first_key" if char == "{" else "first"
        elif char == '"':
            self._state, self._is_key = "string", False
        elif char in _LITERALS:
            self._state, self._left = "literal", _LITERALS[char]
        elif char == "-" or char in _DIGITS:
            self._state, self._left = "number", {"-": "minus", "0": "ZERO"}.get(char, "WHOLE")
        else:
            return "broken", at
        return None, at + 1

    def _string(self, text: str, at: int) -> tuple[Event, int]:
        found = _PLAIN.match(text, at)
        at = found.end() if found else at
        if at == len(text):
            return None, at
        if text[at] == '"':
            if self._is_key:
                self._state = "colon"
                return None, at + 1
            return self._ended(at + 1)
        if text[at] == "\\":
            self._state = "escape"
            return None, at + 1
        return "broken", at

    def _escaped(self, char: str, at: int) -> tuple[Event, int]:
        if self._state == "hex":
            self._hex -= 1
            self._state = "hex" if self._hex else "string"
            return (None, at + 1) if char in _HEX else ("broken", at)
        self._state, self._hex = ("hex", 4) if char == "u" else ("string", 0)
        return (None, at + 1) if char in '"\\/bfnrtu' else ("broken", at)

    def _number(self, char: str, at: int) -> tuple[Event, int]:
        for characters, state in _NUMBER[self._left]:
            if char in characters:
                self._left = state
                return None, at + 1
        return self._ended(at) if self._left.isupper() else ("broken", at)

    def _closed(self, char: str, at: int) -> tuple[Event, int]:
        if char != _CLOSER[self._stack[-1]]:
            return "broken", at
        self._stack.pop()
        return self._ended(at + 1)

    def _ended(self, at: int) -> tuple[Event, int]:
        """Complete a value."""
        self._state = "after"
        if not self._stack:
            return "end", at
        return ("value_end" if len(self._stack) == 1 and self._stack[0] == "{" else None), at
