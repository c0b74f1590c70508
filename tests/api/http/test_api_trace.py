"""The client's trace: validated, passed on to the engine, and nothing of the answer depends on it."""

from __future__ import annotations

import pytest

TRACE = f"00-{'4bf92f3577b34da6' * 2}-00f067aa0ba902b7-01"
BODIES = {
    "/v1/completions": {"model": "smol", "prompt": ["a", "b"], "max_tokens": 2},
    "/v1/chat/completions": {"model": "smol", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/messages": {"model": "smol", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "/v1/responses": {"model": "smol", "input": "x", "max_output_tokens": 16},
}


@pytest.mark.parametrize("path", BODIES)
def test_a_traceparent_is_passed_on(server, http, path):
    assert http.post(server.url + path, json=BODIES[path], headers={"traceparent": TRACE}).status_code == 200
    assert {request.traceparent for request in server.engine.requests} == {TRACE}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "hello",
        TRACE.upper(),
        TRACE + "-more",
        "ff" + TRACE[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{'a' * 32}-{'0' * 16}-01",
    ],
)
def test_one_that_is_invalid_is_ignored(server, http, header):
    answer = http.post(server.url + "/v1/completions", json=BODIES["/v1/completions"], headers={"traceparent": header})
    assert answer.status_code == 200
    assert {request.traceparent for request in server.engine.requests} == {""}


def test_two_of_them_are_ignored(server, http):
    headers = [("traceparent", TRACE), ("traceparent", TRACE)]
    assert http.post(server.url + "/v1/completions", json=BODIES["/v1/completions"], headers=headers).status_code == 200
    assert {request.traceparent for request in server.engine.requests} == {""}
