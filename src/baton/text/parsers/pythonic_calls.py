"""Calls as Python: the format of Llama 3.2 and 4, if their template asks for it.

    [weather(city="Oslo", days=3), time_in(zone="UTC")]       at the start of an answer, or after <|python_start|>

An argument is emitted when it is complete. Values are Python's or JSON's literals (true, null); arguments have names. Nothing
is evaluated: literals are read from the syntax tree.
"""

from __future__ import annotations

import ast
import re
from typing import Any, Final

from baton.text.parsers.call_object import HELD_CHARS_MAX
from baton.text.parsers.text_calls import SPACE, NoCall, TextCalls, to_json

_NAME: Final = re.compile(r"[ \t\r\n]*([A-Za-z0-9_.:/-]{0,128})[ \t\r\n]*", re.ASCII)
_KEY: Final = re.compile(r"[ \t\r\n]*([A-Za-z0-9_]{0,128})[ \t\r\n]*", re.ASCII)
_PLAIN: Final = re.compile(r"""[^"'()\[\]{},\\]*""")
_IN_STRING: Final = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_WORDS: Final[dict[str, Any]] = {"true": True, "false": False, "null": None}
_DEPTH_MAX: Final = 64


class PythonicCalls(TextCalls):
    _scanned = 0
    "Number of scanned characters of the current value."
    _quote = ""
    _depth = 0

    def _may_begin(self, char: str) -> bool:
        return char == "["

    def _begun(self, mark: str) -> None:
        self._step = self._list

    def _list(self) -> bool:
        self._step = self._name if self._mark("[") else self._step
        return self._step == self._name

    def _name(self) -> bool:
        name = self._word(_NAME, "(")
        if name is None:
            return False
        self._start(name)
        self._step = self._argument
        return True

    def _word(self, pattern: re.Pattern[str], end: str) -> str | None:
        """Reads a word and the character after it."""
        found = pattern.match(self._text, self._at)
        assert found is not None
        if found.end() == len(self._text):
            if found.end() - self._begin > HELD_CHARS_MAX:
                raise NoCall
            return None
        if self._text[found.end()] != end or found.end() - self._begin > HELD_CHARS_MAX:
            raise NoCall
        self._at = found.end() + 1
        return found[1]

    def _argument(self) -> bool:
        rest = self._text[self._at :].lstrip(SPACE)
        if rest.startswith(")"):
            self._at = len(self._text) - len(rest) + 1
            self._end()
            return True
        key = self._word(_KEY, "=")
        if key is None:
            return False
        if not key.isidentifier():
            raise NoCall
        self._member(key)
        self._step, self._scanned, self._quote, self._depth = self._value, 0, "", 0
        return True

    def _value(self) -> bool:
        """Read an argument up to its comma or closing parenthesis. False: more text is needed."""
        text, limit = self._text, self._at + HELD_CHARS_MAX
        at = self._at + self._scanned
        while at < min(len(text), limit):
            char = text[at]
            if char == "\\":
                if at + 1 >= len(text):
                    break  # the escaped character has not arrived yet
                at += 2
            elif self._quote:
                self._quote, at = (
                    ("", at + 1) if char == self._quote else (self._quote, _end(_IN_STRING[self._quote], text, at))
                )
            elif char in "\"'":
                self._quote, at = char, at + 1
            elif char in ",)" and not self._depth:
                return self._whole(text[self._at : at], at)
            elif char in "()[]{},":
                self._depth += (char in "([{") - (char in ")]}")
                at += 1
            else:
                at = _end(_PLAIN, text, at)
        self._scanned = at - self._at
        if len(text) >= limit:
            raise NoCall
        return False

    def _whole(self, text: str, at: int) -> bool:
        try:
            value = to_json(_literal(ast.parse(text.strip(), mode="eval").body, 0))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise NoCall from None
        closes = self._text[at] == ")"
        self._at = at if closes else at + 1
        self._add_arguments(value)
        self._step = self._argument
        return True

    def _after(self) -> bool:
        mark = self._mark(",", "]", *([self._style.closes] if self._style.closes else []))
        if mark == ",":
            self._step = self._name
        elif mark == "]":
            self._begin = self._at
        elif mark:
            self._back_to_content()
        return bool(mark)

    def _is_tail(self, rest: str) -> bool:
        return rest == "" or self._style.closes.startswith(rest)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _literal(node: ast.expr, depth: int) -> Any:
    """The value of a literal. Raises ValueError for anything but a literal that JSON has."""
    if depth > _DEPTH_MAX:
        raise ValueError("too deep")
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)) if not isinstance(value, bool):
            return -value
        case ast.List(elts=entries) | ast.Tuple(elts=entries):
            return [_literal(entry, depth + 1) for entry in entries]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _literal(value, depth + 1) for key, value in zip(keys, values, strict=True)}
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as key):
            return key
    raise ValueError("not a key")
