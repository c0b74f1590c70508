"""Splits reasoning from the rest of an answer: <think>I need ...</think>The answer is 4.

    START   white space, then the opening tag, or none
    THINK   up to the closing tag, or the end of the answer
    AFTER   white space after the reasoning, which is dropped
    REST    parsed by another parser, e.g. for tool calls

A template may open the reasoning in the prompt (DeepSeek's, Qwen's thinking models): then an answer begins inside it, and a tag
that some models repeat is dropped. A tag within an answer is text: a model may write about tags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from baton.text.parsers.base import Parser, Part, Reasoning

_SPACE: Final = " \t\r\n"
_SPACE_HELD_MAX: Final = 16
"Maximum of white space before a tag. More white space would have to be held back, and a text may be full of it."


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkStyle:
    name: str
    start: str
    end: str
    always_open: bool = False
    "Whether answers begin inside the reasoning, however the prompt ends."


class ThinkParser:
    def __init__(self, style: ThinkStyle, rest: Parser, *, is_open: bool, shown: bool = True) -> None:
        """`is_open`: the prompt has begun the reasoning. `shown`: reasoning is sent."""
        self._style = style
        self._rest = rest
        self._shown = shown
        self._open = is_open or style.always_open
        self._state = "start"
        self._tail = ""
        self._blank = True
        "Whether only white space of the reasoning has come so far."

    @property
    def in_reasoning(self) -> bool:
        return self._state == "think" or (self._state == "start" and self._open)

    @property
    def done(self) -> bool:
        return self._rest.done

    def feed(self, text: str) -> list[Part]:
        if self._state == "rest":
            return self._rest.feed(text)
        text, self._tail, parts = self._tail + text, "", list[Part]()
        if self._state == "start":
            text = self._start(text)
        if self._state == "think":
            text = self._think(text, parts)
        if self._state == "after" and (text := text.lstrip(_SPACE)):
            self._state = "rest"
        return [*parts, *self._rest.feed(text)] if self._state == "rest" and text else parts

    def flush(self) -> list[Part]:
        parts: list[Part] = []
        if self.in_reasoning:
            self._emit(self._tail.rstrip(_SPACE), parts)
        elif self._tail:
            parts += self._rest.feed(self._tail)
        return [*parts, *self._rest.flush()]

    def _start(self, text: str) -> str:
        begun, tag = text.lstrip(_SPACE), self._style.start
        if len(text) - len(begun) <= _SPACE_HELD_MAX:
            if begun.startswith(tag):
                self._state = "think"
                return begun[len(tag) :]
            if not begun or tag.startswith(begun):
                self._tail = text
                return ""
        self._state = "think" if self._open else "rest"
        return text

    def _think(self, text: str, parts: list[Part]) -> str:
        end = text.find(self._style.end)
        if end >= 0:
            self._emit(text[: self._before_space(text, end)], parts)
            self._state = "after"
            return text[end + len(self._style.end) :]
        held = next((n for n in range(min(len(self._style.end) - 1, len(text)), 0, -1) if self._may_begin(text, n)), 0)
        place = self._before_space(text, len(text) - held)
        self._emit(text[:place], parts)
        self._tail = text[place:]
        return ""

    def _may_begin(self, text: str, size: int) -> bool:
        return text.endswith(self._style.end[:size])

    def _before_space(self, text: str, end: int) -> int:
        least = max(0, end - _SPACE_HELD_MAX)
        while end > least and text[end - 1] in _SPACE:
            end -= 1
        return end

    def _emit(self, text: str, parts: list[Part]) -> None:
        if self._blank:
            text = text.lstrip(_SPACE)
            self._blank = not text
        if text and self._shown:
            parts.append(Reasoning(text))
