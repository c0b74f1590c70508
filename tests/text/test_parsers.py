"""Parsers of calls and thoughts: what each format gives, and that neither hostile text nor its cuts change anything."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidConfig
from baton.text.parsers.base import Content, PlainParser, Reasoning
from baton.text.parsers.call_object import HELD_CHARS_MAX
from baton.text.parsers.deepseek_calls import CALL, CALLS, END_CALL, END_CALLS, SEP
from baton.text.parsers.json_scan import DEPTH_MAX, JsonScan
from baton.text.parsers.open_calls import calls_parser
from baton.text.parsers.styles import CALL_STYLES, THINK_STYLES, answer_style
from baton.text.parsers.think import ThinkParser

TOOLS = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "maybe": {"type": ["string", "null"]}}},
    "time_in": {},
    "a.b-c": {},
}
MANY = settings(max_examples=400, deadline=None)
A = '{"name": "weather", "arguments": {"city": "Oslo"}}'
B = '{"name": "time_in", "arguments": {"zone": [1, -2.5e+3, null, "\\u00e5 }"]}}'
CITY, ZONE = '{"city": "Oslo"}', '{"zone": [1, -2.5e+3, null, "\\u00e5 }"]}'


def taken_apart(parser, pieces) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, calls."""
    content = reasoning = ""
    calls: list[list[str]] = []
    parts = []
    for piece in pieces:
        if parser.done:
            break
        parts += parser.feed(piece)
    for part in [*parts, *([] if parser.done else parser.flush())]:
        if isinstance(part, Content):
            assert part.text
            content += part.text
        elif isinstance(part, Reasoning):
            assert part.text
            reasoning += part.text
        elif part.name is not None:
            assert part.index == len(calls), "calls come in order"
            calls.append([part.name, part.arguments])
        else:
            assert part.index == len(calls) - 1
            calls[-1][1] += part.arguments
    return content, reasoning, [(name, arguments) for name, arguments in calls]


def calls_in(style: str, text: str, calls_max: int = 100):
    content, _, calls = taken_apart(calls_parser(CALL_STYLES[style], TOOLS, calls_max=calls_max), [text])
    return content, calls


W, T = ("weather", CITY), ("time_in", ZONE)
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
PYTHON = '[weather(city="Oslo"), time_in(zone=[1, -2.5e+3, None, "\\u00e5 }"])]'
ZONE_TOLD = '{"zone": [1, -2500.0, null, "\u00e5 }"]}'
FENCED = f"{CALL}function{SEP}weather\n```json\n{CITY}\n```{END_CALL}"


