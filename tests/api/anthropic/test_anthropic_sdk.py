"""Anthropic's own client against a real server: what it returns, and which exceptions it raises."""

from __future__ import annotations

import pytest
from api_fakes import Script, eventually, says, serving

from baton.api.config import ApiConfig
from baton.errors import Unavailable
from baton.protocol.request import Refused

HI = [{"role": "user", "content": "Hi"}]
CALL = {"model": "smol", "max_tokens": 20, "messages": HI}


def client_of(anthropic, server, **settings):
    return anthropic.Anthropic(base_url=server.url, max_retries=0, timeout=20, **{"api_key": "none", **settings})


@pytest.fixture
def sdk(server, anthropic):
    with client_of(anthropic, server) as client:
        yield client


def prompt_of(server, text) -> str:
    return text.tokenizer.decode(server.engine.requests[-1].prompt, skip_special_tokens=False)


def test_message(server, sdk, text):
    server.engine.script = Script(reply=says(text, "Hello you"), cached_tokens=3)
    answer = sdk.messages.create(**CALL, system="Be short.", extra_body={"top_k": 5, "temperature": 0.5})
    assert [block.text for block in answer.content] == ["Hello you"]
    assert (answer.role, answer.stop_reason, answer.stop_sequence, answer.model) == ("assistant", "end_turn", None, "smol")
    prompt = server.engine.requests[0].prompt
    assert (answer.usage.input_tokens, answer.usage.cache_read_input_tokens) == (len(prompt) - 3, 3)
    assert answer.usage.output_tokens == 3
    assert answer.id.startswith("msg_")
    assert "<|im_start|>system\nBe short.<|im_end|>" in prompt_of(server, text)
    sampling = server.engine.requests[0].sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.temperature) == (20, 5, 0.5)


def test_stream(server, sdk, text):
    server.engine.script = Script(reply=says(text, "Hello you there"), cached_tokens=2)
    with sdk.messages.stream(**CALL) as stream:
        assert "".join(stream.text_stream) == "Hello you there"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.content[0].text == "Hello you there"
    assert final.usage.output_tokens == 4
    assert final.usage.cache_read_input_tokens == 2


@pytest.mark.parametrize("fields", [{}, {"stop_sequences": ["never"]}])
def test_the_first_event_says_what_was_cached(server, sdk, text, fields):
    """Clients that take the input from there (LangChain) would count cached tokens as new."""
    server.engine.script = Script(reply=says(text, "Hello you there"), cached_tokens=5)
    first, *_, delta, _ = sdk.messages.create(**CALL, **fields, stream=True)
    assert first.message.usage.cache_read_input_tokens == delta.usage.cache_read_input_tokens == 5
    assert first.message.usage.input_tokens == delta.usage.input_tokens == len(server.engine.requests[-1].prompt) - 5


