"""The white space of a JSON answer is learned from the answer, and guessed where it goes on."""

from __future__ import annotations

import json
import random

import pytest

from baton.grammar.json_layout import SPACES_MAX, JsonLayout, Layout


def guessed(text: str, following: str, shared: Layout | None = None) -> str:
    layout = JsonLayout(shared)
    layout.read(text.encode())
    return layout.guess(ord(following)).decode()


def test_without_an_earlier_place_it_is_that_of_json_dumps():
    assert [guessed("{", '"'), guessed('{"a"', ":"), guessed('{"a":', "1"), guessed('{"a": 1', ",")] == ["", "", " ", ""]
    assert [guessed('{"a": 1,', '"'), guessed('{"a": [', "1"), guessed('{"a": [1,', "2")] == [" ", "", " "]
    assert [guessed('{"a": 1', "}"), guessed('{"a": [1', "]")] == ["", ""]


def test_white_space_that_is_half_written_is_completed():
    assert guessed("{\n ", '"') == " "
    assert guessed('{\n  "a": {\n   ', '"') == " "
    assert guessed('{\n  "a": {\n      ', '"') == "", "it is more than was guessed"
    assert guessed('{\n  "a": 1, ', '"') == "", "another layout"


def test_an_indentation_is_that_of_its_depth():
    assert guessed('{\n   "a": {', '"') == "\n      "
    assert guessed('{\n\t"a": {\n\t\t"b": 1', "}") == "\n\t"
    assert guessed('{\n "a": {\n  "b": 1\n }', "}") == "\n"


def test_places_have_their_own():
    text = '{\n  "a": [1,2], "b" :"x"'
    assert guessed(f"{text},", '"') == " "
    assert guessed(text, "}") == "", "as at the last comma of this object"
    assert guessed('{\n  "a": [1, 2], "b": [', "3") == ""
    assert guessed('{\n  "a": [1, 2]', "}") == "\n", "whatever the array did"
    assert guessed(f'{text}, "c"', ":") == " "
    assert guessed(f'{text}, "c" :', "1") == ""
    assert guessed(f'{text}, "c" :[1,', "2") == ""


def test_a_layout_that_changes_is_learned_again():
    text = '{\n  "a": 1,\n  "b": 2'
    assert guessed(f"{text},", '"') == "\n  "
    assert guessed(f'{text}, "c":3,', '"') == " "
    assert guessed(f'{text}, "c":3, "d":', "1") == ""
    assert guessed(f'{text}, "c":3,\n    "d": 4,', '"') == "\n    "


@pytest.mark.parametrize("value", [",\n        ", ": {   1", "\\\\", '\\"', '\\",\n   \\"', '\\\\\\"  ,  [  ]', "{ [", "} ]"])
def test_nothing_is_learned_inside_of_strings(value):
    text = '{\n  "a": "' + value
    assert guessed(f'{text}"', ",") == ""
    assert guessed(f'{text}",', '"') == "\n  "
    assert guessed(f'{text}", "b":', "1") == " "
    layout = JsonLayout()
    layout.read(text.encode())
    assert layout.in_string


def test_empty_objects_and_arrays_have_no_layout():
    assert guessed('{"a":{}, "b":{', '"') == ""
    assert guessed('{"a": {', "}") == ""
    assert guessed('{\n  "a": [],\n  "b": [', "]") == ""


def test_the_layout_of_earlier_answers_holds_until_another_one_is_shown():
    shared: Layout = {}
    JsonLayout(shared).read(b'{\n    "a": 1,\n    "b":2\n}')
    assert guessed("{", '"', shared.copy()) == "\n    "
    assert guessed('{\n    "a":', "1", shared.copy()) == ""
    assert guessed('{"a": 1', "}", shared.copy()) == "", "this answer has no line breaks"
    assert guessed('{"a": 1,', '"', shared.copy()) == " "
    assert guessed('{\n "a": 1,', '"', shared.copy()) == "\n "


def test_a_fork_changes_neither_its_reader_nor_what_is_shared():
    shared: Layout = {}
    layout = JsonLayout(shared)
    layout.read(b'{\n  "a": "x')
    before = shared.copy()
    fork = layout.fork()
    fork.read(b'",     "b":5,{[["')
    assert shared == before
    assert layout.in_string
    layout.read(b'"')
    assert layout.guess(ord("}")) == b"\n"
    assert layout.guess(ord(",")) == b""


def test_much_white_space_is_not_stored():
    layout = JsonLayout()
    layout.read(b"{" + b" " * 100_000)
    assert len(layout._spaces) == SPACES_MAX


def test_no_guess_is_longer_than_what_is_read():
    """A wide indentation was learned, and the next line breaks are no multiples of the depth: the guess grew with the depth."""
    deep = "[\n" + 100 * " " + "[" + 998 * "\n [" + "\n"
    assert len(guessed(deep, "[")) <= SPACES_MAX
    assert len(guessed("[\n" + 60 * " " + "[\n", "[")) == 120


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"indent": 2},
        {"indent": "\t"},
        {"indent": 1, "separators": (" ,", " : ")},
        {"separators": (",", ":")},
        {"separators": (",  ", ":  ")},
    ],
)
def test_any_layout_is_guessed_where_it_was_written_before(seed, layout):
    """The text of a drawn value, read a second time with what the first reading has learned: all white space is as guessed."""
    rng = random.Random(seed)
    value = {"first": [drawn(rng, 0)], "list": [1, 2], "object": {"a": 1, "b": [3, 4]}, "last": drawn(rng, 0)}
    text = json.dumps(value, **layout).encode()
    shared: Layout = {}
    JsonLayout(shared).read(text)
    reader, at = JsonLayout(shared), 0
    while at < len(text):
        begin = at
        if reader.between:
            while text[at : at + 1].isspace():
                at += 1
            assert reader.guess(text[at]) == text[begin:at], text[:begin]
        at += 1
        reader.read(text[begin:at])


def drawn(rng: random.Random, depth: int) -> object:
    match rng.randrange(5 if depth < 3 else 3):
        case 0:
            return rng.choice([1, -2.5, True, None])
        case 1:
            return rng.choice(["", "a, b", '"', "\\", "[ {", "line\nbreak"])
        case 2:
            return rng.choice([[], {}])
        case 3:
            return [drawn(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    return {f"k{place}": drawn(rng, depth + 1) for place in range(rng.randint(1, 3))}
