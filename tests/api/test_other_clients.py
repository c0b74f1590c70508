"""Requests of clients that are not installed here, as they send them: each was written down from a run of the client against a
server (openai-node, Vercel's ai with its OpenAI provider, ollama-js, litellm, LangChain, Anthropic's and OpenAI's SDKs)."""

from __future__ import annotations

import base64
import json
import re
import struct
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from api_fakes import Script, eventually, says, serving
from tool_rig import QWEN, TOOLS, call, prompt_of, with_template

from baton.api.config import ApiConfig
from baton.api.embeddings.shape import floats
from baton.api.limits import Limits


@pytest.fixture(scope="module")
def shared_server(text):
    with serving(with_template(text, QWEN)) as server:
        yield server


@pytest.fixture
def sdk(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


FUNCTIONS = [{"type": "function", **tool["function"]} for tool in TOOLS]


# Vercel's ai, createOpenAI(...)(model): the second step of a chat with tools refers to the items of the first


def test_ai_sdk_refers_to_items_of_the_step_before(server, sdk, text):
    server.engine.script = Script(reply=says(text, "Let me look.\n" + call("weather", city="Oslo")))
    first = sdk.responses.create(model="smol", input="weather?", tools=FUNCTIONS)
    message, function_call = first.output
    server.engine.script = Script(reply=says(text, "Cold."))
    second = sdk.responses.create(
        model="smol",
        tools=FUNCTIONS,
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
            {"type": "item_reference", "id": message.id},
            {"type": "item_reference", "id": function_call.id},
            {"type": "function_call_output", "call_id": function_call.call_id, "output": '{"degrees":4}'},
        ],
    )
    assert second.output_text == "Cold."
    assert "assistant\nLet me look." in prompt_of(server)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in prompt_of(server)
    assert '<tool_response>{"degrees":4}</tool_response>' in prompt_of(server)


@pytest.mark.parametrize("name", ["msg_0000", "resp_0", "", "x", "msg_" + "f" * 34])
def test_an_item_that_is_not_kept_is_not_found(server, sdk, name):
    with pytest.raises(openai.NotFoundError, match="not kept"):
        sdk.responses.create(model="smol", input=[{"type": "item_reference", "id": name}])


def test_references_count_as_if_the_items_had_been_sent(text):
    """Thirty bytes refer to as much as an answer has: without a bound one request makes gigabytes of chat."""
    with serving(text, ApiConfig(limits=Limits(body_bytes=200_000))) as small:
        small.engine.script = Script(reply=says(text, "word " * 100))
        client = openai.OpenAI(base_url=small.url + "/v1", api_key="none", max_retries=0)
        item = client.responses.create(model="smol", input="Hi").output[0]
        few, many = ([{"type": "item_reference", "id": item.id}] * count for count in (2, 1500))
        small.engine.script = Script(reply=says(text, "Yes"))
        assert client.responses.create(model="smol", input=few).output_text == "Yes"
        with pytest.raises(openai.APIStatusError, match="refers to more than 200000 bytes") as refused:
            client.responses.create(model="smol", input=many)
        assert refused.value.status_code == 413


def test_an_item_of_another_tenant_is_not_found(server, text):
    with serving(text, ApiConfig(api_keys=("one", "two"))) as closed:
        closed.engine.script = Script(reply=says(text, "Hello"))
        theirs = openai.OpenAI(base_url=closed.url + "/v1", api_key="one", max_retries=0)
        item = theirs.responses.create(model="smol", input="Hi").output[0]
        assert theirs.responses.create(model="smol", input=[{"type": "item_reference", "id": item.id}]).output_text == "Hello"
        other = openai.OpenAI(base_url=closed.url + "/v1", api_key="two", max_retries=0)
        with pytest.raises(openai.NotFoundError):
            other.responses.create(model="smol", input=[{"type": "item_reference", "id": item.id}])


# openai-node: o.responses.inputItems.list(id)


