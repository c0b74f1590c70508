"""What clients of other servers send, and what typed clients read: small things, each of which broke one."""

from __future__ import annotations

import json

import openai
import pytest
from api_fakes import Script, Serving, says, serving
from tool_rig import QWEN, TOOLS, prompt_of, with_template

from baton.api.config import ApiConfig

HI = [{"role": "user", "content": "Hi"}]
UNIQUE = {"type": "object", "properties": {"xs": {"type": "array", "uniqueItems": True}}, "required": ["xs"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": UNIQUE}}


@pytest.fixture(scope="module")
def shared_tool_server(text):
    with serving(with_template(text, QWEN)) as server:
        yield server


@pytest.fixture
def server(shared_tool_server: Serving, text):
    shared_tool_server.engine.script = Script(reply=says(text, "Yes."))
    shared_tool_server.engine.requests.clear()
    return shared_tool_server


@pytest.fixture
def ask(server, http):
    def asked(path: str, **body):
        given = {"/v1/responses": {"input": "Hi"}, "/v1/completions": {"prompt": "x"}}.get(path, {"messages": HI})
        return http.post(server.url + path, json={"model": "smol", "stream": False, **given, **body})

    return asked


CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


# Schemas are held to as much as is promised, also where there are tools


def test_a_format_that_cannot_be_enforced_is_refused_beside_tools_too(ask):
    for tools in ({}, {"tools": TOOLS}):
        answer = ask(CHAT, response_format=FORMAT, **tools)
        assert answer.status_code == 400, tools
        assert "uniqueItems" in answer.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_strict_tool_whose_schema_cannot_be_enforced_is_refused(ask, choice):
    def tool(**more):
        return [{"type": "function", "function": {"name": "f", "parameters": UNIQUE, **more}}]

    assert ask(CHAT, tools=tool(), tool_choice=choice).status_code == 200, "a wish"
    answer = ask(CHAT, tools=tool(strict=True), tool_choice=choice)
    assert answer.status_code == 400
    assert "uniqueItems" in answer.json()["error"]["message"]


def test_anthropic_strict_tools_are_enforced(ask, server):
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"name": "weather", "input_schema": schema}
    assert ask(MESSAGES, max_tokens=9, tools=[tool]).status_code == 200
    assert server.engine.requests[-1].sampling.grammar is None
    assert ask(MESSAGES, max_tokens=9, tools=[{**tool, "strict": True}]).status_code == 200
    assert '"city"' in server.engine.requests[-1].sampling.grammar.text
    assert ask(MESSAGES, max_tokens=9, tools=[{**tool, "strict": "yes"}]).status_code == 400


def test_advice_is_one_that_a_client_can_follow(ask):
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    message = ask(CHAT, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}).json()[
        "error"
    ]["message"]
    assert "coerce_one_of" not in message
    assert message.endswith("Use anyOf")


# Names


def test_the_rest_of_text_is_named(ask):
    answer = ask(RESPONSES, text={"verbosity": "low", "format": {"type": "text"}})
    assert answer.status_code == 200
    assert answer.headers["x-baton-ignored"] == "text.verbosity"


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "data:,"}]},
        {
            "type": "function_call_output",
            "call_id": "1",
            "output": [{"type": "input_text", "text": "x"}, {"type": "input_file"}],
        },
    ],
)
def test_an_image_is_refused_where_the_client_wrote_it(ask, item):
    answer = ask(RESPONSES, instructions="Be brief.", input=[{"role": "user", "content": "x"}, item])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "input")
    assert error["message"].startswith("input[1].")
    assert "[1] is not a text part" in error["message"]


NO_GAP = (
    "smol has no tokens to fill in the middle: serve one that was trained for it (Qwen2.5-Coder), or put what comes before "
    "the gap in prompt"
)


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("/api/chat", {"options": {"typical_p": 0.5}}, "options.typical_p is not supported"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, NO_GAP),
        (MESSAGES, {"container": "x"}, "container is not supported"),
        (RESPONSES, {"background": True}, "background is not supported"),
    ],
)
def test_a_refusal_says_it_once(ask, path, fields, message):
    answer = ask(path, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error if isinstance(error, str) else error["message"]) == message


# Values


