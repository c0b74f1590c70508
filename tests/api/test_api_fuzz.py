"""Random bodies: whatever a client sends, the answer is well formed and never a 5xx; what reaches the engine passes its codec.

BATON_API_FUZZ=5000 pytest tests/api/test_api_fuzz.py        for a longer run
"""

from __future__ import annotations

import json
import os

from api_fakes import CONTEXT, VOCAB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from baton.api.limits import RANGES
from baton.api.openai.known_fields import CHAT_ONLY, COMPLETION_ONLY, HARMLESS, INTERNAL, UNSUPPORTED
from baton.api.openai.structured import CONSTRAINTS
from baton.protocol.codec import decode, encode

COUNT = int(os.environ.get("BATON_API_FUZZ", "80"))
quick = settings(
    max_examples=COUNT, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 70), st.integers(), st.floats(allow_nan=True), st.text(max_size=8),
    st.sampled_from([0, 1, -1, VOCAB - 1, VOCAB, 2**31, 2**63, 1e308, -0.0, "", "smol", "\ud800", "\x00", "auto", "none"]),
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
)
flags = ("stream", "echo", "ignore_eos", "skip_special_tokens", "return_token_ids", "include_stop_str_in_output", "logprobs",
         "add_generation_prompt", "continue_final_message", "add_special_tokens")  # fmt: skip
others = (
    "stop",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "cache_salt",
    "user",
    "stream_options",
    "chat_template_kwargs",
    "model",
)
known = {*RANGES, *flags, *others, *UNSUPPORTED, *CONSTRAINTS, *CHAT_ONLY, *COMPLETION_ONLY, *HARMLESS, *INTERNAL[:2]}
names = sorted({*known, "prompt", "messages", "tokens", "zzz"})
messages = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "x y"]), "content": scalars}), max_size=3
)

tools = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "function", "other"])},
        optional={
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g", "a b", 5])}, optional={"parameters": values, "description": scalars}
            )
        },
    ),
    max_size=3,
)

likely = {
    "tools": tools,
    "thinking_budget": st.integers(-1, 3),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(1, 6),
    "temperature": st.floats(0, 2),
    "logprobs": st.integers(0, 3) | st.booleans(),
    "stream": st.booleans(),
    "echo": st.booleans(),
    "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1).map(str), st.floats(-200, 200), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=4),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans(), "continuous_usage_stats": st.booleans()}),
    "min_tokens": st.integers(0, 4),
    "top_k": st.integers(-1, 10),
    "bad_words": st.lists(st.text(min_size=1, max_size=4), max_size=3),
}


def check(server, answer) -> None:
    assert answer.status_code < 500, (answer.status_code, answer.text)
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in answer.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        assert all("error" not in json.loads(event) for event in events[:-1])
    else:
        answer.json()
    for request in server.engine.requests:
        assert decode(encode(request)) == request
        assert len(request.prompt) + request.sampling.max_tokens <= CONTEXT
        assert all(0 <= token < VOCAB for token in request.prompt)
    server.engine.requests.clear()


def send(server, http, path: str, body: object):
    content = json.dumps(body).encode()  # NaN and lone surrogates as Python writes them
    return http.post(server.url + path, content=content, headers={"content-type": "application/json"})


@quick
@given(
    path=st.sampled_from([CHAT, TEXT, "/tokenize", "/detokenize", "/v1/abort"]),
    body=st.dictionaries(st.sampled_from(names), values, max_size=6),
)
def test_any_fields(server, http, path, body):
    check(server, send(server, http, path, body))


@quick
@given(
    path=st.sampled_from([CHAT, TEXT]),
    prompt=st.one_of(
        st.text(max_size=30), st.lists(st.integers(-1, VOCAB), max_size=5), st.lists(st.text(max_size=4), max_size=4), values
    ),
    chat=messages | values,
    good=st.fixed_dictionaries({}, optional=likely),
    odd=st.dictionaries(st.sampled_from(names), values, max_size=1),
)
def test_nearly_right_requests(server, http, path, prompt, chat, good, odd):
    check(server, send(server, http, path, {"prompt": prompt, "messages": chat, **good, **odd}))


@quick
@given(
    prompt=st.text(min_size=1, max_size=30),
    good=st.fixed_dictionaries({}, optional={k: v for k, v in likely.items() if k not in ("logprobs", *CHAT_ONLY)}),
)
def test_right_requests_are_answered(server, http, prompt, good):
    good.pop("stream_options", None)
    good["min_tokens"] = 0
    answer = send(server, http, TEXT, {"prompt": "x" + prompt, **good})
    assert answer.status_code == 200, answer.text
    check(server, answer)


@quick
@given(
    body=st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")),
    path=st.sampled_from([CHAT, TEXT]),
)
def test_any_bytes(server, http, body, path):
    check(server, http.post(server.url + path, content=body))


@quick
@given(data=st.data())
def test_damaged_json(server, http, data):
    whole = json.dumps(
        {"model": "smol", "prompt": "Hi \U0001f600", "max_tokens": 3, "stop": ["x"], "logit_bias": {"5": 1.5}}
    ).encode()
    at = data.draw(st.integers(0, len(whole) - 1))
    damage = data.draw(st.binary(max_size=4))
    check(server, http.post(server.url + TEXT, content=whole[:at] + damage + whole[at + data.draw(st.integers(0, 3)) :]))
