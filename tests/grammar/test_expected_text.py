"""The text that is expected next: what the grammar forces, and the usual white space between forced parts."""

from __future__ import annotations

import json
import random

import pytest

from baton.grammar.expected_text import NOTHING, TEXT_MAX, Expected
from baton.grammar.json_layout import JsonLayout
from baton.grammar.matcher import Matcher
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.protocol.thinking import Thinking

BYTES = [*(bytes([byte]) for byte in range(256)), b"<end>"]
END = 256
VOCABULARY = Vocabulary(BYTES, [END], len(BYTES))


def schema(**properties: object) -> Grammar:
    text = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return Grammar("json_schema", json.dumps(text), ends=(END,))


STRING, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
SHOP = schema(name=STRING, number=NUMBER, address=json.loads(schema(street=STRING).text), gift=FLAG)


def at(text: str, grammar: Grammar = SHOP, vocabulary: Vocabulary = VOCABULARY) -> Matcher:
    matcher = Matcher(vocabulary, grammar)
    matcher.layout = JsonLayout()
    matcher.advance(list(text.encode()))
    assert not matcher.error
    return matcher


def expected(text: str, grammar: Grammar = SHOP) -> str:
    return at(text, grammar).expected().text.decode()


def test_the_usual_layout_leads_through_white_space():
    assert expected("") == '{"name": "'
    assert expected('{"name": "Ada"') == ', "number":', "a number's space comes with it"
    assert expected('{"name": "Ada",') == ' "number":'
    assert expected('{"name": "Ada", "number": 1,') == ' "address": {"street": "'
    assert expected('{"name": "Ada", "number": 1, "address": {"street": ""') == '}, "gift":'


def test_this_answers_layout_does_too():
    begun = '{\n  "name" :"Ada",\n  "number" :1,'
    assert expected(begun) == '\n  "address" :{\n    "street" :"'
    assert expected(f'{begun}\n  "address" :{{\n    "street" :"x"') == '\n  },\n  "gift" :'
    assert expected("{\n ") == ' "name": "'


def test_a_layout_that_changes_is_followed():
    assert expected('{\n  "name": "Ada",\n  "number": 1,') == '\n  "address": {\n    "street": "'
    assert expected('{\n  "name": "Ada", "number":1,') == ' "address":{\n    "street":"'


@pytest.mark.parametrize("value", ["", "{", ',\\n  \\"number\\": ', "\\\\", "\\\\\\\\", '\\"'])
def test_nothing_is_expected_within_a_free_string_and_no_layout_learned(value):
    begun = '{"name": "' + value
    assert at(begun).expected() == NOTHING
    assert expected(f'{begun}"') == ', "number":'


def test_nothing_is_expected_where_there_is_a_choice():
    for begun in ('{"name": "A", "number": 1', '{"name": "A", "number": '):
        assert at(begun).expected().text == b""
    assert at('{"a": 1, ', Grammar("json_object", ends=(END,))).expected().text == b'"'
    assert at('{"a":', Grammar("json_object", ends=(END,))).expected() == NOTHING


def test_what_may_follow_is_known():
    assert at('{"name": "Ada",').expected().ends == (b" -", b" 1", b" 9", b" 0")
    assert set(at('{"name": "A", "number": 1, "address": {"street": "s"').expected().ends) == {b" true", b" false"}
    assert at("{").expected().ends == (b"A", b"a", b"1")


def test_the_end_of_the_answer_is_known():
    expectation = at('{"name": "A", "number": 1, "address": {"street": ""}, "gift": t').expected()
    assert expectation == Expected(b"rue}", is_last=True)
    assert VOCABULARY.guess_expected(expectation) == list(b"rue}")