def test_an_assistant_that_refused_may_be_quoted(ask, server):
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No, thanks."}]}
    assert ask(CHAT, messages=[*HI, refused, *HI]).status_code == 200
    assert "assistant\nNo, thanks." in prompt_of(server)
    assert ask(CHAT, messages=[*HI, {"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}]).status_code == 400


@pytest.mark.parametrize("user", ["x" * 300, "two\nlines", ""])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", RESPONSES])
def test_any_user_is_taken(ask, path, user):
    assert ask(path, user=user).status_code == 200
    assert ask(path, user=3).status_code == 400


def test_top_k_above_the_vocabulary_is_all_of_it(ask, server):
    assert ask(CHAT, top_k=100_000).status_code == 200
    assert server.engine.requests[-1].sampling.top_k == server.app.state.front.model.head_width


def test_azures_header_has_the_key(text, http):
    body = {"messages": HI, "max_tokens": 2}
    with serving(text, ApiConfig(api_keys=("right", "other"))) as closed:

        def status(**headers: str) -> int:
            return http.post(closed.url + CHAT, json=body, headers=headers).status_code

        assert status(**{"api-key": "right"}) == 200
        assert status(**{"api-key": "wrong"}) == 401
        assert status(**{"api-key": "right", "x-api-key": "right"}) == 200
        assert status(**{"api-key": "right", "x-api-key": "other"}) == 401, "whose request is it"
        assert status(**{"api-key": "right", "authorization": "Bearer other"}) == 401
        assert json.loads(http.get(closed.url + "/v1/models", headers={"api-key": "right"}).content)["data"]


def test_azures_client_is_answered(server):
    client = openai.AzureOpenAI(azure_endpoint=server.url, api_key="any", api_version="2024-10-21", max_retries=0)
    for name in ("smol", "gpt-3.5-turbo"):
        answer = client.chat.completions.create(model=name, messages=HI, max_tokens=2)
        assert answer.model == "smol"
    assert client.completions.create(model="smol", prompt="x", max_tokens=2).choices[0].text
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4o' here"):
        client.chat.completions.create(model="gpt-4o", messages=HI)
    newer = openai.OpenAI(base_url=server.url + "/openai/v1/", api_key="any", default_query={"api-version": "preview"})
    assert newer.chat.completions.create(model="smol", messages=HI, max_tokens=2).model == "smol"
    assert [model.id for model in newer.models.list()] == ["smol", "gpt-3.5-turbo"]


def test_the_deployment_is_the_model_whatever_the_body_names(server, http):
    """LangChain sends the name of the model behind the deployment."""
    paths = ("/openai/deployments/smol/chat/completions", "/openai/deployments/smol/chat/completions/")
    for path in paths:
        answer = http.post(f"{server.url}{path}?api-version=1", json={"model": "gpt-4o", "messages": HI, "max_tokens": 2})
        assert answer.json()["model"] == "smol"
    assert http.post(server.url + "/openai/deployments/smol/images/generations", json={}).status_code == 404
    assert http.post(server.url + "/openai/deployments//chat/completions", json={"messages": HI}).status_code == 404


def test_azures_paths_need_the_same_rights(text, http):
    with serving(text, ApiConfig(api_keys=("right",))) as closed:
        url = closed.url + "/openai/deployments/smol/chat/completions"
        assert http.post(url, json={"messages": HI, "max_tokens": 2}).status_code == 401
        assert http.post(url, json={"messages": HI, "max_tokens": 2}, headers={"api-key": "right"}).status_code == 200
        assert http.post(closed.url + "/openai/v1/pause", json={}, headers={"api-key": "right"}).status_code == 403


# FastDeploy's fields


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("prompt_token_ids", [1, 2], []),
        ("completion_token_ids", [1, 2], []),
        ("disable_chat_template", True, False),
        ("logits_processors_args", {"think_stop_sentence": "x"}, {}),
        ("temp_scaled_logprobs", True, False),
        ("top_p_normalized_logprobs", True, False),
        ("include_draft_logprobs", True, False),
        ("response_max_tokens", 5, None),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(ask, path, field, value, neutral):
    answer = ask(path, **{field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert ask(path, **{field: neutral}).status_code == 200


def test_bad_words_as_token_ids_are_bad_words(ask, server):
    assert ask(CHAT, bad_words_token_ids=[17, 18, 17], bad_words=["Oslo"]).status_code == 200
    words = server.engine.requests[-1].sampling.bad_words
    assert words[:2] == ((17,), (18,))
    assert len(words) > 2
    for wrong in ([-1], [10**9], ["x"], 5):
        answer = ask(CHAT, bad_words_token_ids=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bad_words_token_ids")


def test_a_bound_on_reasoning_under_fastdeploys_name(ask, server):
    body = {"thinking_token_budget": 7, "reasoning_max_tokens": 8}
    assert ask(CHAT, **body).status_code == 400, "they are one setting, and differ"
    answer = ask(CHAT, reasoning_max_tokens=7)
    # SmolLM2 has no token for the end of a thought: then the budget is refused, under whatever name.
    assert "thinking budget is not supported by this model" in answer.json()["error"]["message"]
    assert ask("/v1/completions", reasoning_max_tokens=7).status_code == 400


def test_llama_cpps_name_for_the_penalty(ask, server):
    for path in (CHAT, "/v1/completions", RESPONSES):
        assert ask(path, repeat_penalty=1.25).status_code == 200
        assert server.engine.requests[-1].sampling.repetition_penalty == 1.25
        answer = ask(path, repeat_penalty=1.25, repetition_penalty=1.5)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repeat_penalty")
    assert ask(CHAT, repeat_penalty=0).json()["error"]["param"] == "repeat_penalty"
