"""Converts every kind of grammar to llguidance's Lark.

The front calls `canonical`: GBNF and choices become Lark, so that a worker never parses them. A matcher is built from
`lark_of`.

    no_forcing          forced text is still tokenised by the model. Otherwise llguidance would tokenise it by calling back into
                        Python, which takes a second per megabyte. The line is the last one, because the last of several counts,
                        and a client may have written one
    whitespace_pattern  between the parts of a JSON value: one space, or one line break with indentation. With any amount
                        allowed, a small model may write spaces until max_tokens
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from msgspec import structs

from baton.errors import BadGrammar
from baton.protocol.grammar import Grammar

_TAIL: Final = '\n%llguidance {"no_forcing": true}\n'
_WHITESPACE: Final = r"[ ]|\n[ ]{0,64}|\n\t{0,16}"
_JSON_OPTIONS: Final = {
    "whitespace_flexible": True,
    "whitespace_pattern": _WHITESPACE,
    "item_separator": ",",
    "key_separator": ":",
    "lenient": False,  # an unknown keyword is an error
    "coerce_one_of": False,  # oneOf must be provably disjoint
}
_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_ADVICE: Final = ("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
"llguidance's advice to its embedder, and the advice for a client."
SHOWN_CHARACTERS: Final = 300
"""Maximum length of llguidance's message."""


def canonical(grammar: Grammar) -> Grammar:
    """The grammar as JSON Schema, regular expression or Lark. Raises BadGrammar."""
    match grammar.kind:
        case "json_object":
            return structs.replace(grammar, kind="json_schema", text='{"type":"object"}')
        case "choice":
            return structs.replace(grammar, kind="lark", text=_choice(grammar.text))
        case "gbnf":
            return structs.replace(grammar, kind="lark", text=_from_gbnf(grammar.text))
    return grammar


def lark_of(grammar: Grammar) -> str:
    grammar = canonical(grammar)
    match grammar.kind:
        case "json_schema":
            return f"start: %json {json.dumps(_with_options(grammar.text))}{_TAIL}"
        case "regex":
            return f"start: /{regex_to_lark(grammar.text, '')}/{_TAIL}"
    return grammar.text + _TAIL


def reason_of(message: str, *, kind: str = "") -> str:
    """The reason in llguidance's error: the first line of its message, because the grammar itself follows. The position is
    included only for Lark, whose text is the client's own."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "<non-verbose/>" not in line]
    if not lines:
        return "it cannot be used"
    if lines[0] == "NoExtensionBias":
        return "no text belongs to it"
    reason = _PLACE.sub(r"line \1, column \2: " if kind == "lark" else "", lines[0]).replace(*_ADVICE)
    if reason.endswith("regex parse error:"):  # the cause follows after the expression
        what = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), "it is not one")
        reason = f"{reason.removesuffix('regex parse error:')}{what}"
    return reason[:SHOWN_CHARACTERS]


def _with_options(text: str) -> Any:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        raise BadGrammar("the schema is not JSON") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadGrammar("the schema must be an object")
    return {**schema, "x-guidance": _JSON_OPTIONS}


def _choice(text: str) -> str:
    """A rule with one terminal for all choices: each separate one would cost as much as a rule."""
    return "start: CHOICE\nCHOICE: " + " | ".join(_quoted(choice) for choice in json.loads(text)) + "\n"


def _quoted(text: str) -> str:
    """A literal in JSON's quoting, with U+007F escaped, which Lark does not accept."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _from_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise BadGrammar("the grammar is nested too deeply") from None
    except Exception as error:  # the library raises plain Exception
        raise BadGrammar(f"the grammar is not GBNF: {reason_of(str(error))}") from None
