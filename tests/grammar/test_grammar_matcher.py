"""From a grammar's text to the tokens that may come next."""

from __future__ import annotations

import json

import numpy as np
import pytest

from baton.errors import BadGrammar
from baton.grammar.language import canonical
from baton.grammar.matcher import Matcher, allowed
from baton.protocol.grammar import Grammar
from baton.protocol.thinking import Thinking

END, OTHER = 261, 262
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TREE = {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}
CHOICES = ["yes", "no", 'a "quote"\n', "ja/nein"]
CONTROLS = [f"a{chr(code)}b" for code in (*range(32), *range(0x7F, 0xA0), 0x2028, 0xFEFF)]
"""Every control character."""

FITS = [
    ("json_object", "", ["{}", '{"a": [1, null, "x"]}', '{"a": {"b": -1.5e3}}'], ["[]", "1", '"x"', "{} ", " {}"]),
    ("json_schema", json.dumps(OBJECT), ['{"a":1}', '{ "a": -7 }', '{\n  "a": 0\n}'], ['{"a":1.5}', '{"b":1}', "{}"]),
    ("json_schema", '{"enum": ["x", 3, null]}', ['"x"', "3", "null"], ['"y"', "4"]),
    ("json_schema", json.dumps(TREE), ["[[],[[]]]"], ["1"]),
    ("regex", "[ab]{2}/c?", ["ab/", "ba/c"], ["a/", "abc"]),
    ("regex", "^x$", ["x"], ["xx"]),
    ("regex", "a\nb|ü+", ["a\nb", "ü", "üü"], ["a", "ab"]),
    ("choice", json.dumps(CHOICES), CHOICES, ["maybe", "yesno"]),
    ("choice", json.dumps(CONTROLS), CONTROLS, ["a", "ab"]),
    ("gbnf", 'root ::= "a" rest+ # more\nrest ::= [x-z] | "(" rest ")"', ["ax", "a(y)z", "a((x))"], ["a", "b", "a(x"]),
    ("lark", 'start: "a" b\nb: /[0-9]+/ | "(" b ")"\n', ["a12", "a((7))"], ["a", "a(7"]),
]


