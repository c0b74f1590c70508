"""Speculative decoding in requests: switched off or bounded under the names of other servers, and counted in the usage."""

from __future__ import annotations

import json

import pytest
from api_fakes import Script, says, serving

from baton.api.config import ApiConfig


@pytest.fixture(scope="module")
def server(text):
    with serving(text, ApiConfig(unknown_fields="refuse")) as one:
        one.engine.script = Script(reply=says(text, "one"), drafted_tokens=7, accepted_tokens=5)
        yield one


ROUTES = {
    "/v1/completions": {"prompt": "one"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}]},
    "/v1/responses": {"input": "one"},
    "/v1/messages": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 8},
    "/api/chat": {"messages": [{"role": "user", "content": "one"}], "stream": False},
    "/api/generate": {"prompt": "one", "stream": False},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, None),
        ({"disable_spec_decode": True}, 0),
        ({"disable_speculative_decoding": True}, 0),
        ({"disable_spec_decode": False}, None),
        ({"speculative.n_max": 2, "speculative.n_min": 1, "speculative.p_min": 0.5}, 2),
        ({"speculative.n_max": 0}, 0),
        ({"speculative.n_max": 8, "disable_spec_decode": True}, 0),
    ],
)
def test_a_request_bounds_its_drafts_in_every_dialect(server, http, route, fields, bound):
    answer = http.post(server.url + route, json={**ROUTES[route], **fields})
    assert answer.status_code == 200, answer.text
    assert server.engine.requests[-1].sampling.drafts_max == bound


@pytest.mark.parametrize(
    "fields",
    [
        {"disable_spec_decode": 1},
        {"speculative.n_max": -1},
        {"speculative.n_max": True},
        {"disable_spec_decode": True, "disable_speculative_decoding": False},
    ],
)
def test_bounds_that_are_none(server, http, fields):
    answer = http.post(server.url + "/v1/completions", json={"prompt": "one", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in fields


def test_the_usage_counts_drafts(server, http):
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    for route in ("/v1/completions", "/v1/chat/completions"):
        usage = http.post(server.url + route, json=ROUTES[route]).json()["usage"]
        assert usage["completion_tokens_details"].items() >= details.items()
    usage = http.post(server.url + "/v1/responses", json=ROUTES["/v1/responses"]).json()["usage"]
    assert usage["output_tokens_details"].items() >= details.items()
    assert http.post(server.url + "/v1/messages", json=ROUTES["/v1/messages"]).json()["usage"].items() >= details.items()
    for route in ("/api/chat", "/api/generate"):
        assert http.post(server.url + route, json=ROUTES[route]).json().items() >= details.items()


def test_an_answer_without_drafts_counts_none(server, http, text):
    before, server.engine.script = server.engine.script, Script(reply=says(text, "one"))
    assert "completion_tokens_details" not in http.post(server.url + "/v1/completions", json={"prompt": "one"}).json()["usage"]
    server.engine.script = before


@pytest.mark.parametrize("stream", [False, True])
def test_drafts_behind_a_stop_string_are_not_counted_as_accepted(server, http, text, stream):
    """The engine knows no stop strings: it has computed tokens that the answer does not have."""
    before, answer = server.engine.script, "one two three four five six seven eight"
    server.engine.script = Script(reply=says(text, answer), cuts=(1,), tokens_per_delta=6, drafted_tokens=9, accepted_tokens=8)
    body = {"prompt": "x", "stop": "four", "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    lines = http.post(server.url + "/v1/completions", json={**body, **streamed}).text.splitlines()
    server.engine.script = before
    events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == 4 < 8
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 6}
