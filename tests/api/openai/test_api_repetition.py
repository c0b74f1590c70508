"""Who asks that an answer ends when it repeats itself: the request, else the server; and what the engine gets of it."""

from __future__ import annotations

import pytest
from api_fakes import serving

from baton.api.config import ApiConfig
from baton.protocol.repetition import STOP_ON_REPETITION, RepetitionStop

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
COMPLETION = {"prompt": "Hi", "max_tokens": 2}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


def rule_of(server, http, path, **fields):
    answer = http.post(server.url + path, json={**ROUTES[path], **fields})
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1].sampling.repetition_stop


@pytest.fixture(scope="module")
def stopping(text):
    with serving(text, ApiConfig(stop_on_repetition=True)) as server:
        yield server


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_asks_for_it(server, http, path):
    assert rule_of(server, http, path) is None
    assert rule_of(server, http, path, stop_on_repetition=None) is None
    assert rule_of(server, http, path, stop_on_repetition=True) == STOP_ON_REPETITION
    assert rule_of(server, http, path, stop_on_repetition=True, ignore_eos=True) == STOP_ON_REPETITION
    assert rule_of(server, http, path, stop_on_repetition=True, response_format=SCHEMA) == STOP_ON_REPETITION


@pytest.mark.parametrize("path", ROUTES)
def test_the_server_s_default_holds_where_a_request_says_nothing(stopping, http, path):
    assert rule_of(stopping, http, path) == STOP_ON_REPETITION
    assert rule_of(stopping, http, path, stop_on_repetition=False) is None
    assert rule_of(stopping, http, path, ignore_eos=True) is None, "the client asks for a length"
    assert rule_of(stopping, http, path, response_format=SCHEMA) is None, "half of a document is of no use"


def test_vllm_s_object(server, http):
    path = "/v1/chat/completions"
    asked = {"max_pattern_size": 20, "min_pattern_size": 3, "min_count": 4}
    assert rule_of(server, http, path, repetition_detection=asked) == RepetitionStop(
        pattern_max=20, pattern_min=3, count_min=4, tokens_min=0
    )
    asked = {"max_pattern_size": 7, "min_count": 2}
    assert rule_of(server, http, path, repetition_detection=asked, stop_on_repetition=True) == RepetitionStop(
        pattern_max=7, count_min=2, tokens_min=0
    )
    assert rule_of(server, http, path, repetition_detection={"max_pattern_size": 0}) is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_on_repetition": 1}, "stop_on_repetition must be true or false"),
        ({"repetition_detection": True}, "repetition_detection must be an object"),
        (
            {"repetition_detection": {"max_pattern_size": 257, "min_count": 2}},
            "max_pattern_size must be a whole number from 0 to 256",
        ),
        ({"repetition_detection": {"max_pattern_size": 5}}, "min_count must be a whole number from 2"),
        ({"repetition_detection": {"max_pattern_size": 5, "min_count": True}}, "min_count must be a whole number from 2"),
        (
            {"repetition_detection": {"max_pattern_size": 5, "min_pattern_size": 6, "min_count": 2}},
            "is more than max_pattern_size",
        ),
        ({"repetition_detection": {"window": 5}}, "is not known: there are max_pattern_size"),
        (
            {"repetition_detection": {"max_pattern_size": 5, "min_count": 2}, "stop_on_repetition": False},
            "leave one of them out",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(server, http, fields, words):
    answer = http.post(server.url + "/v1/completions", json={**COMPLETION, **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in fields
