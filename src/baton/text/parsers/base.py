"""The parts of an answer, and the interface of parsers.

    text of a sequence  --Parser-->  Content("Let me look.")  Reasoning("I need the weather.")  ToolCallDelta(0, "weather", ...)

A parser sits between the detokenizer and the stop strings (api/generate/output.py). Its contract:

* Its state is a function of the text so far: the parts of "abc" are those of "a" then "bc", joined. So a replay, a preemption
  or another split of the stream changes nothing.
* Nothing is lost: text that looks like a call but is none becomes content.
* It takes linear time, and holds back only text whose kind is still open.
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
    "Number of the answer's tokens in this part. Set by output.py, as in all parts: a parser sees only text."


@dataclass(slots=True)
class Reasoning:
    text: str
    tokens: int = 0


@dataclass(slots=True)
class ToolCallDelta:
    """New text of one call. The first delta of a call has name and id; later ones only text of the arguments."""

    index: int
    "Index of the call in its choice, from 0."
    id: str | None = None
    "Id of the call, set by output.py: a parser sees only text."
    name: str | None = None
    arguments: str = ""
    "New text of the JSON object."
    tokens: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are a JSON object. Those of a truncated or malformed call are not."""
        return isinstance(self.parsed, dict)

    @property
    def parsed(self) -> Any:
        """The arguments, or None if they are not JSON."""
        try:
            return json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None


Part = Content | Reasoning | ToolCallDelta


class Parser(Protocol):
    """Parser of one sequence."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""

    @property
    def done(self) -> bool:
        """Whether the answer ends here. `feed` must not be called again then."""

    def feed(self, text: str) -> list[Part]:
        """Read more text. Returns the parts that are certain with this text."""

    def flush(self) -> list[Part]:
        """Return the rest at the end of the sequence. `feed` must not be called again."""


class PlainParser:
    """Parser without formats: all text is content."""

    in_reasoning = False
    done = False

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def flush(self) -> list[Part]:
        return []


MakeParser = Callable[[], Parser]
"""Makes a parser for each sequence of a request."""


def join_parts(parts: list[Part], later: Sequence[Part]) -> None:
    """Appends `later` to `parts`. A part that continues the last one is merged into it, so an answer has the same parts however
    it was split."""
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
