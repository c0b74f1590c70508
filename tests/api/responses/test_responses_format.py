"""The format of an answer of /v1/responses, by its name there and by that of chat completions: what was applied comes back as
text.format."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from api_fakes import Script, says

from baton.protocol.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
OTHER = {"type": "object", "properties": {"b": {"type": "integer"}}}
COMPANIONS = {"name": "answer", "description": "of the question", "strict": True}
FORMATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"type": "text"}, {"type": "text"}),
    "json_object": ({"type": "json_object"}, {"type": "json_object"}),
    "json_schema": (
        {"type": "json_schema", **COMPANIONS, "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {**COMPANIONS, "schema": SCHEMA}},
    ),
}
"""As text.format, and as response_format."""


def ask(server, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/responses", json={"model": "smol", "input": "Hi", **more}, timeout=20)


def applied(server) -> Grammar | None:
    return server.engine.requests[-1].sampling.grammar


@pytest.fixture(autouse=True)
def reply(server, text):
    server.engine.script = Script(reply=says(text, '{"a":1}'))


@pytest.mark.parametrize("spelling", ["text.format", "response_format", "both"])
@pytest.mark.parametrize("kind", FORMATS)
def test_what_was_applied_is_what_comes_back(server, kind: str, spelling: str):
    ours, theirs = FORMATS[kind]
    given: dict[str, Any] = {} if spelling == "response_format" else {"text": {"format": ours}}
    given |= {} if spelling == "text.format" else {"response_format": theirs}
    answer = ask(server, **given)
    assert answer.status_code == 200, answer.text
    assert answer.json()["text"] == {"format": ours}
    stored = httpx.get(f"{server.url}/v1/responses/{answer.json()['id']}", timeout=20)
    assert stored.json()["text"] == {"format": ours}
    grammar = applied(server)
    assert (grammar is None) is (kind == "text")
    if kind == "json_schema":
        assert json.loads(grammar.text) == SCHEMA


def test_a_stream_tells_it_from_its_first_event_on(server):
    lines = ask(server, response_format=FORMATS["json_schema"][1], stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    told = [event["response"]["text"]["format"] for event in events if "response" in event]
    assert len(told) >= 2
    assert all(form == FORMATS["json_schema"][0] for form in told)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        *((ours, theirs) for one, (ours, _) in FORMATS.items() for other, (_, theirs) in FORMATS.items() if one != other),
        (FORMATS["json_schema"][0], {"type": "json_schema", "json_schema": {**COMPANIONS, "schema": OTHER}}),
    ],
    ids=str,
)
def test_two_that_differ_are_refused_by_both_names(server, ours, theirs):
    before = len(server.engine.requests)
    answer = ask(server, text={"format": ours}, response_format=theirs)
    assert answer.status_code == 400
    assert "text.format and response_format" in answer.json()["error"]["message"]
    assert len(server.engine.requests) == before


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format"),  # llama.cpp's
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA), "text": {"format": {"type": "text"}}}, "guided_json"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
    ],
    ids=str,
)
def test_other_servers_names_come_back_as_a_schema(server, given, name):
    form = ask(server, **given).json()["text"]["format"]
    assert form == {"type": "json_schema", "name": name, "schema": SCHEMA}
    assert json.loads(applied(server).text) == SCHEMA


def test_the_rest_of_text_comes_back_too(server):
    answer = ask(server, text={"verbosity": "low"}, response_format={"type": "json_object"}).json()
    assert answer["text"] == {"verbosity": "low", "format": {"type": "json_object"}}
    assert ask(server, text={"verbosity": "low"}).json()["text"] == {"verbosity": "low", "format": {"type": "text"}}
    assert ask(server, response_format=None).json()["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": "[" * 30_000}}}, "response_format"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ({"text": {"format": {}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "response_format": 5}, "response_format"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_error_names_the_field_that_was_given(server, given, name):
    answer = ask(server, **given)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == name
    assert name in answer.json()["error"]["message"]
