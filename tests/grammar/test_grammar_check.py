"""Grammars are compiled in a process that can be killed: what comes from a client hurts nobody."""

from __future__ import annotations

import json
import os
import signal

import pytest

from baton.errors import BadGrammar, Unavailable
from baton.grammar import check_process
from baton.grammar.check_process import GRAMMARS_MAX, GrammarCheck
from baton.protocol.grammar import Grammar
from baton.text import helper

TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>"]


@pytest.fixture(scope="module")
def check():
    made = GrammarCheck(lambda: (TOKENS, [256], 257))
    yield made
    made.close()


def schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def nested(depth: int) -> dict:
    inner: dict = {"type": "string"}
    for _ in range(depth):
        inner = {"type": "array", "items": inner}
    return inner


def test_it_comes_back_in_a_form_that_workers_take(check):
    assert check.check(Grammar("json_object", ends=(3,))) == Grammar("json_schema", '{"type":"object"}', ends=(3,))
    assert check.check(Grammar("gbnf", 'root ::= "x"')).kind == "lark"
    assert check.check(Grammar("regex", "")) == Grammar("regex", "")  # an empty answer, and nothing else


RULES = [f'r{i}: "k{i}" r{(i * 7 + 1) % 20000} | r{(i + 1) % 20000} r{i} | "z"' for i in range(20000)]
PRODUCT = [{"anyOf": [{"properties": {f"a{i}": {"const": j}}} for j in range(3)]} for i in range(12)]
HOSTILE = {
    "many rules": Grammar("lark", "start: r0\n" + "\n".join(RULES)),
    "many alternatives": schema({"allOf": PRODUCT}),
    "many properties": schema({"type": "object", "properties": {f"property {i}": {"type": "string"} for i in range(20_000)}}),
    "no way out": schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    "deep": Grammar("json_schema", json.dumps(nested(400))),
    "deep groups": Grammar("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000 + "\n"),
    "deep regex": Grammar("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "deep gbnf": Grammar("gbnf", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_ones_are_refused_and_the_next_is_not(check, name):
    with pytest.raises(BadGrammar):
        check.check(HOSTILE[name])
    assert check.check(Grammar("regex", f"after {name}")).kind == "regex"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a|b)*a(a|b){20}"),  # 2^20 states, if they were made
        Grammar("regex", "((a+)+)+b"),
        Grammar("regex", "a{1000}{1000}"),
        schema({"type": "string", "pattern": "^(x+x+)+y$"}),
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}),
        Grammar("lark", 'start: s\ns: s s s | s s | "a" | "b" | "ab"\n'),
        Grammar("lark", 'start: start "a" | "a"\n'),
        Grammar("lark", '%llguidance {"no_forcing": false}\nstart: "a"\n'),
    ],
    ids=str,
)
def test_what_only_looks_hostile_is_taken(check, grammar):
    assert check.check(grammar)


def test_one_that_takes_too_long_is_stopped(check, monkeypatch):
    slow = GrammarCheck(lambda: (TOKENS, [256], 257), check_seconds_max=0.0)
    try:
        with pytest.raises(BadGrammar, match="too much time"):
            slow.check(Grammar("regex", "abc"))
    finally:
        slow.close()


def test_one_that_takes_a_processor_for_long_is_stopped_before_it_is_done():
    """Whatever time is left on the clock, which is there for a machine that is busy with others. It would take some seconds."""
    patient = GrammarCheck(lambda: (TOKENS, [256], 257), check_seconds_max=60.0)
    try:
        with pytest.raises(BadGrammar, match="too much time"):  # and not: it takes 4 s to compile
            patient.check(Grammar("regex", "a?" * 16_000))
        assert patient.check(Grammar("regex", "after it")).kind == "regex"
    finally:
        patient.close()


CHAIN = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4500)) + 'r4500: "a"\n'


def test_one_that_ends_the_child_ends_one_and_not_two(check, monkeypatch):
    """A stack that is too small for it is so in the next child."""
    started: list[str] = []

    class Counted(helper._Child):
        def __init__(self, module, *more):
            started.append(module)
            super().__init__(module, *more)

    check.check(Grammar("regex", "it is there"))
    monkeypatch.setattr(helper, "_Child", Counted)
    with pytest.raises(BadGrammar, match="too much time or memory"):
        check.check(Grammar("lark", CHAIN))
    assert not started
    assert check.check(Grammar("regex", "after the chain")).kind == "regex"
    assert len(started) == 1


def test_a_child_that_is_gone_is_replaced(check, monkeypatch):
    check.check(Grammar("regex", "once"))
    os.kill(check.helper.pid, signal.SIGKILL)
    assert check.check(Grammar("regex", "once")).kind == "regex"  # known
    assert check.check(Grammar("regex", "twice")).kind == "regex"


def test_a_child_that_stands_still_is_replaced_and_the_grammar_is_not_to_blame():
    """Found by an audit: a process that was stopped for 5 s had its grammar refused, by everybody, from then on."""
    check = GrammarCheck(lambda: (TOKENS, [256], 257), check_seconds_max=2.0)
    try:
        check.check(Grammar("regex", "once"))
        os.kill(check.helper.pid, signal.SIGSTOP)
        assert check.check(Grammar("regex", "twice")).kind == "regex"
    finally:
        check.close()


def test_where_children_stand_still_again_and_again_nothing_is_said_about_the_grammar(monkeypatch):
    class Stopped(helper._Child):
        def __init__(self, *settings):
            super().__init__(*settings)
            self._wait_ready(self._start_with())
            os.kill(self.pid, signal.SIGSTOP)

    check = GrammarCheck(lambda: (TOKENS, [256], 257), check_seconds_max=1.0)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(helper, "_Child", Stopped)
            with pytest.raises(Unavailable, match="does not answer"):
                check.check(Grammar("regex", "twice"))
        assert check.check(Grammar("regex", "twice")).kind == "regex"
    finally:
        check.close()


def test_what_is_known_is_bounded(check, monkeypatch):
    monkeypatch.setattr(check_process, "GRAMMARS_MAX", 4)
    for number in range(9):
        check.check(Grammar("regex", f"number {number}"))
    assert len(check._known) <= GRAMMARS_MAX
    assert check.knows(Grammar("regex", "number 8"))
    assert not check.knows(Grammar("regex", "number 0"))
