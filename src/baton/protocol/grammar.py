"""The form of an answer, if a request prescribes one: a grammar, as text.

The worker holds a state per sequence, which is a function of the grammar and of the tokens after the prompt. So a sequence that
is preempted, replayed or handed over continues unchanged: the state is never sent.
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
    "Tokens that end the answer. They are allowed only where the text so far is complete."
    ends_late: bool = False
    "Whether the end tokens are allowed only where nothing else is: the client asked to ignore the end of text."


def grammar_bytes(grammar: Grammar | None) -> int:
    """Upper bound of the grammar's encoded size in bytes."""
    return 0 if grammar is None else 64 + 4 * len(grammar.text) + 5 * len(grammar.ends)
