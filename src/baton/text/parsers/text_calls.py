"""Base class of call formats that are not JSON. A subclass reads a call unit by unit: a mark, a name, a value.

    Let me look.  <function=weather>  <parameter=city>  Oslo  </parameter>  </function>
    content       begins: from here on text is held until the call is certain; then it is emitted unit by unit

A step reads a unit from `_at` on and moves `_at`, or needs more text (returns False), or finds that this is not a call (raises
NoCall): then the text held since `_begin` is content; if the name is already sent, only the text after it is. Nothing depends
on how the text is split: a unit is read only when it is complete.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from baton.text.clean import has_lone_surrogate
from baton.text.parsers.base import Content, Part, ToolCallDelta
from baton.text.parsers.call_object import HELD_CHARS_MAX
from baton.text.parsers.calls import CallStyle, first_mark

SPACE: Final = " \t\r\n"
Schemas = Mapping[str, Mapping[str, Any]]
"""Schema of the arguments, by name of the tool."""


class NoCall(Exception):
    """The text does not continue a call."""


class TextCalls(ABC):
    in_reasoning = False

    def __init__(self, style: CallStyle, tools: Schemas, *, calls_max: int) -> None:
        self._style = style
        self._tools = tools
        self._calls_max = calls_max
        self._calls = 0
        "Number of complete calls."
        self._in_call = False
        "Whether the name of another call has been emitted."
        self._members = 0
        "Number of emitted arguments of that call."
        self._text = ""
        self._begin = 0
        self._at = 0
        self._gap = True
        "Whether only white space has come since the start, or since the last call."
        self._step = self._content
        self._parts: list[Part] = []
        self.done = False

    def feed(self, text: str) -> list[Part]:
        self._text, self._at, self._begin = self._text[self._begin :] + text, self._at - self._begin, 0
        while not self.done:
            try:
                if not self._step():
                    break
            except NoCall:
                self._no_call()
        parts, self._parts = self._parts, []
        return parts

    def flush(self) -> list[Part]:
        rest = self._text[self._begin :]
        if self._in_call:
            self._cut(rest)
        elif self._calls and self._gap and self._is_tail(rest.strip(SPACE)):
            pass  # white space and half a closing mark after the last call belong to it
        else:
            self._add_text(rest)
        return self._parts

    # Interface of a format

    @abstractmethod
    def _begun(self, mark: str) -> None:
        """Called after an opening mark, or at the start of a bare call: sets the next step."""

    @abstractmethod
    def _after(self) -> bool:
        """Step after a call."""

    def _may_begin(self, char: str) -> bool:
        """Whether a bare call may begin with this character, at the start of an answer."""
        return False

    def _cut(self, rest: str) -> None:
        """Called if the answer ends inside a call: emits the certain part of `rest`. By default an incomplete unit is
        dropped."""
        del rest

    def _is_tail(self, rest: str) -> bool:
        return any(mark.startswith(rest) for mark in self._style.marks)

    # Steps and their helpers

    def _content(self) -> bool:
        text, begin = self._text, self._begin
        if self._gap and not self._calls:
            bare = text[begin:].lstrip(SPACE)
            if bare and self._may_begin(bare[0]):
                self._at = len(text) - len(bare)
                self._begun("")
                return True
        place, mark = first_mark(self._style.opens, text, self._at)
        if not self._gap or text[begin:place].strip(SPACE):
            self._add_text(text[begin:place])
            self._gap, self._begin = False, place
        self._at = place + len(mark)
        if mark:
            self._begun(mark)
        return bool(mark)

    def _mark(self, *marks: str) -> str:
        """Reads white space and one of the marks; "" if more text is needed."""
        text = self._text
        while self._at < len(text) and text[self._at] in SPACE:
            self._at += 1
        for mark in marks:
            if text.startswith(mark, self._at):
                self._at += len(mark)
                return mark
        rest = text[self._at :]
        if self._at - self._begin > HELD_CHARS_MAX or not any(mark.startswith(rest) for mark in marks):
            raise NoCall
        return ""

    def _until(self, mark: str, chars_max: int = HELD_CHARS_MAX) -> str | None:
        """Reads up to and including the mark, and returns the text before it."""
        end = self._at + chars_max
        place = self._text.find(mark, self._at, end + len(mark))
        if place < 0:
            if len(self._text) >= end + len(mark):
                raise NoCall
            return None
        found, self._at = self._text[self._at : place], place + len(mark)
        return found

    # State changes

    def _start(self, name: str) -> None:
        """Begin a call of this tool, which is certain. Its arguments are an object."""
        if name not in self._tools:
            raise NoCall
        self._in_call, self._members, self._gap = True, 0, True
        self._begin = self._at
        self._parts.append(ToolCallDelta(self._calls, name=name, arguments="{"))

    def _member(self, key: str) -> None:
        self._add_arguments((", " if self._members else "") + to_json(key) + ": ")
        self._members += 1

    def _add_arguments(self, arguments: str) -> None:
        """Append a piece of the present call's arguments."""
        if arguments:
            self._parts.append(ToolCallDelta(self._calls, arguments=arguments))
        self._begin = self._at

    def _end(self) -> None:
        self._add_arguments("}")
        self._ended()

    def _ended(self) -> None:
        self._calls += 1
        self._in_call, self._gap = False, True
        self._step, self._begin = self._after, self._at
        self.done = self._calls >= self._calls_max

    def _back_to_content(self) -> None:
        """Return to content: text read since the last call belongs to that call."""
        self._step, self._begin = self._content, self._at

    def _no_call(self) -> None:
        if self._in_call:
            self._calls += 1
            self.done = self._calls >= self._calls_max
        if self._in_call or self._step != self._after:
            at = max(self._at, self._begin + 1) if not self._in_call else self._begin
            self._add_text(self._text[self._begin : at])
            self._begin, self._gap = at, False
        self._at, self._in_call, self._step = self._begin, False, self._content

    def _add_text(self, text: str) -> None:
        if text:
            self._parts.append(Content(text))


def to_json(value: Any) -> str:
    """The value as JSON. Raises ValueError for values that JSON or a client could not read."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if has_lone_surrogate(text):
        raise ValueError("half a character")
    return text


def of_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for anything but strict JSON."""

    def refuse(word: str) -> Any:
        raise ValueError(word)

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("too deep") from None