def test_input_items(server, sdk, text):
    server.engine.script = Script(reply=says(text, "<think>Hm.</think>" + call("weather", city="Oslo")))
    first = sdk.responses.create(model="smol", input=[{"role": "user", "content": "weather?"}], tools=FUNCTIONS)
    done = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "4"}
    second = sdk.responses.create(model="smol", input=[done], previous_response_id=first.id, tools=FUNCTIONS)
    items = list(sdk.responses.input_items.list(second.id, order="asc", limit=2))  # the client asks for both pages
    assert [item.type for item in items] == ["message", "reasoning", "function_call", "function_call_output"]
    assert items[0].content[0].text == "weather?"
    for limit, more in ((3, True), (4, False)):
        assert sdk.responses.input_items.list(second.id, limit=limit).has_more is more
    assert len({item.id for item in items}) == 4
    assert [item.type for item in sdk.responses.input_items.list(second.id)] == [item.type for item in reversed(items)]
    with pytest.raises(openai.NotFoundError):
        list(sdk.responses.input_items.list("resp_none"))
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            sdk.responses.input_items.list(second.id, **query)


def test_a_thought_is_part_of_what_is_gone_on_with(server, sdk, text):
    server.engine.script = Script(reply=says(text, "<think>Hm.</think>Four."))
    first = sdk.responses.create(model="smol", input="2+2")
    sdk.responses.create(model="smol", input="Sure?", previous_response_id=first.id)
    assert "assistant\nFour.(Hm.)" in prompt_of(server)


# Codex, openai-agents, Vercel's ai with reasoningSummary: a thought is looked for in the summary


def test_a_thought_is_told_as_its_summary_where_one_is_asked_for(server, sdk, text):
    server.engine.script = Script(reply=says(text, "<think>Hm.</think>Four."))
    asked = {"model": "smol", "input": "2+2", "reasoning": {"effort": "low", "summary": "auto"}}
    whole = sdk.responses.create(**asked)
    assert [(part.type, part.text) for part in whole.output[0].summary] == [("summary_text", "Hm.")]
    assert not whole.output[0].content
    events = list(sdk.responses.create(**asked, stream=True))
    assert [event.type for event in events if "reasoning" in event.type] == [
        "response.reasoning_summary_part.added",
        *["response.reasoning_summary_text.delta"] * sum(event.type.endswith("summary_text.delta") for event in events),
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]
    assert "".join(event.delta for event in events if event.type.endswith("summary_text.delta")) == "Hm."
    assert events[-1].response.output[0].summary[0].text == "Hm."
    assert sdk.responses.create(model="smol", input="2+2").output[0].content[0].text == "Hm."
    with pytest.raises(openai.BadRequestError, match=r"reasoning\.summary"):
        sdk.responses.create(model="smol", input="2+2", reasoning={"summary": "long"})


# LangChain sends up to 1000 texts a request, Vercel's embedMany 2048; both may give dimensions


def test_many_texts_are_embedded_a_few_at_a_time(server, http):
    texts = [f"text {place}" for place in range(200)]
    most = []
    server.engine.script = Script(reply=lambda request, index: most.append(len(server.engine.live)) or [5])
    answer = http.post(server.url + "/v1/embeddings", json={"model": "smol", "input": texts})
    assert answer.status_code == 200, answer.text
    assert [row["index"] for row in answer.json()["data"]] == list(range(200))
    assert max(most) <= 64
    many = http.post(server.url + "/v1/embeddings", json={"model": "smol", "input": ["x"] * 2049})
    assert many.status_code == 400
    assert "at most 2048" in many.json()["error"]["message"]


def test_a_batch_that_is_left_asks_the_engine_for_no_more(server, http):
    server.engine.script = Script(silent=True)
    with pytest.raises(Exception, match="timed out"):
        http.post(server.url + "/v1/embeddings", json={"model": "smol", "input": ["x"] * 100}, timeout=0.3)
    assert eventually(lambda: not server.engine.live)
    assert len(server.engine.requests) == 64


