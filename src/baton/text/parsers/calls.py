"""Finds the tool calls in an answer. One state machine for all JSON formats; a CallStyle describes the model's format.

    Let me look.\\n<tool_call>\\n{"name": "weather", "arguments": {"city": "Oslo"}}\\n</tool_call>
    CONTENT       OPEN          OBJECT                                            NEXT

    CONTENT  looks for an opening mark, or, in a style with bare calls, for JSON at the start
    OPEN     a bracket of a list, an object, or (Mistral) a name is expected
    NAME     a name before its arguments
    OBJECT   call_object.py reads
    NEXT     after a call: a separator, the closing mark, another call, or content again

A suspected call that is none becomes content, from its opening mark to the character that does not fit; from there on the text
is read as content. White space around calls is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from baton.text.parsers.base import Content, Part
from baton.text.parsers.call_object import HELD_CHARS_MAX, CallObject

_SPACE: Final = " \t\r\n"
_NAME_CHARS_MAX: Final = 512
_NAME: Final = re.compile(r"([^\s\[\]{}]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class CallStyle:
    """The format in which a family of models writes calls."""

    name: str
    opens: tuple[str, ...] = ()
    "Marks before a call, or before a list of calls."
    closes: str = ""
    "Mark after a call, if any."
    bare: bool = False
    "Whether JSON at the start of an answer may be a call without any mark. Then it has only the keys of a call."
    name_first: bool = False
    "Whether the name may come before the object, which is then only the arguments."
    form: Literal["json", "xml", "python", "deepseek"] = "json"
    "The parser: this file, or xml_calls.py, pythonic_calls.py, deepseek_calls.py."
    others: tuple[str, ...] = ()
    "Further marks inside of calls."
    shown_by: tuple[str, ...] = ()
    "Texts in a template that show this style. Empty: one of the opening marks."

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens."""
        return (*self.opens, self.closes, *self.others)


