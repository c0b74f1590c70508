"""Whatever the grammar of required calls allows, the parser of the same style reads as calls."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from baton.errors import BadGrammar
from baton.text.harmony_marks import MARKS as HARMONY
from baton.text.parsers.call_grammar import calls_grammar
from baton.text.parsers.deepseek_calls import CALL as CALL_MARK
from baton.text.parsers.deepseek_calls import CALLS, END_CALL, END_CALLS, SEP
from baton.text.parsers.harmony import HarmonyParser
from baton.text.parsers.harmony_grammar import harmony_grammar
from baton.text.parsers.open_calls import calls_parser
from baton.text.parsers.styles import CALL_STYLES

llguidance = pytest.importorskip("llguidance")

MARKS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", CALLS, CALL_MARK, SEP, END_CALL, END_CALLS, *HARMONY)
TOKENS = [bytes([byte]) for byte in range(256)] + [mark.encode() for mark in MARKS] + [b"<end>"]
END = len(TOKENS) - 1
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rom \"}"]}, "days": {"$ref": "#/$defs/Days"}, "now": {"type": "boolean"}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 0, "maximum": 99, "x-of-somebody": 1}},
}  # fmt: skip
TOOLS = {"weather": WEATHER, "a.b-c": {"properties": {"x": {"type": "null"}}, "additionalProperties": False}}
SPECIAL = {mark: 256 + place for place, mark in enumerate(MARKS)}


class _Tokens:
    bos_token_id = None
    tokens = TOKENS
    eos_token_id = END

    def __init__(self, special: bool) -> None:
        self.special_token_ids = [*SPECIAL.values(), END] if special else [END]

    def __call__(self, text):
        return []


def matcher(style: str, *, parallel: bool = True, special: bool = False, **more):
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(special)), n_vocab=len(TOKENS), eos_token=END)
    text = calls_grammar(CALL_STYLES[style], TOOLS, parallel=parallel, special=SPECIAL if special else {}, **more)
    made = llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def takes(made, text: str) -> bool:
    tokens = list(text.encode())
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()


def wander(made, dice: random.Random) -> str:
    """Any text that the grammar allows; it ends where it may with some luck."""
    text = b""
    for _ in range(2000):
        words = np.zeros((len(TOKENS) + 31) // 32, np.uint32)
        made.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: len(TOKENS)]).tolist()
        if END in allowed and (dice.random() < 0.6 or len(allowed) == 1):
            return text.decode()
        token = dice.choice([each for each in allowed if each != END])
        assert made.consume_token(token)
        text += TOKENS[token]
    raise AssertionError("it does not end")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("style", CALL_STYLES)
def test_what_it_allows_is_read_as_calls(style, parallel, special):
    dice = random.Random(f"{style} {parallel} {special}")
    for _ in range(6):
        text = wander(matcher(style, parallel=parallel, special=special), dice)
        parser = calls_parser(CALL_STYLES[style], TOOLS, calls_max=999)
        parts = [*parser.feed(text), *parser.flush()]
        assert all(hasattr(part, "arguments") for part in parts), text
        names = [part.name for part in parts if part.name is not None]
        assert names
        assert len(names) == 1 or parallel
        for index, name in enumerate(names):
            arguments = json.loads("".join(part.arguments for part in parts if part.index == index))
            assert set(arguments) <= set(TOOLS[name]["properties"])
            assert name != "weather" or arguments["city"] in WEATHER["properties"]["city"]["enum"]


CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}'
DEEPSEEK = f"{CALLS}{CALL_MARK}function{SEP}weather\n```json\n" + '{"city": "Oslo", "days": 3}' + f"\n```{END_CALL}{END_CALLS}"
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n%s\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("mistral", f"[TOOL_CALLS][{CALL}]"),
        ("llama3_json", CALL.replace("arguments", "parameters")),
        ("json", CALL),
        ("qwen3_coder", XML % '"Oslo"'),  # untyped, so in JSON
        ("pythonic", '[weather(city="Oslo", days=3)]'),
        ("deepseek_v3", DEEPSEEK),
        ("deepseek_v31", f"{CALLS}{CALL_MARK}weather{SEP}" + '{"city": "Oslo", "days": 3}' + f"{END_CALL}{END_CALLS}"),
    ],
)
def test_it_allows_what_models_write(style, text):
    assert takes(matcher(style), text)
    assert not takes(matcher(style), text.replace("Oslo", "Nowhere"))
    assert not takes(matcher(style), text.replace("weather", "nobody"))
    assert not takes(matcher(style), "It is cold.")


def test_or_an_answer_in_its_format():
    schema = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
    for text in ('{"a": 5}', f"<tool_call>\n{CALL}\n</tool_call>"):
        assert takes(matcher("hermes", or_answer=schema), text)
    assert not takes(matcher("hermes", or_answer=schema), '{"b": 5}')


# A tool that is strict, and a model that is free to call


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("style", [style.name for style in CALL_STYLES.values() if not style.bare])
def test_from_the_opening_mark_on_a_call_follows_its_schema(style, special):
    """Anything else may be said; what is begun as a call is one. The parser reads it so."""
    dice = random.Random(f"free {style} {special}")
    opening, inside = CALL_STYLES[style].opens[0], []
    for _ in range(4):
        made = matcher(style, special=special, free=True)
        said = [*b"It is {cold}. ", *([SPECIAL[opening]] if special else opening.encode())]
        assert made.try_consume_tokens(said) == len(said)
        text = ("It is {cold}. " + opening).encode()
        for _ in range(3000):  # to the end of the first call: behind it anything may come
            words = np.zeros((len(TOKENS) + 31) // 32, np.uint32)
            made.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: len(TOKENS)]).tolist()
            if END in allowed:
                break
            token = dice.choice(allowed)
            assert made.consume_token(token)
            text += TOKENS[token]
        parser = calls_parser(CALL_STYLES[style], TOOLS, calls_max=1)
        parts = [*parser.feed(text.decode()), *([] if parser.done else parser.flush())]
        assert parts[0].text == "It is {cold}. "
        inside.append(parts[1].name)
        arguments = json.loads("".join(part.arguments for part in parts[1:]))
        assert set(arguments) <= set(TOOLS[parts[1].name]["properties"])
    assert set(inside) <= set(TOOLS)


def test_a_free_answer_is_any_text():
    for text in ("", "It is cold.", '{"a": 5}', "\n\n```python\nprint(1)\n```", "<tool", "5 < 6"):
        assert takes(matcher("hermes", free=True), text)
    assert takes(matcher("hermes", free=True), f"So: <tool_call>\n{CALL}\n</tool_call>\nThat was it.")
    assert not takes(matcher("hermes", free=True), "So: <tool_call>\nno")
    assert not takes(matcher("hermes", free=True, parallel=False), "<tool_call>\n" + CALL.replace("Oslo", "Nowhere"))


def test_texts_of_xml_are_any_text():
    schema = {
        "t": {"properties": {"a": {"type": "string"}, "b": {"type": "string", "enum": ["x", "y"]}}, "required": ["a", "b"]}
    }
    text = calls_grammar(CALL_STYLES["qwen3_coder"], schema, parallel=False, special={})
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(False)), n_vocab=len(TOKENS), eos_token=END)
    head, tail = "<tool_call>\n<function=t>\n<parameter=a>\n", "\n</parameter>\n</function>\n</tool_call>"
    for a, b, good in (('<b>"\\n\n\n</b> </para', "x", True), ("", "y", True), ("1", "z", False)):
        made = llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0)
        said = f"{head}{a}\n</parameter>\n<parameter=b>\n{b}{tail}"
        assert takes(made, said) is good
        if good:
            parser = calls_parser(CALL_STYLES["qwen3_coder"], schema, calls_max=1)
            assert json.loads("".join(part.arguments for part in parser.feed(said))) == {"a": a, "b": b}


# Strict tools whose arguments are not one JSON object


def strict_matcher(style: str, schema: dict, **more):
    text = calls_grammar(CALL_STYLES[style], {"f": schema}, parallel=False, special={}, strict=["f"], **more)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(False)), n_vocab=len(TOKENS), eos_token=END)
    return llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0)


def takes_text(schema: dict, text: str) -> bool:
    """A strict tool of Qwen3-Coder with one argument of this schema, which gets this text."""
    made = strict_matcher("qwen3_coder", {"properties": {"a": {"type": "string", **schema}}, "required": ["a"]})
    assert not made.is_error(), made.get_error()
    return takes(made, f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>")


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"const": "a</b>"}, ["a</b>"], ["", "a", "a</b>c"]),
        ({"enum": ["a", 1, "bc", "x</parameter>"]}, ["a", "bc"], ["1", "x</parameter>", "c"]),
        ({"enum": ["a", "bc"], "const": "bc"}, ["bc"], ["a"]),
        ({"enum": ["a", "bc", "bcd"], "pattern": "c", "maxLength": 2}, ["bc"], ["a", "bcd"]),
        ({"pattern": "^/[a-z]+/$"}, ["/tmp/"], ["/tmp", "x/tmp/", "/TMP/", "/tmp/\n"]),
        ({"pattern": "b+"}, ["b", "a\nbbc"], ["", "ac"]),
        ({"pattern": "^[\\d/]\\w\\$$"}, ["7a$", "/_$"], ["7a", "٣a$", "7é$"]),
        ({"pattern": "^a|b$"}, ["a", "b"], ["xbx", "c"]),
        ({"minLength": 2, "maxLength": 3}, ["éé", "a\nb"], ["é", "abcd"]),
        ({"title": "A", "default": "", "x-of-somebody": 1, "minLength": 0}, ["", "any <b>\n\nthing"], ["a</parameter>b"]),
    ],
    ids=lambda value: str(value)[:50],
)
def test_texts_of_strict_tools_in_xml_follow_their_schema(schema, good, bad):
    assert [text for text in good if not takes_text(schema, text)] == []
    assert [text for text in bad if takes_text(schema, text)] == []


FORMATTED = {
    "date": ["2026-11-19", "2026-02-29", "2026-04-31", "2026-1-1", "2026-13-01"],
    "time": ["23:59:60Z", "01:02:03.5+02:00", "01:02:03", "24:00:00Z"],
    "date-time": ["2026-11-19T01:02:03Z", "2026-11-19t01:02:03.25-11:30", "2026-11-19 01:02:03Z", "2026-11-19"],
    "duration": ["P1Y2M3DT4H5M6S", "PT5M", "P3W", "P1M", "P2DT1H", "P", "P1W2D", "PT", "1D", "P1YT1H1S"],
    "email": ["a.b+c@example.org", "x@[192.0.2.1]", "a@b", "a b@c", "a@", "@b", "a@-b.c", "a..b@c"],
    "hostname": ["a", "a-b.example.org", "-a", "a.", "a_b", "x" * 63, "x" * 64],
    "ipv4": ["0.0.0.0", "255.249.199.9", "256.1.1.1", "1.2.3", "01.2.3.4"],
    "ipv6": ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::3:4:5:6:7:8", "1:2::7:8",
             "1:2:3", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "::1:2:3:4:5:6:7:8"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000", "123E4567-E89B-12D3-A456-42661417400", "123e4567"],
    "uri": ["https://u:p@example.org:80/a/b;c?d=e/f#g?h", "urn:a:b", "file:///etc/hosts", "http://[::1]:8/", "mailto:a@b.c",
            "a:", "/a/b", "example.org", "http://a b", "http://[1:2]/", "1a:b", "http://%zz/", "a:#b#c"],
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATTED)
def test_formats_of_texts_allow_what_they_allow_in_json(name):
    """Strict tools with a format ran in the styles whose arguments are JSON, and were refused in that of Qwen3-Coder."""
    schema = {"properties": {"a": {"type": "string", "format": name}}, "required": ["a"], "additionalProperties": False}

    def in_json(text: str) -> bool:
        made = strict_matcher("hermes", schema)
        assert not made.is_error(), made.get_error()
        call = json.dumps({"name": "f", "arguments": {"a": text}})
        return takes(made, f"<tool_call>\n{call}\n</tool_call>")

    answers = {text: takes_text({"format": name}, text) for text in [*FORMATTED[name], "", "</parameter>"]}
    assert answers == {text: in_json(text) for text in answers}
    assert {True, False} == {*answers.values()}


@pytest.mark.parametrize(
    "schema",
    [
        *(
            {"format": "idn-email"},
            {"format": 5},
            {"not": {"const": "a"}},
            {"anyOf": [{"const": "a"}]},
            {"$ref": "#/$defs/A"},
            {"uniqueItems": True},
        ),
        *(
            {"pattern": 5},
            {"pattern": "a\nb"},
            {"maxLength": "2"},
            {"minLength": 3, "maxLength": 2},
            {"enum": [1]},
            {"enum": "a"},
        ),
        *(
            {"const": "abc", "maxLength": 2},
            {"const": "</parameter>"},
            {"pattern": "a(?=b)"},
            {"pattern": "(^a)"},
            {"pattern": "(a"},
        ),
    ],
    ids=str,
)
def test_texts_that_cannot_be_held_to_a_strict_schema_refuse_the_tool(schema):
    """They were free text."""
    whole = {"properties": {"a": {"type": "string", **schema}}}
    assert refusal("qwen3_coder", whole)
    assert not matcher_of_wishes("qwen3_coder", whole).get_error()


def refusal(style: str, schema: dict) -> str:
    try:
        return strict_matcher(style, schema).get_error()
    except BadGrammar as error:
        return str(error)


def matcher_of_wishes(style: str, schema: dict):
    text = calls_grammar(CALL_STYLES[style], {"f": schema}, parallel=False, special={})
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(False)), n_vocab=len(TOKENS), eos_token=END)
    return llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0)


WHOLE = {"type": "object", "properties": {"n": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["n"]}


@pytest.mark.parametrize("style", ["qwen3_coder", "pythonic"])
@pytest.mark.parametrize(
    ("more", "word"),
    [
        *(({"uniqueItems": True}, "uniqueItems"), ({"not": {}}, "not"), ({"oneOf": [{"required": ["b"]}]}, "oneOf")),
        *(({"minProperties": 2}, "minProperties"), ({"maxProperties": 1}, "maxProperties"), ({"enum": [{"n": 1}]}, "enum")),
        *(({"$ref": "#/$defs/A", "$defs": {"A": {}}}, "$ref"), ({"dependentRequired": {"n": ["b"]}}, "dependentRequired")),
        *(({"patternProperties": {"^n": {"minimum": 3}}}, "patternProperties"), ({"required": ["n", "z"]}, "z")),
        *(
            ({"properties": {"b": False}, "required": []}, "b"),
            ({"properties": 5}, "properties"),
            ({"minProperties": -1}, "-1"),
        ),
    ],
    ids=str,
)
def test_a_keyword_of_all_arguments_that_cannot_be_enforced_refuses_a_strict_tool(style, more, word):
    """They were ignored: only keywords within a property were refused."""
    with pytest.raises(BadGrammar, match=f"(^| ){re.escape(word)}( |,|$)"):
        strict_matcher(style, {**WHOLE, **more})
    assert not matcher_of_wishes(style, {**WHOLE, **more}).get_error()


@pytest.mark.parametrize("style", ["qwen3_coder", "pythonic"])
def test_keywords_that_the_list_of_arguments_enforces_are_fine(style):
    fine = {
        "minProperties": 1,
        "maxProperties": 2,
        "additionalProperties": False,
        "title": "F",
        "$defs": {},
        "description": "d",
    }
    assert not strict_matcher(style, {**WHOLE, **fine}).get_error()
    assert not strict_matcher(style, {}).get_error()


def test_arguments_of_a_tool_without_properties_are_free_in_xml():
    """Beside a strict tool the others have an empty schema here: they could be called without arguments only."""
    tools = {"f": WHOLE, "g": {}}
    text = calls_grammar(CALL_STYLES["qwen3_coder"], tools, parallel=False, special={}, strict=["f"], free=True)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(False)), n_vocab=len(TOKENS), eos_token=END)
    call = "<tool_call>\n<function=%s>\n<parameter=x>\n{1}\n</parameter>\n</function>\n</tool_call>"
    for name, good in (("g", True), ("f", False)):
        made = llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0)
        assert takes(made, f"So: {call % name}") is good
    parser = calls_parser(CALL_STYLES["qwen3_coder"], tools, calls_max=1)
    parts = [*parser.feed(call % "g"), *parser.flush()]
    assert json.loads("".join(part.arguments for part in parts if hasattr(part, "arguments"))) == {"x": "{1}"}


# Channels


def harmony_matcher(**more):
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(True)), n_vocab=len(TOKENS), eos_token=END)
    text = harmony_grammar(more.pop("tools", TOOLS), special=SPECIAL, **{"answer": None, **more})
    made = llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def takes_channels(made, text: str) -> bool:
    """The marks in the text are tokens."""
    for mark in HARMONY:
        text = text.replace(mark, chr(0xE000 + SPECIAL[mark]))
    tokens = [ord(char) - 0xE000 if ord(char) >= 0xE000 else ord(char) for char in text]
    return made.try_consume_tokens(tokens) == len(tokens) and made.is_accepting()


THOUGHT = "<|channel|>analysis<|message|>Hm {<|end|><|start|>assistant"
CHANNEL_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo", "days": 3}'
ANSWER = '<|channel|>final<|message|>{"a": 5}'


@pytest.mark.parametrize(
    ("more", "good", "bad"),
    [
        ({}, [CHANNEL_CALL, THOUGHT + CHANNEL_CALL], [ANSWER, "Hi", CHANNEL_CALL.replace("Oslo", "Nowhere")]),
        ({"thinks": False}, [CHANNEL_CALL], [THOUGHT + CHANNEL_CALL]),
        ({"answer": '{"type": "object"}'}, [CHANNEL_CALL, THOUGHT + ANSWER], [ANSWER[:-1], ANSWER + "x", THOUGHT]),
        ({"answer": '{"type": "object"}', "tools": {}}, [ANSWER], [CHANNEL_CALL]),
        ({"answer": ""}, [CHANNEL_CALL, ANSWER + "x"], [CHANNEL_CALL.replace("weather", "nobody")]),
    ],
)
def test_channels(more, good, bad):
    assert all(takes_channels(harmony_matcher(**more), text) for text in good)
    assert not any(takes_channels(harmony_matcher(**more), text) for text in bad)


def test_what_it_allows_is_read_as_a_call_in_channels():
    dice = random.Random("channels")
    for _ in range(6):
        text = wander(harmony_matcher(thinks=False), dice)
        parser = HarmonyParser(tuple(TOOLS), calls_max=9, begun="assistant")
        parts = [part for part in [*parser.feed(text), *parser.flush()] if hasattr(part, "arguments")]
        arguments = json.loads("".join(part.arguments for part in parts))
        assert set(arguments) <= set(TOOLS[parts[0].name]["properties"])


UNIQUE = {"type": "object", "properties": {"xs": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}


@pytest.mark.parametrize("style", ["hermes", "qwen3_coder", "pythonic", "deepseek_v31"])
def test_only_tools_that_are_not_strict_are_held_to_less_than_their_schema(style):
    """uniqueItems cannot be enforced: a wish of a tool, and an error of one that is strict and of an answer's format."""
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(False)), n_vocab=len(TOKENS), eos_token=END)

    def error(**more) -> str:
        text = calls_grammar(CALL_STYLES[style], {"f": UNIQUE}, parallel=True, special={}, **more)
        return llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0).get_error()

    assert not error()
    assert not error(strict=["g"])
    assert "uniqueItems" in error(strict=["f"])
    assert "uniqueItems" in error(or_answer=json.dumps(UNIQUE))


def test_channels_hold_strict_tools_and_answers_to_their_schemas():
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(True)), n_vocab=len(TOKENS), eos_token=END)

    def error(parameters, **more) -> str:
        text = harmony_grammar(parameters, special=SPECIAL, **more)
        return llguidance.LLMatcher(tokenizer, '%llguidance {"no_forcing": true}\n' + text, log_level=0).get_error()

    assert not error({"f": UNIQUE}, answer=None)
    assert "uniqueItems" in error({"f": UNIQUE}, answer=None, strict=["f"])
    assert "uniqueItems" in error({}, answer=json.dumps(UNIQUE))
