"""gpt-oss' channels: what each message becomes, and that neither cuts nor malformed headers lose or invent anything."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parsers import taken_apart

from baton.errors import InvalidConfig
from baton.text.harmony_marks import CALL, CHANNEL, END, MARKS, MESSAGE, RETURN, START
from baton.text.parsers.harmony import HEADER_CHARS_MAX, HarmonyParser
from baton.text.parsers.styles import answer_style

TOOLS = ("weather", "a.b-c")
TURN = f"{START}assistant"
ANALYSIS, COMMENTARY, FINAL = (f"{CHANNEL}{name}{MESSAGE}" for name in ("analysis", "commentary", "final"))
TO_WEATHER = f"{CHANNEL}commentary to=functions.weather <|constrain|>json{MESSAGE}"
OSLO = '{"city": "Oslo"}'
W = ("weather", OSLO)


def parser(**more) -> HarmonyParser:
    return HarmonyParser(TOOLS, **{"calls_max": 100, "begun": "assistant", **more})


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (f"{ANALYSIS}Hm.{END}{TURN}{FINAL}Four.{RETURN}", "Four.", "Hm.", []),
        (f"{ANALYSIS}Hm.{END}{TURN}{FINAL}Four.", "Four.", "Hm.", []),  # the end of text has no text
        (f"{ANALYSIS}a{END}{TURN}{ANALYSIS}b{END}{TURN}{FINAL}c", "c", "a\nb", []),
        (f"{ANALYSIS}Hm", "", "Hm", []),
        (f"{FINAL}Four.", "Four.", "", []),
        (f"{ANALYSIS}Hm.{END}{TURN}{TO_WEATHER}{OSLO}{CALL}", "", "Hm.", [W]),
        (f"{ANALYSIS}Hm.{END}{TURN}{COMMENTARY}One moment.{END}{TURN}{TO_WEATHER}{OSLO}", "One moment.", "Hm.", [W]),
        (f"{COMMENTARY}Plan.{END}{TURN}{FINAL}Done.", "Plan.\nDone.", "", []),
        (f"{TO_WEATHER}{OSLO}{END}{TURN}{TO_WEATHER}{OSLO}", "", "", [W, W]),
        # Other ways to write a header
        (f" to=functions.weather{CHANNEL}commentary json{MESSAGE}{OSLO}", "", "", [W]),
        (f"{CHANNEL}analysis to=functions.weather code{MESSAGE}{OSLO}{CALL}", "", "", [W]),
        (f"{CHANNEL}commentary to=a.b-c{MESSAGE}{CALL}", "", "", [("a.b-c", "{}")]),
        (f"{CHANNEL}commentary to=functions.a.b-c<|constrain|>json{MESSAGE} {{}} ", "", "", [("a.b-c", "{}")]),
        (f"{MESSAGE}Four.", "Four.", "", []),
        (f"{CHANNEL}final json{MESSAGE}{OSLO}", OSLO, "", []),
        # Not a call of a tool that there is
        (f"{CHANNEL}commentary to=functions.nobody json{MESSAGE}{OSLO}", OSLO, "", []),
        (f"{CHANNEL}analysis to=python code{MESSAGE}print(1){CALL}", "", "print(1)", []),
        (f"{TO_WEATHER}Oslo", "Oslo", "", []),
        (f'{TO_WEATHER}{{"city": oops}}{END}{TURN}{FINAL}No.', "oops}\nNo.", "", [("weather", '{"city": ')]),
        (f"{TO_WEATHER}{OSLO} and more", "and more", "", [W]),
        (f'{TO_WEATHER}{{"city": "Os', "", "", [("weather", '{"city": "Os')]),
        # Headers that are none
        ("Four.", "Four.", "", []),
        (f"  Four. {END}", "  Four. ", "", []),
        (f"{CHANNEL}commentary?{END}{TURN}{FINAL}Four.", "Four.", "", []),
        (f"{CHANNEL}??{END}{TURN}{FINAL}Four.", "Four.", "", []),
        (f"{CHANNEL}Sure, it is four.{RETURN}", "Sure, it is four.", "", []),
        (f"{CHANNEL}commentary{CHANNEL}commentary{MESSAGE}Four.", "Four.", "", []),
        (f"{ANALYSIS}Hm.{CHANNEL}final{MESSAGE}Four.", "Four.", "Hm.", []),
        (f"{ANALYSIS}Hm.{TURN}{FINAL}Four.", "Four.", "Hm.", []),
        (f"{ANALYSIS}Hm.{END}{TURN}{CHANNEL}comm", "", "Hm.", []),
        (f"{ANALYSIS}Hm.{END}<|sta", "", "Hm.", []),
        (f"{FINAL}a <|b|> <|en", "a <|b|> <|en", "", []),
    ],
)
def test_messages(text, content, reasoning, calls):
    for pieces in ([text], text):
        assert taken_apart(parser(), pieces) == (content, reasoning, calls)


def test_the_prompt_may_end_inside_a_message():
    for begun, expected in (("assistant<|channel|>final<|message|>It is", (" four", "", [])),
                            (f"assistant{ANALYSIS}", ("", " four", []))):  # fmt: skip
        assert taken_apart(parser(begun=begun), " four") == expected
    assert taken_apart(parser(begun="assistant<|channel|>"), f"analysis{MESSAGE}Hm.") == ("", "Hm.", [])


def test_thoughts_left_out_or_left_in():
    text = f"{ANALYSIS}Hm.{END}{TURN}{FINAL}Four."
    assert taken_apart(parser(shown=False), [text]) == ("Four.", "", [])
    assert taken_apart(parser(separate=False), [text]) == (f"{ANALYSIS}Hm.{END}\nFour.", "", [])


def test_in_reasoning_is_the_analysis_alone():
    made, seen = parser(), []
    for piece in (CHANNEL, "analysis", MESSAGE, "Hm", END, START, "assistant", COMMENTARY, "Plan", END, FINAL, "Four"):
        made.feed(piece)
        seen.append(made.in_reasoning)
    assert seen == [False, False, True, True, *[False] * 8]


def test_a_call_ends_the_answer_where_the_model_says_so():
    """Whether <|call|> is an end of text is in files that not everybody has (GGUF)."""
    made = parser()
    made.feed(f"{TO_WEATHER}{OSLO}")
    assert not made.done
    made.feed(CALL)
    assert made.done
    made = parser(calls_max=1)
    made.feed(f"{TO_WEATHER}{OSLO}")
    assert made.done


def test_text_streams_as_it_comes():
    made = parser()
    assert made.feed(f"{CHANNEL}anal") == []
    told = [[part.text for part in made.feed(piece)] for piece in (f"ysis{MESSAGE}I n", "eed", " it<|e", "nd|>")]
    assert told == [["I n"], ["eed"], [" it"], []]
    made.feed(f"{TURN}{TO_WEATHER}")
    assert "".join(part.arguments for part in made.feed('{"ci')) == '{"ci'


def test_a_header_without_an_end_is_held_within_a_bound():
    made = parser()
    said = sum(len(part.text) for _ in range(20) for part in made.feed(f"{CHANNEL}{'x' * 100}"))
    assert said >= 20 * 100 - 2 * HEADER_CHARS_MAX


FRAGMENTS = st.sampled_from(
    [*MARKS, TURN, ANALYSIS, FINAL, TO_WEATHER, OSLO, "to=functions.weather", " to=", "analysis", "final", "json", "{", "}"]
) | st.sampled_from(
    ["a b", "?", " ", "\n", "<|", "|>", '"', "x" * 100, "<|end|", "é"],
)
TEXTS = st.one_of(st.lists(FRAGMENTS, max_size=25).map("".join), st.text(max_size=40))


@settings(max_examples=500, deadline=None)
@given(
    text=TEXTS,
    begun=st.sampled_from(["assistant", "", "assistant<|channel|>", f"assistant{FINAL}x", f"assistant{ANALYSIS}"]),
    separate=st.booleans(),
    calls_max=st.sampled_from([1, 3]),
    data=st.data(),
)
def test_any_cut_gives_the_same_parts(text, begun, separate, calls_max, data):
    def apart(pieces):
        return taken_apart(parser(begun=begun, separate=separate, calls_max=calls_max), pieces)

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert apart(pieces) == apart([text]) == apart(text)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40).filter(lambda text: "<|" not in text and text.strip()))
def test_a_text_without_marks_is_content(text):
    content, reasoning, calls = taken_apart(parser(), text)
    assert (reasoning, calls) == ("", [])
    assert content == text or text.split()[0].startswith(("a", "t", "<"))  # "assistant", "to=": might have been a header


@pytest.mark.parametrize(
    ("source", "flags", "expected"),
    [
        (f"{{{{ tools }}}} {START}assistant{FINAL}", {}, (True, True)),
        (f"{{{{ tools }}}} {FINAL}", {"tool_calls": "none"}, (False, True)),
        (f"{{{{ tools }}}} {FINAL}", {"reasoning": "none"}, (True, False)),
        (f"{{{{ tools }}}} {FINAL}", {"tool_calls": "none", "reasoning": "none"}, None),
        (f"{{{{ tools }}}} {FINAL}", {"tool_calls": "hermes"}, None),
        ("", {"tool_calls": "openai", "reasoning": "openai_gptoss"}, (True, True)),
        ("", {"reasoning": "gpt-oss"}, (True, True)),
        ("<think> <tool_call> {{ tools }}", {}, None),
    ],
)
def test_chosen_from_the_template_or_by_name(source, flags, expected):
    style = answer_style((source,), **flags)
    assert (None if style.harmony is None else (style.harmony.calls, style.harmony.thoughts)) == expected
    assert style.harmony is None or (style.calls, style.thoughts) == (None, None)


def test_half_of_it_cannot_be_chosen():
    with pytest.raises(InvalidConfig, match="do not go together"):
        answer_style(("",), tool_calls="hermes", reasoning="harmony")