class CallsParser:
    in_reasoning = False

    def __init__(self, style: CallStyle, tools: Collection[str], *, calls_max: int) -> None:
        """`tools`: the callable names. After `calls_max` calls the answer is `done`."""
        self._style = style
        self._tools = tools
        self._calls_max = calls_max
        self._calls = 0
        self._state = self._content
        self._tail = ""
        "Unprocessed text: at most the beginning of a mark."
        self._gap: list[str] | None = []
        "White space since the start or the last call, if nothing else came."
        self._held: list[str] = []
        "Text that becomes content if no call follows."
        self._held_chars = 0
        self._mark_chars = 0
        self._in_list = False
        self._object: CallObject | None = None
        self._parts: list[Part] = []
        self.done = False

    def feed(self, text: str) -> list[Part]:
        text, self._tail, at = self._tail + text, "", 0
        while at < len(text) and not self.done:
            at = self._state(text, at)
        parts, self._parts = self._parts, []
        return parts

    def flush(self) -> list[Part]:
        if self._object is not None and not self._object.started:
            self._held.append(self._object.held)
        held, tail = "".join(self._held), self._tail
        if self._state != self._next:
            held += tail
        else:  # brackets, white space and half a closing mark after the last call belong to it
            held = (held if held.strip(_SPACE + "]") else "") + ("" if self._style.closes.startswith(tail) else tail)
        if self._gap is not None and not held and not self._calls:
            held, self._gap = "".join(self._gap), None
        self._emit_content(held)
        return self._parts

    # States: each reads text from `at` on and returns the position where the next one reads.

    def _content(self, text: str, at: int) -> int:
        """Read content up to the next mark that opens calls. Returns the next place in `text`; the rest may be the begin of a
        mark."""
        if self._gap is not None:
            begin = at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._gap.append(text[begin:at])
            if at == len(text):
                return at
            if self._style.bare and not self._calls and text[at] in "{[":
                self._opened("")
                return at
        place, mark = first_mark(self._style.opens, text, at)
        if mark:
            self._emit_content(text[at:place])
            self._opened(mark)
            return place + len(mark)
        self._emit_content(text[at:place])
        self._tail = text[place:]
        return len(text)

    def _open(self, text: str, at: int) -> int:
        char = text[at]
        if char in _SPACE or (char == "[" and not self._in_list):
            self._in_list = self._in_list or char == "["
            return self._hold(char, at)
        if char == "{":
            self._object = CallObject(self._tools, self._calls, known_keys_only=self._style.bare)
            self._state = self._reading
            return at
        if self._style.name_first and char.isascii() and (char.isalnum() or char == "_") and not self._in_list:
            self._state = self._naming
            return at
        return self._no_call(at)

    def _naming(self, text: str, at: int) -> int:
        """Read a name in Mistral's forms: name{...}, name[ARGS]{...}, name[CALL_ID]x[ARGS]{...}."""
        end = text.find("{", at)
        room = _NAME_CHARS_MAX - self._held_chars
        part = text[at : end if end >= 0 else len(text)][: max(room, 0)]
        self._held.append(part)
        self._held_chars += len(part)
        if at + len(part) != end:
            return self._no_call(at + len(part)) if at + len(part) < len(text) else len(text)
        found = _NAME.fullmatch("".join(self._held)[self._mark_chars :].strip())
        if found is None or found[1] not in self._tools:
            return self._no_call(end)
        self._object = CallObject(self._tools, self._calls, known_keys_only=False, name=found[1])
        self._state = self._reading
        return end

    def _reading(self, text: str, at: int) -> int:
        call = self._object
        assert call is not None
        at = call.feed(text, at)
        if call.started:
            self._gap, self._held = None, []
            self._parts += call.deltas
            call.deltas = []
        if call.broken:
            self._calls += call.started
            self.done = self._calls >= self._calls_max
            return self._no_call(at)
        if call.done:
            self._calls += 1
            self._object = None
            self._state, self._held, self._held_chars, self._gap = self._next, [], 0, None
            self.done = self._calls >= self._calls_max
        return at

    def _next(self, text: str, at: int) -> int:
        """Read between two calls: another call, the closing mark, or content again. Returns the next place in `text`."""
        char = text[at]
        closes = self._style.closes
        if char in _SPACE or char in ",;" or (char == "]" and self._in_list):
            self._in_list = self._in_list and char != "]"
            return self._hold(char, at)
        if char == "{":
            self._state = self._open
            return at
        for mark in (*self._style.opens, *((closes,) if closes else ())):
            if text.startswith(mark, at):
                if mark == closes:
                    self._back_to_content("")
                else:
                    self._opened(mark)
                return at + len(mark)
        if any(mark.startswith(text[at:]) for mark in (*self._style.opens, closes)):
            self._tail = text[at:]
            return len(text)
        self._back_to_content("".join(self._held))
        return at

    # State changes

    def _opened(self, mark: str) -> None:
        self._state, self._in_list = self._open, False
        self._held, self._held_chars, self._mark_chars = [mark], len(mark), len(mark)

    def _hold(self, char: str, at: int) -> int:
        self._held.append(char)
        self._held_chars += 1
        return at + 1 if self._held_chars <= HELD_CHARS_MAX else self._no_call(at + 1)

    def _no_call(self, at: int) -> int:
        """Return to content: the held text is content, and so is the text from text[at] on, unless another call begins
        there."""
        held = "".join(self._held) + (self._object.held if self._object is not None else "")
        self._object = None
        self._emit_content(held)
        self._state, self._held, self._held_chars, self._gap = self._content, [], 0, None
        return at

    def _back_to_content(self, held: str) -> None:
        self._state, self._held, self._held_chars, self._in_list = self._content, [], 0, False
        self._gap = [held]

    def _emit_content(self, text: str) -> None:
        if self._gap is not None and text:
            text, self._gap = "".join(self._gap) + text, None
        if text:
            self._parts.append(Content(text))


def first_mark(marks: tuple[str, ...], text: str, at: int) -> tuple[int, str]:
    """Position of the first mark, and the mark; or the position where an incomplete mark may begin, and ""."""
    found = [(place, mark) for mark in marks if (place := text.find(mark, at)) >= 0]
    if found:
        return min(found)
    return len(text) - max((overlap(mark, text, at) for mark in marks), default=0), ""


def overlap(mark: str, text: str, at: int) -> int:
    """Number of characters at the end of the text that begin the mark."""
    for size in range(min(len(mark) - 1, len(text) - at), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