def xml(key: str, value: str) -> str:
    return f"<function=weather><parameter={key}>{value}</parameter></function>"


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{A}\n</tool_call>", "", [W]),
        ("hermes", f"\n\n<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>\n", "", [W, T]),
        ("hermes", f"Let me look.\n<tool_call>{A}</tool_call>", "Let me look.\n", [W]),
        ("hermes", f"<tool_call>{A}</tool_call> And then?", " And then?", [W]),
        ("hermes", f"<tool_call>{A}", "", [W]),  # the end of the answer closes too
        ("hermes", f"<tool_call>{A}</tool_c", "", [W]),
        ("hermes", f"<tool_call>{A}\n{B}</tool_call>", "", [W, T]),
        ("hermes", f"<tool_call>[{A}, {B}]</tool_call>", "", [W, T]),
        ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', "", [W]),
        ("hermes", '<tool_call>{"name": "weather"}</tool_call>', "", [("weather", "{}")]),
        ("hermes", '<tool_call>{"name": "weather", "arguments": null}</tool_call>', "", [("weather", "{}")]),
        ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}</tool_call>', "", [W]),
        ("hermes", '<tool_call>{"name": "a.b-c", "arguments": {}, "more": [1]}</tool_call>', "", [("a.b-c", "{}")]),
        ("hermes", "   ", "   ", []),
        ("hermes", "a < b and <tool_c", "a < b and <tool_c", []),
        ("llama3_json", f"<|python_tag|>{A}; {B}", "", [W, T]),
        ("llama3_json", A.replace("arguments", "parameters"), "", [W]),
        ("llama3_json", '{"type": "function", "function": "weather", "parameters": {"city": "Oslo"}}', "", [W]),
        ("llama3_json", f"It is {A}", f"It is {A}", []),  # without a mark only at the start
        ("llama3_json", f"It is <|python_tag|>{A}", "It is ", [W]),
        ("llama3_json", '<|python_tag|>weather.call(city="Oslo")', '<|python_tag|>weather.call(city="Oslo")', []),
        ("llama3_json", '{"name": "weather", "age": 3}', '{"name": "weather", "age": 3}', []),
        ("mistral", f"[TOOL_CALLS][{A}, {B}]", "", [W, T]),
        ("mistral", f"[TOOL_CALLS] [{A}]", "", [W]),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{CITY}[TOOL_CALLS]time_in{ZONE}", "", [W, T]),
        ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abc123DEF[ARGS]{CITY}", "", [W]),
        ("mistral", f"[TOOL_CALLS]nobody{CITY}", f"[TOOL_CALLS]nobody{CITY}", []),
        ("json", A, "", [W]),
        ("json", f"[{A},\n{B}]", "", [W, T]),
        ("json", f"```json\n{A}\n```", "", [W]),
        ("json", '{"answer": 42}', '{"answer": 42}', []),
        ("json", "[1, 2, 3]", "[1, 2, 3]", []),
        ("qwen3_coder", XML, "", [W]),
        ("qwen3_coder", f"So.\n{XML}\n{XML}\nDone.", "So.\n\nDone.", [W, W]),
        ("qwen3_coder", XML.removeprefix("<tool_call>\n"), "", [W]),
        ("qwen3_coder", "<function=time_in>\n</function>", "", [("time_in", "{}")]),
        ("qwen3_coder", xml("city", '\n\na "b"\n</p>\n\n'), "", [("weather", '{"city": "\\na \\"b\\"\\n</p>\\n"}')]),
        ("qwen3_coder", xml("city", "5"), "", [("weather", '{"city": "5"}')]),
        ("qwen3_coder", xml("days", "\n5\n"), "", [("weather", '{"days": 5}')]),
        ("qwen3_coder", xml("days", "5.5"), "", [("weather", '{"days": "5.5"}')]),
        ("qwen3_coder", xml("days", "five"), "", [("weather", '{"days": "five"}')]),
        (
            "qwen3_coder",
            xml("maybe", "null") + xml("maybe", "5"),
            "",
            [("weather", '{"maybe": null}'), ("weather", '{"maybe": "5"}')],
        ),
        ("qwen3_coder", xml("x", "True"), "", [("weather", '{"x": true}')]),
        ("qwen3_coder", xml("x", '{"a": [1, "\\ud800"]}'), "", [("weather", '{"x": "{\\"a\\": [1, \\"\\\\ud800\\"]}"}')]),
        ("qwen3_coder", xml("x", "NaN"), "", [("weather", '{"x": "NaN"}')]),
        ("qwen3_coder", "<function=nobody></function>", "<function=nobody></function>", []),
        ("qwen3_coder", f"<tool_call>{A}</tool_call>", f"<tool_call>{A}</tool_call>", []),
        ("qwen3_coder", "<function=weather>oops", "oops", [("weather", "{")]),
        ("pythonic", PYTHON, "", [W, ("time_in", ZONE_TOLD)]),
        ("pythonic", f"<|python_start|>{PYTHON}<|python_end|>", "", [W, ("time_in", ZONE_TOLD)]),
        ("pythonic", f"It is {PYTHON}", f"It is {PYTHON}", []),  # without a mark only at the start
        ("pythonic", "[ weather ( city = 'Oslo' , days = 3 ) ]", "", [("weather", '{"city": "Oslo", "days": 3}')]),
        ("pythonic", r"[weather(city='it\'s, \\')]", "", [("weather", '{"city": "it\'s, \\\\"}')]),
        ("pythonic", "[a.b-c(x={'a': (1, true), 'b': null})]", "", [("a.b-c", '{"x": {"a": [1, true], "b": null}}')]),
        ("pythonic", "[time_in()] And more.", " And more.", [("time_in", "{}")]),
        ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
        ("pythonic", "[nobody(a=1)]", "[nobody(a=1)]", []),
        ("pythonic", "[weather(city=open('x'))]", "open('x'))]", [("weather", '{"city": ')]),
        ("deepseek_v3", f"{CALLS}{FENCED}\n{FENCED}{END_CALLS}", "", [W, W]),
        (
            "deepseek_v31",
            f"Hm.{CALLS}{CALL}weather{SEP}{CITY}{END_CALL}{CALL}time_in{SEP}{ZONE}{END_CALL}{END_CALLS}",
            "Hm.",
            [W, T],
        ),
        ("deepseek_v31", f"{CALLS}{CALL}nobody{SEP}{{}}", f"{CALLS}{CALL}nobody{SEP}{{}}", []),
        ("deepseek_v3", f"{CALLS}{FENCED} more", " more", [W]),
    ],
)
def test_formats(style, text, content, calls):
    assert calls_in(style, text) == (content, calls)
    whole = taken_apart(calls_parser(CALL_STYLES[style], TOOLS, calls_max=100), text)  # a character at a time
    assert whole == (content, "", calls)


