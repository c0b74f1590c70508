"""What an answer is made of, and the socket for whoever takes it apart.

    text of a sequence  --Parser-->  Content("Let me look.")  Reasoning("I need the weather.")  ToolCallDelta(0, "weather", ...)

A parser sits between the detokenizer and the stop strings (api/generate/output.py). What it promises:

* Its state is a function of the text so far: the parts of "abc" are those of "a" then "bc", joined. So a replay, a preemption
  or another way to cut the stream changes nothing.
* Nothing is lost: what looks like a call and is none comes back as content.
* It takes time in proportion to the text, and holds back at most what could still become something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(slots=True)
class Content:
    text: str
    tokens: int = 0
    "How many tokens of the answer it accounts for. Given by output.py, as in all parts: a parser knows only text."


@dataclass(slots=True)
class Reasoning:
    text: str
    tokens: int = 0


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
    tokens: int = 0

    @property
    def is_whole(self) -> bool:
        """Its arguments are a JSON object. Those of a call that was cut off, or that the model wrote wrongly, are not."""
        return isinstance(self.parsed, dict)

    @property
    def parsed(self) -> Any:
        """The arguments, or None where they are no JSON."""
        try:
            return json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None


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


def join_parts(parts: list[Part], later: Sequence[Part]) -> None:
    """Puts `later` behind `parts`, in order. A part that goes on with the last one is merged into it, so an answer has the same
    parts however it was cut."""
    for part in later:
        last = parts[-1] if parts else None
        if isinstance(part, ToolCallDelta):
            if not isinstance(last, ToolCallDelta) or last.index != part.index:
                parts.append(part)
                continue
            last.arguments += part.arguments
        elif isinstance(last, Content | Reasoning) and type(last) is type(part):
            last.text += part.text
        else:
            parts.append(part)
            continue
        last.tokens += part.tokens
