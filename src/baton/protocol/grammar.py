"""What an answer must look like, where a request says so: a grammar, as text.

Whoever computes holds a state for each sequence, which is a function of the grammar and of the tokens after the prompt. So a
sequence that is preempted, replayed or handed over goes on as if nothing had happened: nothing of the state travels.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "gbnf", "lark"]
"""
json_object   any JSON object; the text is empty
json_schema   a JSON value that the schema (JSON text) allows
regex         all of the answer matches it
choice        one of the strings in a JSON list
gbnf          llama.cpp's way to write a grammar; vLLM's "EBNF" is one
lark          Lark's, as llguidance reads it
"""


class Grammar(Struct, frozen=True, omit_defaults=True):
    kind: GrammarKind
    text: str = ""
    ends: tuple[Annotated[int, Meta(ge=0, le=2**31 - 1)], ...] = ()
    "Tokens that end the answer. They are allowed where the text so far is a whole one, and nowhere else."
    ends_late: bool = False
    "They are allowed only where nothing else is: the client asked to ignore the end of text."


def grammar_bytes(grammar: Grammar | None) -> int:
    """At most so many bytes on a wire."""
    return 0 if grammar is None else 64 + 4 * len(grammar.text) + 5 * len(grammar.ends)