@pytest.mark.parametrize(
    "inside",
    [
        "{'name': 'weather'}",
        '{"name": "nobody", "arguments": {}}',
        '{"name": 5, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "weather", "arguments": "no json"}',
        '{"name": "weather", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
        '{"name": "weather",}',
        '{"name": "wea',
        '{"arguments": ' + "[" * (DEPTH_MAX + 1),
        "not json",
        "",
        "{}",
        "[]",
        "[[",
        '{"arguments": {"a": 1}, "arguments": {"b": 2}, "name": "weather"}',
        '{"name": "weather", "name": "time_in", "arguments": {}}',
    ],
)
def test_a_malformed_call_is_content(inside):
    for end in ("</tool_call>", ""):
        text = f"So: <tool_call>{inside}{end}"
        assert calls_in("hermes", text) == (text, [])


def test_a_call_that_breaks_inside_its_arguments_ends_there():
    """They have been sent: what is no JSON any more is content, and the next call is found."""
    content, calls = calls_in(
        "hermes", f'<tool_call>{{"name": "weather", "arguments": {{"a": oops}}}}</tool_call><tool_call>{A}'
    )
    assert calls == [("weather", '{"a": '), W]
    assert content == "oops}}</tool_call>"


def test_a_cut_answer_has_the_arguments_so_far():
    assert calls_in("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Os') == ("", [("weather", '{"city": "Os')])


def test_one_call_where_one_is_wanted():
    parser = calls_parser(CALL_STYLES["hermes"], TOOLS, calls_max=1)
    assert taken_apart(parser, [f"<tool_call>{A}</tool_call><tool_call>{B}"]) == ("", "", [W])
    assert parser.done


def test_arguments_stream_as_they_come():
    parser = calls_parser(CALL_STYLES["hermes"], TOOLS, calls_max=9)
    assert parser.feed('<tool_call>{"name": "weather", "argum') == []
    first, second = parser.feed('ents": {"ci')
    assert (first.name, first.arguments, second.name, second.arguments) == ("weather", "", None, '{"ci')
    assert [part.arguments for part in parser.feed('ty": "O')] == ['ty": "O']


# Thoughts


@pytest.mark.parametrize(
    ("is_open", "text", "content", "reasoning"),
    [
        (False, "<think>\nHm.\n\nYes.\n</think>\n\nFour.", "Four.", "Hm.\n\nYes."),
        (False, " \n<think></think>Four.", "Four.", ""),
        (False, "Four. <think>no</think>", "Four. <think>no</think>", ""),
        (False, "  Four.", "  Four.", ""),
        (True, "Hm.</think>Four.", "Four.", "Hm."),
        (True, "<think>Hm.</think>Four.", "Four.", "Hm."),
        (True, "Hm", "", "Hm"),
        (True, "a </thi", "", "a </thi"),
        (True, "a </b> c</think>\n", "", "a </b> c"),
        (False, "<thi", "<thi", ""),
    ],
)
def test_thoughts(is_open, text, content, reasoning):
    for pieces in ([text], text):
        parser = ThinkParser(THINK_STYLES["qwen3"], PlainParser(), is_open=is_open)
        assert taken_apart(parser, pieces) == (content, reasoning, [])


def test_thoughts_then_calls():
    rest = calls_parser(CALL_STYLES["hermes"], TOOLS, calls_max=9)
    text = f"<think>I could write <tool_call>.</think>\n\nOne moment.\n<tool_call>\n{A}\n</tool_call>"
    parsed = taken_apart(ThinkParser(THINK_STYLES["qwen3"], rest, is_open=False), [text])
    assert parsed == ("One moment.\n", "I could write <tool_call>.", [W])


def test_a_thought_nobody_wants_is_left_out():
    parser = ThinkParser(THINK_STYLES["qwen3"], PlainParser(), is_open=False, shown=False)
    assert taken_apart(parser, ["<think>Hm.</think>Four."]) == ("Four.", "", [])


# Any text, any cuts

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "```json", "```")
OTHER_MARKS = (
    CALLS,
    END_CALLS,
    CALL,
    SEP,
    END_CALL,
    "<function=",
    "</function>",
    "<parameter=",
    "</parameter>",
    "<|python_start|>",
)
BITS = ("name", '"name": ', '"weather"', "weather", '"arguments": ', "{}", "-1.5e3", "tru", "null", "\\u00", *'{}[]",:;< \n\\')
OTHER_BITS = (
    "<function=weather>",
    "<parameter=city>",
    "<parameter=days>",
    "[weather(",
    "city=",
    "'",
    ")",
    "]",
    "True",
    f"{CALL}weather{SEP}",
)
FRAGMENTS = st.sampled_from([*MARKS, *BITS, A, B]) | st.sampled_from([*OTHER_MARKS, *OTHER_BITS, XML, PYTHON, FENCED])
TEXTS = st.one_of(st.lists(FRAGMENTS, max_size=25).map("".join), st.text(max_size=40))
STYLES = st.sampled_from([*CALL_STYLES, None])
THINKS = st.sampled_from([None, ("qwen3", False), ("qwen3", True), ("deepseek_r1", False), ("mistral", True)])


