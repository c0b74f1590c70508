"""OpenAI's own client against /v1/responses: answers, streams, conversations that are kept."""

from __future__ import annotations

import openai
import pytest
from api_fakes import Script, eventually, says, serving

from baton.api.config import ApiConfig
from baton.api.limits import Limits
from baton.api.responses.fields import messages_of
from baton.api.responses.store import ResponseStore
from baton.errors import Unavailable
from baton.protocol.request import Refused


@pytest.fixture
def sdk(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def prompt_of(server, text) -> str:
    return text.tokenizer.decode(server.engine.requests[-1].prompt, skip_special_tokens=False)


def test_response(server, sdk, text):
    server.engine.script = Script(reply=says(text, "Hello you"), cached_tokens=3)
    answer = sdk.responses.create(
        model="smol", input="Hi", instructions="Be short.", max_output_tokens=9, metadata={"a": "b"}, extra_body={"top_k": 5}
    )
    assert answer.output_text == "Hello you"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert (answer.max_output_tokens, answer.metadata, answer.instructions) == (9, {"a": "b"}, "Be short.")
    assert (answer.usage.output_tokens, answer.usage.input_tokens_details.cached_tokens) == (3, 3)
    assert answer.usage.total_tokens == answer.usage.input_tokens + 3
    assert answer.output[0].id.startswith("msg_")
    assert "<|im_start|>system\nBe short.<|im_end|>" in prompt_of(server, text)
    assert server.engine.requests[0].sampling.top_k == 5


def test_stream(server, sdk, text):
    server.engine.script = Script(reply=says(text, "Hello you there"))
    events = list(sdk.responses.create(model="smol", input="Hi", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello you there"
    assert events[-1].response.output_text == "Hello you there"
    assert events[-1].response.usage.output_tokens == 4
    assert events[-1].response.id == events[0].response.id


def test_the_clients_own_accumulation(server, sdk, text):
    server.engine.script = Script(reply=says(text, "a b c"))
    with sdk.responses.stream(model="smol", input="Hi") as stream:
        list(stream)
        assert stream.get_final_response().output_text == "a b c"


def test_an_empty_answer_streams_too(server, sdk, text):
    server.engine.script = Script(reply=says(text, ""))
    events = list(sdk.responses.create(model="smol", input="Hi", stream=True))
    assert events[-1].response.output_text == ""


def test_logprobs(server, sdk, text):
    server.engine.script = Script(reply=says(text, "a b", then_end=False))
    call = {"model": "smol", "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = sdk.responses.create(**call)
    assert [len(entry.top_logprobs) for entry in whole.output[0].content[0].logprobs] == [2, 2]
    last = list(sdk.responses.create(**call, stream=True))[-1]
    assert last.response.output[0].content[0].logprobs == whole.output[0].content[0].logprobs


@pytest.mark.parametrize("stream", [False, True])
def test_incomplete(server, sdk, text, stream):
    server.engine.script = Script(reply=says(text, "one two three"))
    answer = sdk.responses.create(model="smol", input="Hi", max_output_tokens=1, stream=stream)
    if stream:
        last = list(answer)[-1]
        assert last.type == "response.incomplete"
        answer = last.response
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in answer.output] == ["incomplete"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_goes_on(server, sdk, text, stream):
    server.engine.script = Script(reply=says(text, "fine"))
    first = sdk.responses.create(model="smol", input="How are you?", instructions="Not carried over.", stream=stream)
    first = list(first)[-1].response if stream else first
    second = sdk.responses.create(model="smol", input=[{"role": "user", "content": "Why?"}], previous_response_id=first.id)
    assert second.previous_response_id == first.id
    prompt = prompt_of(server, text)
    assert "How are you?<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>" in prompt
    assert "Not carried over" not in prompt
    assert sdk.responses.retrieve(second.id).output_text == "fine"
    sdk.responses.delete(second.id)
    for gone in (lambda: sdk.responses.retrieve(second.id), lambda: sdk.responses.delete(second.id)):
        with pytest.raises(openai.NotFoundError):
            gone()
    with pytest.raises(openai.NotFoundError) as raised:
        sdk.responses.create(model="smol", input="x", previous_response_id=second.id)
    assert raised.value.code == "previous_response_not_found"


def test_store_false_keeps_nothing(server, sdk, text):
    server.engine.script = Script(reply=says(text, "fine"))
    answer = sdk.responses.create(model="smol", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(answer.id)


def test_a_tenant_sees_its_own_alone(text):
    with serving(text, ApiConfig(api_keys=("a", "b"))) as server:
        server.engine.script = Script(reply=says(text, "fine"))
        clients = [openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) for key in "ab"]
        answer = clients[0].responses.create(model="smol", input="x")
        assert clients[0].responses.retrieve(answer.id).id == answer.id
        with pytest.raises(openai.NotFoundError):
            clients[1].responses.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError):
            clients[1].responses.delete(answer.id)
        for client in clients:
            client.close()


def test_the_store_is_bounded_and_fair():
    store = ResponseStore(Limits(stored_responses=4, stored_response_bytes=1000))
    store.put(b"small", "s", {"x": 1}, [])
    for number in range(20):
        store.put(b"large", f"l{number}", {"x": "y" * 100}, [])
        assert len(store) <= 4
        assert store.size_bytes <= 1000
    assert store.get(b"small", "s") is not None
    assert store.get(b"large", "l0") is None
    assert store.get(b"large", "l19") is not None
    store.put(b"large", "too large", {"x": "y" * 2000}, [])
    assert store.get(b"large", "too large") is None
    assert store.drop(b"small", "s")
    assert not store.drop(b"small", "s")


def test_items_of_one_turn_are_one_message():
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {**call, "call_id": "1"},
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    messages = messages_of(items)
    assert [message["role"] for message in messages] == [
        "developer", "user", "assistant", "tool", "tool", "assistant", "assistant"
    ]  # fmt: skip
    turn = messages[2]
    assert turn["reasoning_content"] == "hm"
    assert turn["content"] == [{"type": "refusal", "refusal": "no"}]
    assert [each["id"] for each in turn["tool_calls"]] == ["1", "2"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens must be"),
        ({"input": 3}, "input must be"),
        ({"input": [3]}, "input[0] must be an item"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "x", "content": "y"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": 3}]}, "input[0].name"),
        ({"input": []}, "at least one message"),
        ({"store": 3}, "store must be"),
        ({"instructions": 3}, "instructions must be"),
        ({"truncation": "auto"}, "truncation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"tools": [{"type": "functions"}]}, "only functions"),
        ({"text": 3}, "text must be"),
        ({"include": ["x"]}, "include may have"),
        ({"top_logprobs": 3}, "top_logprobs needs"),
        ({"metadata": 3}, "metadata must be"),
        ({"n": 2}, "n is not supported"),
    ],
)
def test_refusals(server, http, fields, words):
    answer = http.post(server.url + "/v1/responses", json={"model": "smol", "input": "Hi", **fields})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_errors(server, sdk, text):
    server.engine.script = Script(refuse=Refused("queue_full", 9, 3))
    with pytest.raises(openai.RateLimitError):
        sdk.responses.create(model="smol", input="Hi")
    server.engine.script = Script(reply=says(text, "a b c d"), fail_after=2, error=Unavailable("the engine was lost"))
    with pytest.raises(openai.APIError, match="the engine was lost"):
        list(sdk.responses.create(model="smol", input="Hi", stream=True))


def test_leaving_aborts_and_retries_are_answered_once(server, sdk, text):
    server.engine.script = Script(delay_seconds=0.01)
    stream = sdk.responses.create(model="smol", input="x", stream=True)
    next(iter(stream))
    stream.close()
    assert eventually(lambda: not server.engine.live, 1.0)
    server.engine.script = Script(reply=says(text, "once"))
    server.engine.requests.clear()
    key = {"idempotency-key": "responses-1"}
    twice = [sdk.responses.create(model="smol", input="x", extra_headers=key) for _ in range(2)]
    assert twice[0].id == twice[1].id
    assert len(server.engine.requests) == 1
