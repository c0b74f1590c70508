"""Thoughts over HTTP: apart from the content, on and off, counted."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest
from api_fakes import MODEL, VOCAB, Script, Serving, says, serving
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tool_rig import QWEN, THINKS, TOOLS, call, prompt_of, with_template

from baton.api.config import ApiConfig
from baton.protocol.thinking import Thinking
from baton.text.loading import ModelText
from baton.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "2 + 2?"}]
CHAT = "/v1/chat/completions"
THOUGHT = "<think>\nTwo and two.\n</think>\n\nFour."


@pytest.fixture(scope="module")
def shared_thinker(text):
    with serving(with_template(text, QWEN)) as server:
        yield server


@pytest.fixture
def server(shared_thinker: Serving):
    shared_thinker.engine.script = Script()
    shared_thinker.engine.requests.clear()
    return shared_thinker


@pytest.fixture
def ask(server, http, text):
    def asked(answer: str, **fields):
        server.engine.script = Script(reply=says(text, answer))
        answered = http.post(server.url + CHAT, json={"messages": HI, **fields})
        assert answered.status_code == 200, answered.text
        return answered.json()

    return asked


def test_a_thought_is_not_content(ask, text):
    answer = ask(THOUGHT)
    message = answer["choices"][0]["message"]
    assert message["content"] == "Four."
    assert message["reasoning_content"] == message["reasoning"] == "Two and two."
    thought = len(text.tokenizer.encode("<think>\nTwo and two.\n</think>"))
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= thought


def test_tokens_of_a_thought_are_those_before_its_end(ask, text):
    """Up to the token that completes the closing tag, which is not of the thought any more."""
    tokens = text.tokenizer.encode(THOUGHT, add_special_tokens=False)
    begun = [text.tokenizer.decode(tokens[:count]) for count in range(1, len(tokens) + 1)]
    expected = sum("<think>" in said and "</think>" not in said for said in begun)
    usage = ask(THOUGHT)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == expected


def test_so_they_are_where_the_prompt_has_opened_the_thought(text, http):
    said = THOUGHT.removeprefix("<think>\n")
    tokens = text.tokenizer.encode(said, add_special_tokens=False)
    begun = [text.tokenizer.decode(tokens[:count]) for count in range(1, len(tokens) + 1)]
    with serving(with_template(text, THINKS)) as server:
        server.engine.script = Script(reply=says(text, said))
        usage = http.post(server.url + CHAT, json={"messages": HI}).json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == sum("</think>" not in each for each in begun)


def test_streamed_thoughts(server, text):
    server.engine.script = Script(reply=says(text, THOUGHT))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as sdk:
        deltas = [chunk.choices[0].delta for chunk in sdk.chat.completions.create(model="smol", messages=HI, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Two and two."
    assert "".join(delta.content or "" for delta in deltas) == "Four."
    assert deltas[0].role == "assistant"
    assert len([delta for delta in deltas if getattr(delta, "reasoning_content", None)]) > 1, "they come as they are made"
    assert not any(hasattr(delta, "reasoning") for delta in deltas), "a client that reads both names would show it twice"


def test_thoughts_and_calls(ask):
    choice = ask(f"<think>Hm.</think>\n{call('weather', city='Oslo')}", tools=TOOLS)["choices"][0]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Oslo"}'
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_ends_inside_its_thought_has_nothing_else(server, text, stream):
    server.engine.script = Script(reply=says(text, THOUGHT))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as sdk:
        answer = sdk.responses.create(model="smol", input="2 + 2?", max_output_tokens=8, stream=stream)
        answer = list(answer)[-1].response if stream else answer
    assert [(item.type, item.status) for item in answer.output] == [("reasoning", "incomplete")]
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_stop_string_in_a_thought_stops_nothing(ask):
    message = ask("<think>a\n\nb</think>c\n\nd", stop=["\n\n"])["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a\n\nb", "c")


def test_without_a_thought_there_is_no_key(ask):
    answer = ask("Four.")
    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    "off",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {"thinking": False}},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"thinking": False},
        {"think": False},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
        {"enable_thinking": False, "reasoning_effort": "none", "think": False},
    ],
)
def test_off(ask, server, off):
    ask("Four.", **off)
    assert prompt_of(server).endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("on", [{}, {"enable_thinking": True}, {"thinking": {"type": "enabled"}}, {"reasoning_effort": "high"}])
def test_on(ask, server, on):
    ask("Four.", **on)
    assert prompt_of(server).endswith("assistant\n")


def test_off_where_the_template_does_not_know_it(text, http):
    """It opens a thought: that is closed again, and where it stays open the answer begins inside it."""
    with serving(with_template(text, THINKS)) as server:
        server.engine.script = Script(reply=says(text, "Hm.</think>Four."))
        message = http.post(server.url + CHAT, json={"messages": HI}).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Four.")
        assert prompt_of(server).endswith("<think>\n")
        server.engine.script = Script(reply=says(text, "Four."))
        message = http.post(server.url + CHAT, json={"messages": HI, "enable_thinking": False}).json()["choices"][0]["message"]
        assert ("reasoning" in message, message["content"]) == (False, "Four.")
        assert prompt_of(server).endswith("<think>\n\n</think>\n\n")


def test_an_answer_that_is_all_thought(text, http):
    with serving(with_template(text, THINKS)) as server:
        server.engine.script = Script(reply=says(text, "Hm, hm, hm"))
        choice = http.post(server.url + CHAT, json={"messages": HI, "max_tokens": 3}).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
        assert choice["message"]["reasoning_content"].startswith("Hm")


def test_a_message_that_ends_inside_a_thought_is_gone_on_with(ask):
    def goes_on(begun: str, answer: str):
        messages = [*HI, {"role": "assistant", "content": begun}]
        said = ask(answer, messages=messages, continue_final_message=True, add_generation_prompt=False)["choices"][0]["message"]
        return said.get("reasoning_content"), said["content"]

    assert goes_on("<think>Two", " and two.</think>Four.") == ("and two.", "Four.")
    assert goes_on("<think>Two and two.</think>It is", " four.") == (None, " four.")
    assert goes_on("It is", " four.") == (None, " four.")


def test_thoughts_can_be_left_out_or_left_in(ask):
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        message = ask(THOUGHT, **fields)["choices"][0]["message"]
        assert ("reasoning_content" in message, message["content"]) == (False, "Four.")
    assert ask(THOUGHT, separate_reasoning=False)["choices"][0]["message"]["content"] == THOUGHT


def test_an_earlier_thought_reaches_the_template(ask, server):
    for name in ("reasoning", "reasoning_content"):
        ask("Yes.", messages=[*HI, {"role": "assistant", "content": "Four.", name: "Two and two."}, *HI])
        assert "Four.(Two and two.)" in prompt_of(server)


def test_the_parser_can_be_off(text, http):
    with serving(with_template(text, QWEN), ApiConfig(reasoning_parser="none")) as server:
        server.engine.script = Script(reply=says(text, THOUGHT))
        answer = http.post(server.url + CHAT, json={"messages": HI}).json()
        assert answer["choices"][0]["message"]["content"] == THOUGHT
        assert "completion_tokens_details" not in answer["usage"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"enable_thinking": True, "reasoning_effort": "none"}, "reasoning_effort"),
        ({"think": True, "thinking": {"type": "disabled"}}, "thinking"),
        ({"thinking_budget": 3, "thinking_token_budget": 4}, "thinking_budget"),
        ({"thinking_budget": -2}, "thinking_budget"),
        ({"thinking_budget": True}, "thinking_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking"),
        ({"thinking": {"type": "some"}}, "thinking"),
        ({"thinking": 3}, "thinking"),
        ({"think": 1}, "think"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"reasoning_effort": ["low"]}, "reasoning_effort"),
        ({"reasoning": {"enabled": 1}}, "reasoning"),
        ({"reasoning": []}, "reasoning"),
        ({"include_reasoning": 0}, "include_reasoning"),
    ],
)
def test_what_is_wrong_is_said(server, http, fields, param):
    answer = http.post(server.url + CHAT, json={"messages": HI, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_completions_have_no_thoughts(server, http):
    for fields in ({"reasoning_effort": "low"}, {"thinking_budget": 5}, {"tools": TOOLS}, {"think": True}):
        answer = http.post(server.url + "/v1/completions", json={"prompt": "x", **fields})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


# A budget


def with_thought_tokens(text):
    """The same tokenizer, with tags that are tokens of their own, as those of models that think are."""
    parts = text.tokenizer._parts
    backend = Backend.from_str(parts.backend.to_str())
    backend.add_tokens([AddedToken(tag, special=False) for tag in ("<think>", "</think>")])
    more = replace(parts, backend=backend, token_bytes=(*parts.token_bytes, b"<think>", b"</think>"))
    return ModelText(Tokenizer(more), text.chat_template)


@pytest.fixture(scope="module")
def budget_servers(text):
    model = replace(MODEL, head_width=VOCAB + 2)
    thinker = with_thought_tokens(text)
    with (
        serving(with_template(thinker, QWEN), model=model) as knows,
        serving(with_template(thinker, THINKS), model=model) as opens,
        serving(thinker, model=model) as plain,
    ):
        yield {"knows": knows, "opens": opens, "plain": plain}


@pytest.mark.parametrize(
    ("template", "fields", "rules"),
    [
        ("knows", {}, None),
        ("knows", {"thinking_budget": 7}, Thinking(end=VOCAB + 1, budget=7, start=VOCAB)),
        ("knows", {"thinking_token_budget": 7}, Thinking(end=VOCAB + 1, budget=7, start=VOCAB)),
        ("knows", {"thinking": {"type": "enabled", "budget_tokens": 7}}, Thinking(end=VOCAB + 1, budget=7, start=VOCAB)),
        ("knows", {"reasoning": {"max_tokens": 7}}, Thinking(end=VOCAB + 1, budget=7, start=VOCAB)),
        ("knows", {"reasoning_budget": -1}, None),
        ("knows", {"enable_thinking": False}, None),
        ("opens", {"thinking_budget": 7}, Thinking(end=VOCAB + 1, budget=7, start=VOCAB, is_open=True)),
        ("opens", {"thinking_budget": 7, "separate_reasoning": False}, Thinking(VOCAB + 1, 7, VOCAB, True)),
        ("opens", {"enable_thinking": False}, Thinking(end=VOCAB + 1, budget=0, start=VOCAB)),
        ("plain", {"think": False}, Thinking(end=VOCAB + 1, budget=0, start=VOCAB)),
    ],
)
def test_a_budget_reaches_the_sampler(budget_servers, http, template, fields, rules):
    server = budget_servers[template]
    assert http.post(server.url + CHAT, json={"messages": HI, "max_tokens": 3, **fields}).status_code == 200
    assert server.engine.requests[-1].sampling.thinking == rules


def test_a_budget_that_cannot_be_kept_is_refused(server, http, text):
    """Where the closing tag is several tokens, nobody sees it in token ids. A model without thoughts keeps within any."""
    answer = http.post(server.url + CHAT, json={"messages": HI, "thinking_budget": 7})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
    with serving(text) as plain:
        assert http.post(plain.url + CHAT, json={"messages": HI, "thinking_budget": 7, "max_tokens": 3}).status_code == 200


def test_a_closing_tag_that_the_model_s_head_does_not_have_is_no_token_of_it(text, http):
    """A tokenizer may know more tokens than the model can write."""
    with serving(with_template(with_thought_tokens(text), QWEN)) as server:
        answer = http.post(server.url + CHAT, json={"messages": HI, "thinking_budget": 7})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


def test_the_closing_token_cannot_be_forbidden(budget_servers, http):
    body = {"messages": HI, "thinking_budget": 7, "bad_words": ["</think>"]}
    assert http.post(budget_servers["knows"].url + CHAT, json=body).json()["error"]["param"] == "bad_words"