@pytest.mark.parametrize(("kind", "text", "good", "bad"), FITS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_fits_and_what_does_not(typist, kind, text, good, bad):
    for answer in good:
        one = typist(kind, text)
        assert one.types(answer.encode()) == len(answer.encode()), (answer, one.matcher.error)
        assert one.may_end, answer
    for answer in bad:
        one = typist(kind, text)
        assert one.types(answer.encode()) < len(answer.encode()) or not one.may_end, answer


def test_an_object_of_many_properties_that_may_be_left_out(typist):
    """With 250 of them the first token had none that could follow."""
    properties = {f"prop{number}": {"type": "string"} for number in range(500)}
    writes = typist("json_schema", json.dumps({"type": "object", "properties": properties, "additionalProperties": False}))
    text = b'{"prop3":"a","prop499":"b"}'
    assert writes.types(text) == len(text)
    assert writes.may_end


def test_only_tokens_with_that_text_are_allowed(typist):
    """Two tokens may have the same text; one without text, a special one and the head's padding have none."""
    one = typist("regex", "(ab)*")
    assert one.allowed() == [ord("a"), 256, 257, END]
    assert set(typist("regex", "(?s:.*)").allowed()) >= {0, 255, 256} - {255}
    assert not {258, OTHER, 263, 264, 265} & set(typist("regex", "(?s:.*)").allowed())


def test_the_end_is_allowed_where_the_text_is_whole(typist):
    one = typist("regex", "ab?")
    assert END not in one.allowed()
    one.types(b"a")
    assert one.allowed() == [ord("b"), END]
    one.types(b"b")
    assert one.allowed() == [END]


def test_an_end_that_comes_late(typist):
    one = typist("regex", "ab?", ends_late=True)
    one.types(b"a")
    assert one.allowed() == [ord("b")]
    one.types(b"b")
    assert one.allowed() == [END]


@pytest.mark.parametrize("is_open", [True, False])
def test_a_text_that_begins_behind_a_thought(vocabulary, is_open):
    thinking = Thinking(end=OTHER, budget=None, start=263, is_open=is_open)
    words = np.zeros(vocabulary.words, np.uint32)
    compiled = Matcher(vocabulary, Grammar("regex", "ab", ends=(END,)))

    def next_of(*tokens: int) -> list[int]:
        one = compiled.copy(thinking)
        one.advance(tokens)
        one.fill(words)
        assert not one.error
        return np.flatnonzero(allowed(words, vocabulary.width)).tolist()

    all_but_the_end = [token for token in range(vocabulary.width) if token != END]
    thought = [*([] if is_open else [263]), *b"Hm, so ab is it?"]
    assert next_of() == (all_but_the_end if is_open else [ord("a"), 256, 257, 263])
    assert next_of(*thought) == all_but_the_end
    assert next_of(*thought, OTHER) == [ord("a"), 256, 257]
    assert next_of(*thought, OTHER, 256) == [END]
    if not is_open:
        assert next_of(ord("a")) == [ord("b")]


def test_whitespace_is_bounded(typist):
    """A model that likes spaces would else write them until it is cut."""
    for text, typed in ((b"{  ", 2), (b"{\n\n", 2), (b"{" + b"\n" + b" " * 100, 66), (b'{"a": ' + b" ", 6)):
        assert typist("json_schema", json.dumps(OBJECT)).types(text) == typed, text


def test_the_client_cannot_change_how_schemas_are_read(typist):
    loose = {**OBJECT, "x-guidance": {"whitespace_pattern": ".*", "lenient": True, "item_separator": ";"}}
    assert typist("json_schema", json.dumps(loose)).types(b"{ ab") == 2


def test_a_state_is_a_function_of_the_tokens(vocabulary):
    grammar = Grammar("json_schema", json.dumps(OBJECT), ends=(END,))
    whole, words = Matcher(vocabulary, grammar), np.zeros(vocabulary.words, np.uint32)
    tokens = [259, ord("a"), ord('"'), ord(":"), ord("1")]
    for at, token in enumerate(tokens):
        whole.advance((token,))
        whole.fill(words)
        again, mask = Matcher(vocabulary, grammar).copy(), np.ones(vocabulary.words, np.uint32)
        again.advance(tokens[: at + 1])
        again.fill(mask)
        assert (mask == words).all()
    assert allowed(words, vocabulary.width)[ord("}")]


def test_tokens_that_the_grammar_does_not_allow_are_an_error(vocabulary):
    matcher = Matcher(vocabulary, Grammar("regex", "abc", ends=(END,)))
    matcher.advance([ord("a"), ord("x")])
    assert matcher.error


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", "[1]"),
        ("json_schema", '{"type": "strin"}'),
        ("json_schema", '{"not": {"type": "string"}}'),  # not implemented: refused, not ignored
        ("json_schema", '{"type": "string", "enum": [1]}'),  # nothing can be both
        ("json_schema", '{"$ref": "#"}'),
        ("json_schema", '{"$ref": "https://example.org/schema.json"}'),
        ("json_schema", '{"oneOf": [{"type": "integer"}, {"type": "number"}]}'),  # 1 is both
        ("regex", "(a"),
        ("regex", "a(?=b)"),
        ("lark", "start: nowhere"),
        ("lark", "no colon"),
    ],
)
def test_what_is_no_grammar_says_why(typist, kind, text):
    one = typist(kind, text)
    assert one.matcher.error
    assert len(one.matcher.error) <= 300
    assert not one.allowed()


@pytest.mark.parametrize("text", ["", "root = x", 'root ::= "a" missing', "a ::= (", "root ::= " + "(" * 3000])
def test_what_is_no_gbnf(text):
    with pytest.raises(BadGrammar):
        canonical(Grammar("gbnf", text))


@pytest.mark.parametrize(
    "text",
    [
        '%llguidance {"no_forcing": false}\nstart: "abc"\n',
        'start: "abc"\n%llguidance {"no_forcing": false}',
        'start: "abc" // a comment, and no line feed',
        'start: %lark {\n%llguidance {"no_forcing": false}\nstart: "abc"\n}\n',
    ],
)
def test_a_grammar_cannot_have_its_text_cut_into_tokens(vocabulary, text):
    """It was refused as one that no text belongs to."""
    matcher, words = Matcher(vocabulary, Grammar("lark", text, ends=(261,))), np.zeros(vocabulary.words, np.uint32)
    matcher.fill(words)
    assert not matcher.error
    assert allowed(words, vocabulary.width)[ord("a")]
    assert allowed(words, vocabulary.width)[256], "and the longer token, ab"