def test_a_batch_that_is_aborted_asks_the_engine_for_no_more(server, http):
    server.engine.script = Script(delay_seconds=1.0)
    body, headers = {"model": "smol", "input": ["x"] * 100}, {"X-Request-Id": "a-batch"}
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(http.post, server.url + "/v1/embeddings", json=body, headers=headers)
        assert eventually(lambda: len(server.engine.live) == 64)
        assert http.post(server.url + "/v1/abort", json={"request_id": "a-batch"}).json()["aborted"] == 1
        answer = asking.result(20)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_vector")
    assert len(server.engine.requests) == 64


def test_dimensions(server, sdk, http):
    body = {"model": "smol", "input": "a b c d", "dimensions": 2}
    short = sdk.embeddings.create(**body).data[0].embedding
    assert len(short) == 2
    assert sum(number * number for number in short) == pytest.approx(1.0, abs=1e-6)
    plain = http.post(server.url + "/v1/embeddings", json={**body, "encoding_format": "float"}).json()["data"][0]["embedding"]
    packed = http.post(server.url + "/v1/embeddings", json={**body, "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert floats(base64.b64decode(packed)) == plain == short == list(struct.unpack("<2f", base64.b64decode(packed)))
    ollama = http.post(server.url + "/api/embed", json=body).json()["embeddings"][0]
    assert ollama == plain
    for wrong in (0, -1, 4, 2.0, True, "2"):
        answer = http.post(server.url + "/v1/embeddings", json={**body, "dimensions": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "dimensions"


# litellm's ollama_chat, and `curl -d` as in Ollama's documentation, do not say that the body is JSON


def test_ollamas_clients_need_not_say_that_a_body_is_json(server, http, text):
    server.engine.script = Script(reply=says(text, "Hello"))
    body = json.dumps({"model": "smol", "messages": [{"role": "user", "content": "Hi"}], "stream": False})
    url = server.url + "/api/chat"
    for headers in ({}, {"content-type": "application/x-www-form-urlencoded", "user-agent": "curl/8.5.0"}):
        answer = http.post(url, content=body, headers=headers)
        assert answer.json()["message"]["content"] == "Hello", answer.text
    page = {"user-agent": "Mozilla/5.0 (X11; Linux x86_64)"}
    ours = {"origin": server.url}  # a page that is allowed to ask still says what it sends
    for headers in (page, ours, {"referer": "http://a.example/"}, {"cookie": "a=b"}, {"sec-fetch-site": "none"}):
        for kind in ({}, {"content-type": "text/plain"}):
            assert http.post(url, content=body, headers={**headers, **kind}).status_code == 415
    assert http.post(server.url + "/v1/chat/completions", content=body).status_code == 415


# ollama-js: an error is a text; pull before chat


def test_ollamas_errors_are_texts_also_where_there_is_no_route(server, http):
    missing = http.delete(server.url + "/api/delete")
    assert missing.status_code == 404
    assert "no such route" in missing.json()["error"]
    anthropics = http.post(server.url + "/v1/messages/batches", json={})
    assert anthropics.json()["error"]["type"] == "not_found_error"
    assert http.get(server.url + "/v1/files").json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("stream", [True, False])
def test_the_served_model_need_not_be_pulled(server, http, stream):
    answer = http.post(server.url + "/api/pull", json={"model": "smol:latest", "stream": stream})
    assert json.loads(answer.text) == {"status": "success"}
    assert http.post(server.url + "/api/pull", json={"model": "other", "stream": stream}).status_code == 404


# Anthropic's SDKs list models at OpenAI's address


def test_anthropics_client_reads_the_models(server, anthropic):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        models = list(client.models.list())
        assert (models[0].id, models[0].type, models[0].display_name) == ("smol", "model", "smol")
        assert client.models.retrieve("smol").created_at.year == 1970


# Addresses that a newcomer configures


def test_an_openai_client_without_v1_learns_that_it_is_missing(server):
    with (
        openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as sdk,
        pytest.raises(openai.NotFoundError, match=r"/v1/chat/completions; configure .* with /v1 at the end"),
    ):
        sdk.chat.completions.create(model="smol", messages=[{"role": "user", "content": "Hi"}])


def test_an_anthropic_client_with_v1_learns_that_it_is_too_much(server, anthropic):
    with (
        anthropic.Anthropic(base_url=server.url + "/v1", api_key="none", max_retries=0) as sdk,
        pytest.raises(anthropic.NotFoundError, match="without /v1"),
    ):
        sdk.messages.create(model="smol", max_tokens=3, messages=[{"role": "user", "content": "Hi"}])


def test_an_ollama_client_with_v1_learns_that_it_is_too_much(server, http):
    answer = http.post(server.url + "/v1/api/chat", json={"model": "smol", "messages": []})
    assert (answer.status_code, "without /v1" in answer.text) == (404, True)


@pytest.mark.parametrize("path", ["/v1/completions", "/api/generate"])
def test_filling_in_the_middle_is_refused_with_the_reason(server, http, path):
    answer = http.post(server.url + path, json={"model": "smol", "prompt": "def f(", "suffix": "return x"})
    assert (answer.status_code, "no tokens to fill in the middle" in answer.text) == (400, True)


# huggingface_hub 2.4.0: InferenceClient(model=".../v1/chat/completions").chat_completion(response_format=SCHEMA, ...)


def test_hugging_faces_client_sends_a_schema_in_tgis_form(server, http):
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    body = {
        "model": "smol",
        "messages": [{"role": "user", "content": "Hi"}],
        "response_format": {"type": "json_object", "value": schema},
        "stream": False,
    }
    answer = http.post(server.url + "/v1/chat/completions", json=body)
    assert (answer.status_code, answer.headers.get("x-baton-ignored")) == (200, None)
    assert json.loads(server.engine.requests[-1].sampling.grammar.text) == schema


# litellm (ContextWindowExceededError), clients of Anthropic: a prompt that is too long is known by the words of its error

LONG = [{"role": "user", "content": "a b " * 400}]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": LONG}),
        ("/v1/completions", {"prompt": LONG[0]["content"]}),
        ("/v1/completions", {"prompt": [5] * 800}),
        ("/v1/completions", {"prompt": "a" * 1_000_000}),
        ("/v1/responses", {"input": LONG}),
        ("/v1/messages", {"messages": LONG, "max_tokens": 5}),
        ("/api/chat", {"messages": LONG}),
    ],
)
def test_clients_know_a_prompt_that_is_too_long_by_the_words(server, http, path, fields):
    answer = http.post(server.url + path, json={"model": "smol", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert re.search(r"prompt is too long: \d+ (tokens|characters) > \d+ maximum", message)  # Anthropic's, with both numbers
    assert "This model's maximum context length is 512 tokens" in message  # OpenAI's and vLLM's


# Editors that apply an edit: OpenAI's predicted output


def test_a_prediction_is_accepted(server, sdk, text):
    server.engine.script = Script(reply=says(text, "Yes"))
    predicted = {"type": "content", "content": "Yes, sir."}
    answer = sdk.chat.completions.create(model="smol", messages=[{"role": "user", "content": "Hi"}], prediction=predicted)
    assert answer.choices[0].message.content == "Yes"


# openai-python 3.51: responses.input_tokens.count


def test_tokens_of_a_response_are_counted(server, sdk, text):
    asked = {
        "model": "smol",
        "instructions": "Be brief.",
        "input": [{"role": "user", "content": "weather?"}],
        "tools": FUNCTIONS,
    }
    counted = sdk.responses.input_tokens.count(**asked)
    assert counted.object == "response.input_tokens"
    assert not server.engine.requests
    server.engine.script = Script(reply=says(text, "Cold."))
    first = sdk.responses.create(**asked)
    assert counted.input_tokens == first.usage.input_tokens
    again = {"model": "smol", "input": "Sure?", "previous_response_id": first.id}
    assert sdk.responses.input_tokens.count(**again).input_tokens == sdk.responses.create(**again).usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        sdk.responses.input_tokens.count(model="smol", input="Hi", previous_response_id="resp_none")
