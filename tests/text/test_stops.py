"""Stop strings against a naive oracle, over random texts, stops and cuts; and rows 65 and 66 of the bad inputs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from baton.errors import CallerError
from baton.text.stops import STOP_BYTES_MAX, STOPS_MAX, Fed, StopAutomaton, StopStrings


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first complete stop; of several complete at the same place the longest."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def held_back_oracle(text: str, stops: list[str]) -> str:
    """The longest end of `text` that begins a stop."""
    for start in range(len(text) + 1):
        if any(stop.startswith(text[start:]) for stop in stops):
            return text[start:]
    return ""


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


# Few letters, so that stops overlap with each other and with themselves.
texts = st.text("abé", max_size=30)
stop_lists = st.lists(st.text("abé", min_size=1, max_size=6), min_size=1, max_size=5)
cut_lists = st.lists(st.integers(0, 1000), max_size=10)


@given(texts, stop_lists, cut_lists, st.booleans())
@example("abcd", ["abcd", "bc"], [2], False)
@example("aabaab", ["aabaabb", "baa"], [], True)
def test_equals_the_oracle_however_the_text_is_cut(text, stops, cuts, include_stop):
    expected, expected_stop = oracle(text, stops)
    machine = StopStrings(stops, include_stop=include_stop)
    sent = ""
    for piece in pieces_of(text, cuts):
        fed = machine.feed(piece)
        sent += fed.text
        if fed.stop is not None:
            break
    sent += machine.flush()
    assert machine.stop == expected_stop
    assert sent == expected + (expected_stop if expected_stop and include_stop else "")


@given(texts, stop_lists, cut_lists)
def test_holds_back_exactly_what_could_become_a_stop(text, stops, cuts):
    machine, seen, sent = StopStrings(stops), "", ""
    for piece in pieces_of(text, cuts):
        fed = machine.feed(piece)
        seen, sent = seen + piece, sent + fed.text
        if fed.stop is not None:
            return
        assert sent == seen.removesuffix(held_back_oracle(seen, stops))


def test_nothing_leaks_past_the_stop():
    machine = StopStrings(["\n\n"])
    assert machine.feed("one\n") == Fed("one")
    assert machine.feed("\ntwo") == Fed("", "\n\n")
    assert machine.feed("three") == Fed("", "\n\n")
    assert machine.flush() == ""


def test_a_stop_that_is_the_whole_output():
    assert StopStrings(["whole"]).feed("whole") == Fed("", "whole")
    assert StopStrings(["whole"], include_stop=True).feed("whole") == Fed("whole", "whole")


def test_complete_first_wins_and_then_the_longest():
    assert StopStrings(["abcd", "bc"]).feed("abcd") == Fed("a", "bc")
    assert StopStrings(["c", "bc", "abc"]).feed("abc") == Fed("", "abc")


def test_without_stops_everything_passes_at_once():
    assert StopStrings([]).feed("text") == Fed("text")


def test_sequences_of_a_request_share_the_automaton():
    automaton = StopAutomaton(["ab"])
    first, second = StopStrings(automaton), StopStrings(automaton)
    assert first.feed("a") == Fed("")
    assert second.feed("b") == Fed("b")
    assert first.feed("b") == Fed("", "ab")


def test_work_is_linear_in_the_text(monkeypatch):
    """Counted, not timed: look-ups in the worst case for a re-scan, a long stop that nearly matches all the time."""
    stop = "a" * 1000 + "b"
    automaton = StopAutomaton([stop])
    falls = 0

    class Counted(list):
        def __getitem__(self, index):
            nonlocal falls
            falls += 1
            return super().__getitem__(index)

    automaton._fall_back = Counted(automaton._fall_back)
    machine, sent = StopStrings(automaton), 0
    for _ in range(50_000):
        sent += len(machine.feed("a").text)
    assert sent == 49_000
    assert falls <= 50_000


@pytest.mark.parametrize(
    ("stops", "word"),
    [
        ([""], "empty"),
        (["x", ""], r"stop\[1\]"),
        (["x" * 1_000_000], "longer"),
        (["é" * (STOP_BYTES_MAX // 2 + 1)], "longer"),
        ([str(n) for n in range(100_000)], "at most"),
        (["x"] * (STOPS_MAX + 1), "at most"),
        (["\ud800"], "surrogate"),
        (["secret", 5], "int"),
        ("abc", "list"),
    ],
)
def test_bad_stops_are_refused_without_repeating_them(stops, word):
    with pytest.raises(CallerError, match=word) as caught:
        StopStrings(stops)
    assert caught.value.http_status == 400
    assert len(str(caught.value)) < 200
    assert "secret" not in str(caught.value)


def test_the_longest_allowed_stops_work():
    stops = [chr(ord("a") + n) * STOP_BYTES_MAX for n in range(STOPS_MAX)]
    assert StopStrings(stops).feed("x" + stops[3]) == Fed("x", stops[3])


def test_a_match_that_is_complete_too_early_is_text_and_one_that_begins_early_is_found():
    stops = StopStrings(["STOP"])
    assert stops.feed("STOP, abST", may_end=False).text == "STOP, ab"
    fed = stops.feed("OPcd")
    assert (fed.text, fed.stop) == ("", "STOP")
    ends = StopStrings(["aa"])
    assert ends.feed("aa", may_end=False).stop is None
    assert ends.feed("a") == ("a", "aa"), "the match that is complete here begins before"
