"""Random bodies for the other dialects: well-formed answers in each, never a 5xx, nothing that the engine could not take.

BATON_API_FUZZ=2000 pytest tests/api/test_dialect_fuzz.py        for a longer run
"""

from __future__ import annotations

import json
import os

from api_fakes import CONTEXT, VOCAB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.api.limits import RANGES
from baton.api.routes.openapi import BODIES
from baton.protocol.codec import decode, encode

COUNT = int(os.environ.get("BATON_API_FUZZ", "60"))
quick = settings(
    max_examples=COUNT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
PATHS = ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/api/show")
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.floats(allow_nan=False), st.text(max_size=8),
    st.sampled_from([0, 1, -1, VOCAB, 2**63, "", "smol", "smol:latest", "\ud800", "\x00", "auto", "none", "json"]),
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
inner_keys = st.sampled_from(
    ["type", "text", "content", "role", "name", "input", "id", "call_id", "tool_use_id", "output", "arguments", "function",
     "format", "schema", "thinking", "images", "tool_calls", "effort", "temperature", "num_predict", "stop", "zzz"]
)  # fmt: skip
kinds = st.sampled_from(
    ["text", "message", "user", "assistant", "tool_use", "tool_result", "thinking", "function_call", "function_call_output",
     "reasoning", "function", "custom", "json_schema", "enabled", "auto", "any", "item_reference"]
)  # fmt: skip
blocks = st.recursive(
    scalars | kinds,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(inner_keys, inner | kinds, max_size=4),
    max_leaves=12,
)
names = sorted({name for path in PATHS for name in BODIES[path]} | set(RANGES) | {"zzz", "kv_transfer_params"})
good = {
    "/v1/responses": {"input": "Hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}], "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 3}},
    "/api/show": {"model": "smol"},
}


def check(server, path: str, answer) -> None:
    assert answer.status_code < 500, (answer.status_code, answer.text)
    if answer.status_code != 200:
        told = answer.json()
        if path.startswith("/api"):
            assert isinstance(told["error"], str)
        elif path.startswith("/v1/messages"):
            assert told["type"] == "error"
            assert told["error"]["message"]
        else:
            assert told["error"]["message"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]
        assert events[-1]["type"] in ("message_stop", "response.completed", "response.incomplete")
    elif answer.headers["content-type"] == "application/x-ndjson":
        assert json.loads(answer.text.splitlines()[-1])["done"] is True
    else:
        answer.json()
    for request in server.engine.requests:
        assert decode(encode(request)) == request
        assert request.n == 1
        assert len(request.prompt) + request.sampling.max_tokens <= CONTEXT
    server.engine.requests.clear()


def send(server, http, path: str, body: object):
    content = json.dumps(body).encode()
    return http.post(server.url + path, content=content, headers={"content-type": "application/json"})


@quick
@given(path=st.sampled_from(PATHS), odd=st.dictionaries(st.sampled_from(names), values | blocks, max_size=3))
def test_any_fields(server, http, path, odd):
    check(server, path, send(server, http, path, {**good[path], **odd}))


@quick
@given(path=st.sampled_from(PATHS[:5]), inside=st.lists(blocks, max_size=4), stream=st.booleans())
def test_any_messages(server, http, path, inside, stream):
    name = "input" if path == "/v1/responses" else "system" if path == "/api/generate" else "messages"
    check(server, path, send(server, http, path, {**good[path], "stream": stream, name: inside}))