def a_parser(style, think):
    rest = PlainParser() if style is None else calls_parser(CALL_STYLES[style], TOOLS, calls_max=4)
    return rest if think is None else ThinkParser(THINK_STYLES[think[0]], rest, is_open=think[1])


@MANY
@given(text=TEXTS, style=STYLES, think=THINKS, data=st.data())
def test_any_cut_gives_the_same_parts(text, style, think, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = taken_apart(a_parser(style, think), [text])
    assert taken_apart(a_parser(style, think), pieces) == whole
    assert taken_apart(a_parser(style, think), text) == whole


@MANY
@given(text=TEXTS, style=st.sampled_from(sorted(CALL_STYLES)))
def test_nothing_is_lost_without_a_call(text, style):
    content, calls = calls_in(style, text)
    assert calls or content == text


@MANY
@given(value=st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
                          lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)),
       indent=st.sampled_from([None, 1]), more=st.text(max_size=3))  # fmt: skip
def test_the_scanner_knows_json(value, indent, more):
    text = json.dumps({"a": value}, indent=indent, ensure_ascii=False)
    scan, at, event = JsonScan(), 0, None
    while event not in ("end", "broken"):
        event, at = scan.step(text + more, at)
        assert event is not None
    assert (event, at) == ("end", len(text))


@MANY
@given(text=st.text(alphabet='{}[]",:0123456789.eE+-truefalsn\\u \n', max_size=30).map(lambda inside: "{" + inside))
def test_the_scanner_takes_what_python_takes(text):
    try:
        value, end = json.JSONDecoder().raw_decode(text)
        expected = end if isinstance(value, dict) else None
    except ValueError:
        expected = None
    scan, at, event = JsonScan(), 0, "key"
    while event not in ("end", "broken", None):
        event, at = scan.step(text, at)
    assert (at if event == "end" else None) == expected


