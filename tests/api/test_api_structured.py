"""The fields that constrain an answer: what the engine is asked, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event

import pytest
from api_fakes import says

from baton.protocol.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
AS_SCHEMA = ("json_schema", TEXT)
ANY_OBJECT = ("json_schema", '{"type":"object"}')
GBNF = 'root ::= "yes" | "no"'

ASKED = [
    ("response_format", {"type": "json_object"}, ANY_OBJECT),
    ("response_format", {"type": "json_object", "schema": SCHEMA}, AS_SCHEMA),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}, AS_SCHEMA),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, AS_SCHEMA),
    ("response_format", {"type": "json_schema", "schema": SCHEMA}, AS_SCHEMA),
    ("structured_outputs", {"json": SCHEMA}, AS_SCHEMA),
    ("structured_outputs", {"json": TEXT}, AS_SCHEMA),
    ("structured_outputs", {"regex": "[0-9]+", "choice": None}, ("regex", "[0-9]+")),
    ("structured_outputs", {"json_object": True}, ANY_OBJECT),
    ("structured_outputs", {"choice": ["yes", "no"]}, ("lark", None)),
    ("structured_outputs", {"grammar": GBNF}, ("lark", None)),
    ("guided_json", SCHEMA, AS_SCHEMA),
    ("guided_json", TEXT, AS_SCHEMA),
    ("guided_regex", "[0-9]+", ("regex", "[0-9]+")),
    ("guided_choice", ["yes", "no"], ("lark", None)),
    ("guided_grammar", GBNF, ("lark", None)),
    ("guided_grammar", 'start: "yes" | "no"\n', ("lark", 'start: "yes" | "no"\n')),
    ("guided_json_object", True, ANY_OBJECT),
    ("grammar", GBNF, ("lark", None)),
    ("ebnf", GBNF, ("lark", None)),
    ("json_schema", SCHEMA, AS_SCHEMA),
    ("json_schema", TEXT, AS_SCHEMA),
    ("regex", "a|b", ("regex", "a|b")),
]


@pytest.mark.parametrize(("field", "value", "expected"), ASKED)
def test_what_the_engine_is_asked(server, text, complete, field, value, expected):
    answer = complete("x", **{field: value})
    assert answer.status_code == 200, answer.text
    asked = server.engine.requests[0].sampling.grammar
    assert asked.kind == expected[0]
    assert expected[1] is None or asked.text == expected[1]
    assert asked.ends == text.tokenizer.eos_ids
    assert answer.headers.get("x-baton-ignored") is None


def test_chats_too(server, chat):
    assert chat("x", response_format={"type": "json_object"}).status_code == 200
    assert server.engine.requests[0].sampling.grammar.kind == "json_schema"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("response_format", {"type": "text"}), ("grammar", ""), ("json_schema", {}), ("guided_json_object", False)),
        *(("structured_outputs", {}), ("structured_outputs", {"json": None}), ("guided_choice", None), ("regex", "")),
    ],
)
def test_values_that_constrain_nothing(server, complete, field, value):
    assert complete("x", **{field: value}).status_code == 200
    assert server.engine.requests[0].sampling.grammar is None


REFUSED = [
    ("response_format", {"type": "xml"}, None),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": "yes"}}, None),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": 7}}, None),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}, "invalid_grammar"),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "invalid_grammar"),
    ("structured_outputs", {"structural_tag": {}}, "unsupported"),
    ("structured_outputs", [], None),
    ("guided_json", "{", "invalid_grammar"),
    ("guided_json", 7, None),
    ("guided_regex", "(a", "invalid_grammar"),
    ("guided_regex", 5, None),
    ("guided_choice", [], None),
    ("guided_choice", ["a", 1], None),
    ("guided_choice", "a", None),
    ("guided_choice", ["x"] * 1025, None),
    ("guided_grammar", "root ::= nowhere", "invalid_grammar"),
    ("grammar", "x" * 70_000, None),
    ("guided_json_object", "yes", None),
]


@pytest.mark.parametrize(("field", "value", "code"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(server, complete, field, value, code):
    answer = complete("x", **{field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert error["code"] == (code or error["code"])
    assert not server.engine.requests


def test_two_constraints_are_refused_unless_they_are_the_same(server, complete):
    answer = complete("x", guided_regex="a", response_format={"type": "json_object"})
    assert "give one of them" in answer.json()["error"]["message"]
    assert complete("x", guided_json=SCHEMA, response_format={"type": "json_schema", "schema": SCHEMA}).status_code == 200


def test_ignore_eos_only_says_how_late_the_end_may_come(server, text, complete):
    complete("x", guided_regex="a+", ignore_eos=True, stop_token_ids=[77])
    sampling = server.engine.requests[0].sampling
    assert sampling.grammar == Grammar("regex", "a+", text.tokenizer.eos_ids, ends_late=True)
    assert set(sampling.stop_token_ids) == {*text.tokenizer.eos_ids, 77}


def test_stop_strings_and_echo_go_with_it(server, text, complete):
    server.engine.script.reply = says(text, '{"a": 12}')
    answer = complete("Say: ", guided_json=SCHEMA, stop=["2"], echo=True, max_tokens=40).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ('Say: {"a": 1', "stop")


def test_a_grammar_is_not_compiled_on_the_loop(server, complete, monkeypatch):
    """The name may be hidden in an escape: what is waited for decides, not what the body looks like."""
    import threading

    front, threads = server.app.state.front, []
    inner = front.grammars.check

    def check(grammar):
        threads.append(threading.current_thread().name)
        return inner(grammar)

    monkeypatch.setattr(front.grammars, "check", check)
    assert complete("x", guided_regex="new one [0-9]").status_code == 200
    assert threads[0].startswith("baton-grammars")  # and not one that texts need
    assert complete("x", guided_regex="new one [0-9]").status_code == 200
    assert not any(name.startswith("baton") for name in threads[1:])  # known: nothing is waited for


def test_grammars_that_take_long_hold_up_no_other_request(server, http, chat, monkeypatch):
    """There are two threads for texts: two slow grammars once stopped every chat."""
    grammars = server.app.state.front.grammars
    asked, go_on, check = Queue[str](), Event(), grammars.check

    def slow(grammar: Grammar) -> Grammar:
        if not grammars.knows(grammar):
            asked.put(grammar.text)
            assert go_on.wait(30)
        return check(grammar)

    monkeypatch.setattr(grammars, "check", slow)
    with ThreadPoolExecutor(4) as clients:
        bodies = [{"prompt": "x", "max_tokens": 4, "regex": f"[0-9]{{{number}}}"} for number in range(1, 5)]
        answers = [clients.submit(http.post, server.url + "/v1/completions", json=body) for body in bodies]
        try:
            asked.get(timeout=30)
            assert chat("hello").status_code == 200
            assert not any(answer.done() for answer in answers)
        finally:
            go_on.set()
        assert [answer.result(30).status_code for answer in answers] == [200] * 4
