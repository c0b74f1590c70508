"""Every kind of grammar as the one text that llguidance reads: Lark.

`canonical` is for the front, where a grammar comes in: GBNF and choices become Lark, so that a worker never parses them.
`lark_of` is what a matcher is made of.

    no_forcing          where only one text can follow, its tokens are still the model's choice. Else llguidance would cut that
                        text into tokens by calling back into Python, which takes a second for a megabyte. It stands behind
                        the grammar: of several such lines the last one holds, and a client may have written one
    whitespace_pattern  between the parts of a JSON value: a space, or a line break with its indentation, once. Where any amount
                        is allowed, a small model may go on with spaces until it is cut
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
    "lenient": False,  # a keyword that it does not know is an error, not a wish
    "coerce_one_of": False,  # oneOf must be provably disjoint
}
_PLACE: Final = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
_ADVICE: Final = ("Enable 'coerce_one_of' option to approximate oneOf with anyOf", "Use anyOf")
"What llguidance tells its embedder, and what a client can do."
SHOWN_CHARACTERS: Final = 300
"""Of what llguidance says of a grammar."""


def canonical(grammar: Grammar) -> Grammar:
    """The same as JSON Schema, regular expression or Lark."""
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
    """What llguidance says is wrong with a grammar: the first line of its words; behind it comes the grammar itself. Where in
    the text it is, is told of Lark only, whose text is the client's own."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "<non-verbose/>" not in line]
    if not lines:
        return "it cannot be used"
    if lines[0] == "NoExtensionBias":
        return "no text belongs to it"
    reason = _PLACE.sub(r"line \1, column \2: " if kind == "lark" else "", lines[0]).replace(*_ADVICE)
    if reason.endswith("regex parse error:"):  # what that is, stands behind the expression
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
    """One terminal, however many there are: each would cost as much as a rule."""
    return "start: CHOICE\nCHOICE: " + " | ".join(_quoted(choice) for choice in json.loads(text)) + "\n"


def _quoted(text: str) -> str:
    """As JSON quotes it; and the one control character that JSON leaves as it is, and Lark does not take."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _from_gbnf(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise BadGrammar("the grammar is nested too deeply") from None
    except Exception as error:  # the library raises plain Exception
        raise BadGrammar(f"the grammar is not GBNF: {reason_of(str(error))}") from None
