"""The usage of an answer counts preemptions of its request, in every dialect."""

from __future__ import annotations

import pytest
from api_fakes import Script, says, serving

HI = [{"role": "user", "content": "one"}]
ROUTES = {
    "/v1/completions": {"prompt": "one", "stream_options": {"include_usage": True}},
    "/v1/chat/completions": {"messages": HI, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "one"},
    "/v1/messages": {"messages": HI, "max_tokens": 8},
    "/api/chat": {"messages": HI},
    "/api/generate": {"prompt": "one"},
}


@pytest.fixture(scope="module")
def server(text):
    with serving(text) as one:
        yield one


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("preemptions", [0, 3])
@pytest.mark.parametrize("route", ROUTES)
def test_preemptions_are_counted_in_the_usage_where_there_were_any(server, http, text, route, preemptions, streamed):
    """In Ollama's last line they were missing."""
    server.engine.script = Script(reply=says(text, "one"), preemptions=preemptions)
    fields = ROUTES[route] if streamed else {name: value for name, value in ROUTES[route].items() if name != "stream_options"}
    answer = http.post(server.url + route, json={**fields, "stream": streamed})
    assert answer.status_code == 200, answer.text
    assert answer.text.count("baton_preemptions") == bool(preemptions)
    if not preemptions:
        return
    if streamed:
        (line,) = [line for line in answer.text.splitlines() if "baton_preemptions" in line]
        assert '"baton_preemptions":3' in line.replace(" ", "")
    else:
        body = answer.json()
        assert body.get("usage", body)["baton_preemptions"] == 3