def test_long_texts_are_cut_and_found_again():
    grammar = schema(**{"n" * 50: json.loads(schema(**{"m" * 50: json.loads(schema(o=NUMBER).text)}).text)})
    whole, matcher = b'{"' + b"n" * 50 + b'": {"' + b"m" * 50 + b'": {"o":', at("", grammar)
    before, read = matcher.expected(), 0
    assert before.is_cut
    assert TEXT_MAX <= len(before.text) < len(whole)
    while read < len(whole):
        assert before.text == whole[read : read + len(before.text)]
        assert len(before.text) >= min(TEXT_MAX // 2, len(whole) - read)
        tokens = list(whole[read : read + 7])
        matcher.advance(tokens)
        read += 7
        before = matcher.expected(before, tokens)


def test_text_that_was_expected_is_not_looked_for_again(monkeypatch):
    matcher = at("")
    before = matcher.expected()
    matcher.advance(list(b'{"na'))
    monkeypatch.setattr("baton.grammar.matcher.expected_text", lambda *_: pytest.fail("looked for again"))
    assert matcher.expected(before, list(b'{"na')) == Expected(b'me": "', before.ends)


def test_special_tokens_and_other_texts_change_what_is_expected():
    """A special token that ends the reasoning has no text."""
    assert NOTHING.after(b"") is None
    assert Expected(b"abc").after(b"ax") is None
    assert Expected(b"abc").after(b"abc") == NOTHING


def test_other_grammars_expect_what_they_force_and_nothing_more():
    assert at("r", Grammar("choice", '["red", "green"]', ends=(END,))).expected() == Expected(b"ed", is_last=True)
    assert at("", Grammar("lark", 'start: "a:" /[ \\n]?/ "b"\n', ends=(END,))).expected().text == b"a:"
    assert at("", Grammar("regex", "ab*", ends=(END,))).expected().text == b"a"


def test_nothing_is_expected_while_the_model_reasons():
    matcher = Matcher(VOCABULARY, SHOP).copy(Thinking(end=0, start=None, is_open=True))
    matcher.layout = JsonLayout()
    matcher.advance(list(b'"{\n "'))
    assert matcher.expected() == NOTHING
    assert not matcher.layout.in_string, "reasoning has no layout"
    matcher.advance([0])
    assert matcher.expected().text == b'{"name": "'


def test_a_matcher_that_runs_ahead_reads_no_layout():
    matcher = at("{")
    ahead = matcher.fork()
    ahead.advance(list(b'\n      "name":"'))
    assert ahead.layout is None
    assert not ahead.error
    assert vars_of(matcher.layout) == vars_of(at("{").layout)


def test_without_a_layout_there_is_only_forced_text():
    matcher = at('{"name": "A",')
    matcher.layout = None
    assert matcher.expected() == NOTHING


def test_without_tokens_of_single_bytes_there_is_only_forced_text():
    tokens = [b"{", b'"', b'name"', b":", b"<end>"]
    matcher = Matcher(Vocabulary(tokens, [4], len(tokens)), SHOP)
    matcher.layout = JsonLayout()
    matcher.advance([0, 1])
    assert matcher.expected() == Expected(b'name"')


@pytest.mark.parametrize("seed", range(30))
def test_looking_changes_neither_the_state_nor_the_layout(seed):
    """A drawn text of a drawn schema: the same texts are expected, and the same masks allowed, whether or not it was looked
    before. And the expected text may always come: the grammar allows it."""
    rng = random.Random(seed)
    properties = {f"p{place}": rng.choice([STRING, NUMBER, FLAG, {"type": "array", "items": NUMBER}]) for place in range(4)}
    grammar = schema(**properties, last=json.loads(schema(**properties).text))
    values = {"string": '[ {,\n "\\', "integer": 12, "boolean": True, "array": [1, 2]}
    value = {name: values[str(kind["type"])] for name, kind in properties.items()}
    text = json.dumps({**value, "last": value}, **rng.choice([{}, {"indent": 3}, {"separators": (",", ":")}])).encode()
    looking, plain = at("", grammar), at("", grammar)
    for byte in text:
        found = looking.expected()
        assert found == second(plain).expected()
        ahead = second(plain)
        ahead.advance(list(found.text))
        assert not ahead.error
        looking.advance([byte])
        plain.advance([byte])
        assert vars_of(looking.layout) == vars_of(plain.layout)
    looking.advance([END])
    assert looking.ended
    assert not looking.error
    assert looking.expected() == NOTHING


def second(matcher: Matcher) -> Matcher:
    """A second matcher at the same place, also of the layout."""
    other = matcher.fork()
    assert matcher.layout is not None
    other.layout = matcher.layout.fork()
    return other


def vars_of(layout: JsonLayout | None) -> list[object]:
    return [getattr(layout, name) for name in JsonLayout.__slots__]


def test_a_long_constant_is_expected_in_parts():
    """Each proposal would tokenise all of it."""
    constant = "".join(random.Random(1).choice("abcdefgh ") for _ in range(5000))
    matcher, text = at("", schema(a={"const": constant})), b""
    found, written = matcher.expected(), list[int]()
    while not matcher.ended and found.text:
        assert len(found.text) <= 400
        written = list(found.text[:20])
        text += bytes(written)
        matcher.advance(written)
        found = matcher.expected(found, written)
    assert text.decode() == json.dumps({"a": constant})