def test_events_in_order(server, sdk, text):
    server.engine.script = Script(reply=says(text, "a b c"))
    kinds = [event.type for event in sdk.messages.create(**CALL, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_an_empty_answer_streams_too(server, sdk, text):
    server.engine.script = Script(reply=says(text, ""))
    with sdk.messages.stream(**CALL) as stream:
        assert stream.get_final_message().content == []


def test_stops(server, sdk, text):
    server.engine.script = Script(reply=says(text, "one two three"))
    answer = sdk.messages.create(**CALL, stop_sequences=[" two"])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", " two", "one")
    answer = sdk.messages.create(**{**CALL, "max_tokens": 1})
    assert answer.stop_reason == "max_tokens"


def test_blocks_become_messages(server, sdk, text):
    server.engine.script = Script(reply=says(text, "fine"))
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "A", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "B"}]},
        {"role": "user", "content": [{"type": "text", "text": "C"}, {"type": "text", "text": "D"}]},
    ]
    system = [{"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}]
    sdk.messages.create(**{**CALL, "messages": messages}, system=system)
    assert prompt_of(server, text) == (
        "<|im_start|>system\nS1\nS2<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
        "<|im_start|>user\nC\nD<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_assistants_last_message_is_gone_on_with(server, sdk, text):
    server.engine.script = Script(reply=says(text, " four"))
    answer = sdk.messages.create(**{**CALL, "messages": [*HI, {"role": "assistant", "content": "Two and two is"}]})
    assert prompt_of(server, text).endswith("<|im_start|>assistant\nTwo and two is")
    assert answer.content[0].text == " four"


def test_count_tokens(server, sdk, text, anthropic):
    counted = sdk.messages.count_tokens(model="smol", messages=HI, system="Be short.").input_tokens
    assert not server.engine.requests
    server.engine.script = Script(reply=says(text, "x"))
    sdk.messages.create(**CALL, system="Be short.")
    assert counted == len(server.engine.requests[0].prompt)
    with pytest.raises(anthropic.BadRequestError) as raised:
        sdk.messages.count_tokens(model="smol", messages=[{"role": "tool", "content": "x"}])
    assert (raised.value.body["type"], raised.value.body["error"]["type"]) == ("error", "invalid_request_error")


def test_a_list_of_plain_texts_is_read_as_text_blocks(server, http, text):
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": ["R1", "R2"]}]}
    body = {**CALL, "system": ["S1", "S2"], "messages": [*HI, use, result]}
    answer = http.post(server.url + "/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(server, text)
    assert "S1\nS2" in prompt
    assert "R1\nR2" in prompt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"stop_sequences": [3]}, "stop_sequences"),
        ({"temperature": 7}, "temperature must be"),
        ({"max_tokens": 0}, "max_tokens must be"),
        ({"n": 2}, "n is not supported"),
        ({"messages": "x"}, "messages must be a list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'role must be "user" or "assistant"'),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "only text"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0] must be a block"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": 3}]}]}, "input must be an object"),
        ({"system": 3}, "system must be a text"),
        ({"tools": [{"type": "search_20250305", "name": "web_search"}]}, "tools of the client's own"),
        ({"tool_choice": {"type": "x"}}, "tool_choice.type must be"),
        ({"container": "x"}, "container is not supported"),
        ({"output_config": {"format": 3}}, "output_config.format must be"),
    ],
)
def test_refusals(server, http, fields, words):
    answer = http.post(server.url + "/v1/messages", json={**CALL, **fields})
    assert answer.status_code == 400
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", "invalid_request_error")
    assert words in told["error"]["message"]
    assert told["request_id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    ("script", "fields", "error"),
    [
        (Script(), {"model": "other"}, "NotFoundError"),
        (Script(refuse=Refused("queue_full", 9, 3)), {}, "RateLimitError"),
        (Script(refuse=Refused("draining")), {}, "InternalServerError"),
        (Script(end_error_after=1), {}, "InternalServerError"),
    ],
)
def test_errors_are_the_right_exceptions(server, sdk, script, fields, error, anthropic):
    server.engine.script = script
    with pytest.raises(getattr(anthropic, error)) as raised:
        sdk.messages.create(**{**CALL, **fields})
    assert raised.value.body["error"]["message"]


def test_an_error_inside_a_stream_is_raised(server, sdk, text, anthropic):
    server.engine.script = Script(reply=says(text, "a b c d"), fail_after=2, error=Unavailable("the engine was lost"))
    with pytest.raises(anthropic.APIStatusError, match="the engine was lost"), sdk.messages.stream(**CALL) as stream:
        list(stream.text_stream)


def test_leaving_a_stream_aborts(server, sdk):
    server.engine.script = Script(delay_seconds=0.01)
    with sdk.messages.stream(**{**CALL, "max_tokens": 400}) as stream:
        next(iter(stream))
    assert eventually(lambda: not server.engine.live, 1.0)


def test_the_key_may_come_as_x_api_key(text, anthropic):
    with serving(text, ApiConfig(api_keys=("right", "other"))) as server:
        server.engine.script = Script(reply=says(text, "ok"))
        for settings in ({"api_key": "right"}, {"api_key": None, "auth_token": "right"}):
            with client_of(anthropic, server, **settings) as client:
                assert client.messages.create(**CALL).content[0].text == "ok"
        with client_of(anthropic, server, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError) as raised:
            client.messages.create(**CALL)
        assert raised.value.body["error"]["type"] == "authentication_error"
        two = {"x-api-key": "right", "authorization": "Bearer other"}
        with client_of(anthropic, server) as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**CALL, extra_headers=two)
