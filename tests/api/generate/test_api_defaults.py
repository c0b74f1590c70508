"""What a request gets that does not say: sampling as the model recommends, and as long an answer as there is room for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from api_fakes import CONTEXT, MODEL, serving

from baton.api.config import ApiConfig
from baton.api.limits import Limits
from baton.protocol.request import OPENAI_SAMPLING

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}


def asked(server, http, path: str, **fields):
    answer = http.post(server.url + path, json=fields)
    assert answer.status_code == 200, answer.text
    return server.engine.requests[-1]


def sampling_of(request) -> dict[str, float]:
    return {name: getattr(request.sampling, name) for name in OPENAI_SAMPLING}


def test_without_a_recommendation_openai_s_defaults_hold(server, http):
    assert sampling_of(asked(server, http, "/v1/chat/completions", **CHAT, max_tokens=2)) == OPENAI_SAMPLING


def test_the_model_s_recommendation_holds_on_both_routes_and_each_field_alone_is_overridden(text, http):
    with serving(text, model=replace(MODEL, sampling_defaults=RECOMMENDED)) as server:
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})):
            assert sampling_of(asked(server, http, path, **body, max_tokens=2)) == RECOMMENDED
            for name in RECOMMENDED:
                other = sampling_of(asked(server, http, path, **body, max_tokens=2, **{name: OPENAI_SAMPLING[name]}))
                assert other == {**RECOMMENDED, name: OPENAI_SAMPLING[name]}
        for model in http.get(server.url + "/v1/models").json()["data"]:
            assert model["sampling_defaults"] == RECOMMENDED


def test_a_recommended_top_k_larger_than_the_head_is_all_of_it(text, http):
    with serving(text, model=replace(MODEL, sampling_defaults={"top_k": 10**6})) as server:
        assert asked(server, http, "/v1/chat/completions", **CHAT, max_tokens=2).sampling.top_k == MODEL.head_width


def test_a_recommended_length_is_that_of_chats_without_one(text, http):
    with serving(text, model=replace(MODEL, sampling_defaults={"max_tokens": 7})) as server:
        path = "/v1/chat/completions"
        assert asked(server, http, path, **CHAT).sampling.max_tokens == 7
        assert asked(server, http, path, **CHAT, max_tokens=30).sampling.max_tokens == 30
        assert asked(server, http, path, **CHAT, min_tokens=9).sampling.max_tokens == 9
        assert asked(server, http, "/v1/completions", prompt="Hi").sampling.max_tokens == 16


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 20},
        {"n": 2, "logprobs": True},
        {"logprobs": True, "top_logprobs": 20, "prompt_logprobs": 20},
    ],
)
@pytest.mark.parametrize("limits", [Limits(), Limits(logprob_entries=2000), Limits(request_tokens=300)])
def test_a_chat_without_a_length_is_never_refused_for_how_long_it_could_get(text, http, fields, limits):
    with serving(text, ApiConfig(limits=limits)) as server:
        request = asked(server, http, "/v1/chat/completions", **CHAT, **fields)
        room = CONTEXT - len(request.prompt)
        assert 1 <= request.sampling.max_tokens <= room
        if limits == Limits():
            assert request.sampling.max_tokens == room
