"""The fields that constrain an answer: what the engine is asked, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Event

import pytest
from api_fakes import Script, says

from baton.protocol.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
AS_SCHEMA = ("json_schema", TEXT)
ANY_OBJECT = ("json_schema", '{"type":"object"}')
BAD = {"not": {}}
MESSAGES = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
GBNF = 'root ::= "yes" | "no"'

ASKED = [
    ("response_format", {"type": "json_object"}, ANY_OBJECT),
    ("response_format", {"type": "json_object", "schema": SCHEMA}, AS_SCHEMA),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}, AS_SCHEMA),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, AS_SCHEMA),
    ("response_format", {"type": "json_schema", "schema": SCHEMA}, AS_SCHEMA),
    ("response_format", {"type": "json_object", "value": SCHEMA}, AS_SCHEMA),  # TGI's
    ("response_format", {"type": "json", "value": SCHEMA}, AS_SCHEMA),
    ("response_format", {"type": "json", "value": TEXT}, AS_SCHEMA),
    ("response_format", {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}, AS_SCHEMA),
    ("response_format", {"type": "regex", "value": "[0-9]+"}, ("regex", "[0-9]+")),
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
    ("json_schema", {}, ("json_schema", "{}")),  # any JSON, as llama.cpp says
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
        *(("response_format", {"type": "text"}), ("grammar", ""), ("json_schema", ""), ("guided_json_object", False)),
        *(("structured_outputs", {}), ("structured_outputs", {"json": None}), ("guided_choice", None), ("regex", "")),
    ],
)
def test_values_that_constrain_nothing(server, complete, field, value):
    assert complete("x", **{field: value}).status_code == 200
    assert server.engine.requests[0].sampling.grammar is None


REFUSED = [
    ("response_format", {"type": "xml"}, None),
    ("response_format", {"type": "text", "value": SCHEMA}, None),
    ("response_format", {"type": "json"}, None),
    ("response_format", {"type": "json", "value": 7}, None),
    ("response_format", {"type": "regex", "value": 7}, None),
    ("response_format", {"type": "json_schema", "value": "x"}, None),
    ("response_format", {"type": "json_object", "value": SCHEMA, "schema": SCHEMA}, None),
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


def test_a_grammar_may_have_so_many_bytes_and_no_more(server, complete):
    most = server.app.state.front.limits.grammar_bytes
    for size, status in ((most, 200), (most + 1, 400)):
        grammar = 'start: "yes" // ' + "x" * (size - 17) + "\n"
        assert len(grammar) == size
        assert complete("x", guided_grammar=grammar).status_code == status


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("guided_regex", "[a", 'invalid regex "[a" (in regex): unclosed character class'),
        ("guided_json", {"type": "string", "pattern": "(?=a)"}, "failed to compile JSON schema: look-around"),
        ("guided_json", {"not": {}}, 'failed to compile JSON schema: Unimplemented keys: ["not"]'),
        ("guided_regex", r"[^\s\S]", "no text belongs to it"),
        ("guided_grammar", 'start: "a" b\nb: nowhere\n', 'line 2, column 4: unknown name: "nowhere"'),
    ],
)
def test_the_reason_is_told_without_our_own_text_around_it(complete, field, value, reason):
    assert complete("x", **{field: value}).json()["error"]["message"].startswith(f"{field}: {reason}")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": BAD}}},
            "text.format",
        ),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "xml"}}}, "text.format"),
        (
            "/v1/messages",
            {**MESSAGES, "output_config": {"format": {"type": "json_schema", "schema": BAD}}},
            "output_config.format",
        ),
        ("/api/chat", {**MESSAGES, "format": BAD}, "format"),
        ("/api/generate", {"prompt": "x", "format": BAD}, "format"),
        ("/api/generate", {"prompt": "x", "raw": True, "format": BAD}, "format"),
    ],
)
def test_other_dialects_are_told_of_their_own_field(server, http, path, body, name):
    answer = http.post(server.url + path, json={"model": "smol", **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(name)
    assert "response_format" not in answer.text


def test_ollama_s_empty_schema_is_any_json(server, http):
    assert http.post(f"{server.url}/api/generate", json={"model": "smol", "prompt": "x", "format": {}}).status_code == 200
    assert server.engine.requests[0].sampling.grammar.text == "{}"


@pytest.mark.parametrize(("error", "told"), [("dead_end", (400, "dead_end")), ("row_failed", (500, "engine_error"))])
def test_an_answer_that_its_own_request_lets_not_go_on_is_the_client_s_error(server, complete, error, told):
    """Whose fault it is, is said by the code, whatever the words are."""
    server.engine.script = Script(end_error_after=1, end_error=error, error_detail="no token is allowed here")
    answer = complete("x")
    assert (answer.status_code, answer.json()["error"]["code"]) == told
    assert answer.json()["error"]["message"] == "no token is allowed here"


def test_two_parts_of_a_field_are_told_apart(complete):
    error = complete("x", structured_outputs={"regex": "a", "choice": ["a"]}).json()["error"]
    assert error["message"].startswith("structured_outputs.regex and structured_outputs.choice each")


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