def test_a_hostile_text_is_held_within_a_bound():
    """Arguments before a name that never comes: given back as content once there are too many."""
    parser = calls_parser(CALL_STYLES["hermes"], TOOLS, calls_max=4)
    begin = '<tool_call>{"arguments": {"a": "'
    parser.feed(begin)
    said = sum(len(part.text) for _ in range(3 * HELD_CHARS_MAX // 4096) for part in parser.feed("x" * 4096))
    assert said > HELD_CHARS_MAX
    parser = calls_parser(CALL_STYLES["llama3_json"], TOOLS, calls_max=4)
    text = "{" + " " * (2 * HELD_CHARS_MAX)
    assert taken_apart(parser, [text[i : i + 1000] for i in range(0, len(text), 1000)]) == (text, "", [])


@pytest.mark.parametrize(
    ("style", "begin", "more"),
    [
        ("qwen3_coder", "<tool_call>", " "),
        ("qwen3_coder", "<function=weather><parameter=days>", "1"),
        ("pythonic", "[", " "),
        ("pythonic", "[weather(city='", "x"),
        ("deepseek_v3", f"{CALLS}{CALL}", "x"),
    ],
)
def test_other_formats_are_held_within_a_bound(style, begin, more):
    whole = taken_apart(calls_parser(CALL_STYLES[style], TOOLS, calls_max=4), [begin + more * (2 * HELD_CHARS_MAX)])
    parser = calls_parser(CALL_STYLES[style], TOOLS, calls_max=4)
    pieces = [begin, *[more * 4096] * (2 * HELD_CHARS_MAX // 4096)]
    said = sum(len(part.text) for piece in pieces for part in parser.feed(piece) if isinstance(part, Content))
    assert said > HELD_CHARS_MAX / 2
    assert taken_apart(calls_parser(CALL_STYLES[style], TOOLS, calls_max=4), pieces) == whole


def test_a_text_of_xml_streams_as_it_comes():
    parser = calls_parser(CALL_STYLES["qwen3_coder"], TOOLS, calls_max=9)
    told = [
        [part.arguments for part in parser.feed(piece)]
        for piece in ("<function=weather><parameter=city>\nOs", "lo\n</", "b>\n</parameter>")
    ]
    assert ["".join(each) for each in told] == ['{"city": "Os', "lo", '\\n</b>"']


# Which template speaks which


@pytest.mark.parametrize(
    ("source", "calls", "thoughts"),
    [
        ("{{ tools }} <tool_call> </tool_call>", "hermes", None),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral", None),
        ("{{ tools }} <|start_header_id|>ipython", "llama3_json", None),
        ("{{ tools }} <|python_tag|>", "llama3_json", None),
        ("{{ tools }} <tool_call> {{ enable_thinking }} </think>", "hermes", "qwen3"),
        ("{{ messages }}", "json", None),
        ("[THINK][/THINK]", "json", "mistral"),
        ("{{ tools }} <tool_call>\n<function=example>", "qwen3_coder", None),
        (f"{{{{ tools }}}} {CALLS}{CALL} ```json", "deepseek_v3", None),
        (f"{{{{ tools }}}} {CALLS}{CALL} </think>", "deepseek_v31", "qwen3"),
        ("{{ tools }} in the format [func_name1(params_name1=params_value1...)]", "pythonic", None),
        ("{{ tools }} <|header_start|> <|python_start|>", "pythonic", None),
    ],
)
def test_chosen_from_the_template(source, calls, thoughts):
    style = answer_style((source,))
    assert style.calls.name == calls
    assert (style.thoughts.name if style.thoughts else None) == thoughts
    assert style.template_knows_tools is ("tools" in source)


def test_chosen_by_name():
    style = answer_style(("",), tool_calls="mistral", reasoning="deepseek_r1")
    assert (style.calls.name, style.thoughts.name) == ("mistral", "deepseek_r1")
    assert answer_style(("</think>",), tool_calls="none", reasoning="none") == answer_style(("",), tool_calls="none")
    assert answer_style(("",), frozenset({"<think>", "</think>"})).thoughts.name == "qwen3"
    assert answer_style(("",), tool_calls="qwen3_xml").calls.name == "qwen3_coder"
    with pytest.raises(InvalidConfig, match="--tool-call-parser xml"):
        answer_style(("",), tool_calls="xml")
