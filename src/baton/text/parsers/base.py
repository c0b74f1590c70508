"""What an answer is made of, and the socket for whoever takes it apart.

    text of a sequence  --Parser-->  Content("Let me look.")  Reasoning("I need the weather.")  ToolCallDelta(0, "weather", ...)

A parser sits between the detokenizer and the stop strings (api/generate/output.py). What it promises:

* Its state is a function of the text so far: the parts of "abc" are those of "a" then "bc", joined. So a replay, a preemption
  or another way to cut the stream changes nothing.
* Nothing is lost: what looks like a call and is none comes back as content.
* It takes time in proportion to the text, and holds back at most what could still become something else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(slots=True)
class ToolCallDelta:
    """What is new of one call. The first of a call has its name, and an id; later ones only text of the arguments."""

    index: int
    "Which call of this choice, from 0."
    id: str | None = None
    "Given by output.py: a parser knows only text."
    name: str | None = None
    arguments: str = ""
    "New text, of a JSON object."


Part = Content | Reasoning | ToolCallDelta


class Parser(Protocol):
    """One a sequence."""

    @property
    def in_reasoning(self) -> bool:
        """The text so far ends inside a thought."""

    @property
    def done(self) -> bool:
        """Nothing more is wanted: the answer ends here. Nothing is fed after it."""

    def feed(self, text: str) -> list[Part]:
        """The parts that this text makes certain."""

    def flush(self) -> list[Part]:
        """The rest at the end of the sequence. Nothing is fed after it."""


class PlainParser:
    """All is content."""

    in_reasoning = False
    done = False

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        return []


MakeParser = Callable[[], Parser]
"""One for each sequence of a request."""


def join_calls(calls: list[ToolCallDelta], later: list[ToolCallDelta]) -> None:
    """Puts `later` behind `calls`; what goes on with the last call becomes part of it."""
    for delta in later:
        if calls and calls[-1].index == delta.index:
            calls[-1].arguments += delta.arguments
        else:
            calls.append(delta)
