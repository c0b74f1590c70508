"""What a template process is asked (template_process.py) and what it answers (template_sandbox.py)."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

UTF8_BYTES_MAX = 4
"Bytes that a character takes, at most."


class Request(TypedDict):
    source: str
    "The template. It travels with every request, so that a child that was just started needs nothing else."
    values: dict[str, Any] | None
    "What the template may use. None: only compile it."
    now: str
    "The local time in ISO format, for strftime_now."
    prompt_chars_max: int


Kind = Literal["ok", "raised", "syntax", "undefined", "forbidden", "too_long", "memory", "failed"]
Reply = tuple[Kind, Any]
"""What happened, and its words: the prompt (or the string constants) for ok; what the template said for raised, syntax and
undefined, which may repeat the chat; the name of the exception for failed."""
