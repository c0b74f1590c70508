"""OpenAI's own client against a real server: what it returns, and which exceptions it raises."""

from __future__ import annotations

import asyncio

import openai
import pytest
from api_fakes import Script, says, serving

from baton.api.config import ApiConfig
from baton.errors import Unavailable
from baton.protocol.request import Refused

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def sdk(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def test_chat(server, sdk, text):
    server.engine.script = Script(reply=says(text, "Hello you"), cached_tokens=3)
    answer = sdk.chat.completions.create(model="smol", messages=HI)
    assert answer.choices[0].message.content == "Hello you"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.system_fingerprint == "fp_test"
    assert answer.id.startswith("chatcmpl-")


def test_chat_stream(server, sdk, text):
    server.engine.script = Script(reply=says(text, "Hello you there"))
    chunks = list(sdk.chat.completions.create(model="smol", messages=HI, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello you there"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-1].choices == []


def test_chat_n_and_logprobs(server, sdk):
    answer = sdk.chat.completions.create(model="smol", messages=HI, n=3, logprobs=True, top_logprobs=2, max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        assert all(len(entry.top_logprobs) == 2 and entry.bytes is not None for entry in choice.logprobs.content)


def test_completion_and_stream(server, sdk, text):
    server.engine.script = Script(reply=says(text, " there was"))
    answer = sdk.completions.create(model="smol", prompt="Once", echo=True, logprobs=2)
    assert answer.choices[0].text == "Once there was"
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    chunks = list(sdk.completions.create(model="smol", prompt=["Once", "Twice"], stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: " there was", 1: " there was"}


def test_extras_by_extra_body(server, sdk):
    sdk.chat.completions.create(
        model="smol", messages=HI, max_completion_tokens=5, extra_body={"top_k": 7, "ignore_eos": True, "min_p": 0.1}
    )
    assert server.engine.requests[0].sampling.top_k == 7


def test_async_client_many_at_once(server, text):
    server.engine.script = Script(reply=says(text, "a b c"), delay_seconds=0.005)

    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                stream = await client.chat.completions.create(
                    model="smol", messages=[{"role": "user", "content": str(number)}], stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(number) for number in range(40)))

    assert asyncio.run(many()) == ["a b c"] * 40


def test_closing_a_stream_aborts(server, sdk):
    from api_fakes import eventually

    server.engine.script = Script(delay_seconds=0.01)
    stream = sdk.completions.create(model="smol", prompt="x", stream=True, max_tokens=400, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    assert eventually(lambda: not server.engine.live, 1.0)


def test_models(server, sdk):
    assert [model.id for model in sdk.models.list()] == ["smol", "gpt-3.5-turbo"]
    assert sdk.models.retrieve("smol").id == "smol"


@pytest.mark.parametrize(
    ("script", "fields", "error", "code"),
    [
        (Script(), {"temperature": 3}, openai.BadRequestError, None),
        (Script(), {"model": "other"}, openai.NotFoundError, "model_not_found"),
        (Script(), {"max_tokens": 0}, openai.BadRequestError, None),
        (Script(refuse=Refused("never_fits", 9, 3)), {}, openai.BadRequestError, "never_fits"),
        (Script(refuse=Refused("queue_full", 9, 3)), {}, openai.RateLimitError, "queue_full"),
        (Script(refuse=Refused("duplicate_id")), {}, openai.ConflictError, "duplicate_id"),
        (Script(refuse=Refused("draining")), {}, openai.InternalServerError, "draining"),
        (Script(end_error_after=1), {}, openai.InternalServerError, "engine_error"),
        (Script(fail_after=1), {}, openai.InternalServerError, "internal_error"),
    ],
)
def test_errors_are_the_right_exceptions(server, sdk, script, fields, error, code):
    server.engine.script = script
    with pytest.raises(error) as raised:
        sdk.chat.completions.create(**{"model": "smol", "messages": HI, "max_tokens": 5, **fields})
    assert raised.value.code == code
    assert raised.value.request_id
    assert raised.value.body["message"]


def test_error_inside_a_stream_is_raised(server, sdk, text):
    server.engine.script = Script(reply=says(text, "a b c d"), fail_after=2, error=Unavailable("the engine was lost"))
    with pytest.raises(openai.APIError, match="the engine was lost"):
        list(sdk.chat.completions.create(model="smol", messages=HI, stream=True))


def test_client_retries_what_may_be_retried(server, text):
    """429 with Retry-After, then room: the client's own retry gets the answer."""
    calls = 0
    reply = says(text, "ok")

    def script() -> Script:
        nonlocal calls
        calls += 1
        return Script(reply=reply, refuse=Refused("queue_full", 2, 1) if calls == 1 else None)

    type(server.engine).script = property(lambda self: script(), lambda self, value: None)
    try:
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=2) as client:
            assert client.completions.create(model="smol", prompt="x").choices[0].text == "ok"
    finally:
        del type(server.engine).script
    assert len(server.engine.requests) == 2


def test_keys(text):
    with serving(text, ApiConfig(api_keys=("right",))) as server:
        wrong = openai.OpenAI(base_url=server.url + "/v1", api_key="wrong", max_retries=0)
        with wrong as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai.OpenAI(base_url=server.url + "/v1", api_key="right", max_retries=0) as client:
            assert client.models.list().data
