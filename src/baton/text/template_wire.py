"""Requests to a template process (template_process.py) and its replies (template_sandbox.py)."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

UTF8_BYTES_MAX = 4
"Maximum of bytes per character of text."


class Request(TypedDict):
    source: str
    "The template, sent with every request, so that a new child needs no other state."
    values: dict[str, Any] | None
    "Variables of the template. None: only compile it."
    now: str
    "Local time in ISO format, for strftime_now."
    prompt_chars_max: int


Kind = Literal["ok", "raised", "syntax", "undefined", "forbidden", "too_long", "memory", "failed"]
Reply = tuple[Kind, Any]
"""The result and its text: the prompt (or the string constants) for ok; the template's message for raised, syntax and
undefined, which may contain the chat; the name of the exception for failed."""
