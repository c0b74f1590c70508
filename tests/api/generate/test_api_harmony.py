"""A model that writes in channels, as gpt-oss does, over HTTP: thoughts, preambles and calls in every dialect."""

from __future__ import annotations

from dataclasses import replace

import openai
import pytest
from api_fakes import MODEL, VOCAB, Script, serving
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tool_rig import TOOLS, prompt_of, with_template

from baton.text.harmony_marks import CALL, CHANNEL, END, MARKS, MESSAGE, RETURN, START
from baton.text.loading import ModelText
from baton.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% if message.content and message.thinking and message.tool_calls %}{{ raise_exception('not both') }}{% endif %}"
    "{% if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
    "{% for call in message.tool_calls or [] %}<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary "
    "json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% if not message.tool_calls %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>{% endif %}"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HI = [{"role": "user", "content": "The weather in Oslo?"}]
CHAT = "/v1/chat/completions"
TURN = f"{START}assistant"
THOUGHT = f"{CHANNEL}analysis{MESSAGE}I have to look.{END}{TURN}"
PREAMBLE = f"{CHANNEL}commentary{MESSAGE}One moment.{END}{TURN}"
TO_WEATHER = f'{CHANNEL}commentary to=functions.weather <|constrain|>json{MESSAGE}{{"city": "Oslo"}}'
FINAL = f"{CHANNEL}final{MESSAGE}"


@pytest.fixture(scope="module")
def channels(text) -> ModelText:
    """The default model's tokenizer with gpt-oss' marks, as special tokens."""
    parts = text.tokenizer._parts
    backend = Backend.from_str(parts.backend.to_str())
    backend.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    more = replace(
        parts,
        backend=backend,
        token_bytes=(*parts.token_bytes, *(mark.encode() for mark in MARKS)),
        special_ids=parts.special_ids | set(range(VOCAB, VOCAB + len(MARKS))),
        eos_ids=(VOCAB + MARKS.index(RETURN), VOCAB + MARKS.index(CALL)),
    )
    return with_template(ModelText(Tokenizer(more), text.chat_template), TEMPLATE)


@pytest.fixture(scope="module")
def server(channels):
    with serving(channels, model=replace(MODEL, head_width=VOCAB + len(MARKS))) as made:
        yield made


def says(channels: ModelText, answer: str) -> Script:
    """The marks are tokens, as a model writes them."""
    tokenizer = channels.tokenizer
    return Script(reply=lambda *_: [*tokenizer.encode(answer, parse_special=True), tokenizer.eos_ids[0]])


@pytest.fixture
def ask(server, http, channels):
    def asked(answer: str, path: str = CHAT, **fields):
        server.engine.script = says(channels, answer)
        answered = http.post(server.url + path, json={"model": "smol", "messages": HI, **fields})
        assert answered.status_code == 200, answered.text
        return answered.json()

    return asked


def test_a_thought_and_an_answer(ask, channels):
    for fields in ({}, {"skip_special_tokens": False}, {"tools": TOOLS}):
        answer = ask(f"{THOUGHT}{FINAL}Rain.", **fields)
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Rain.", "I have to look.")
        thought = len(channels.tokenizer.encode("I have to look."))
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == thought + 1  # with the mark before it


def test_a_call_behind_a_preamble(ask):
    choice = ask(f"{THOUGHT}{PREAMBLE}{TO_WEATHER}", tools=TOOLS)["choices"][0]
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("One moment.", "I have to look.")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert choice["finish_reason"] == "tool_calls"


def test_streamed(server, channels):
    server.engine.script = says(channels, f"{THOUGHT}{PREAMBLE}{TO_WEATHER}")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as sdk:
        chunks = list(sdk.chat.completions.create(model="smol", messages=HI, stream=True, tools=TOOLS))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "I have to look."
    assert "".join(delta.content or "" for delta in deltas) == "One moment."
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert calls[0].name == "weather"
    assert "".join(call.arguments for call in calls) == '{"city": "Oslo"}'
    assert len(calls) > 2, "they come as they are made"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_in_other_dialects(ask):
    items = ask(f"{THOUGHT}{TO_WEATHER}", "/v1/responses", input="Oslo?", messages=None,
                tools=[{"type": "function", **TOOLS[0]["function"]}])["output"]  # fmt: skip
    assert [item["type"] for item in items] == ["reasoning", "function_call"]
    blocks = ask(f"{THOUGHT}{FINAL}Rain.", "/v1/messages", max_tokens=99)["content"]
    assert [(block["type"], block.get("thinking") or block.get("text")) for block in blocks] == [
        ("thinking", "I have to look."),
        ("text", "Rain."),
    ]
    message = ask(f"{THOUGHT}{FINAL}Rain.", "/api/chat", stream=False)["message"]
    assert (message["thinking"], message["content"]) == ("I have to look.", "Rain.")


def test_stop_strings_look_at_the_content(ask):
    message = ask(f"{THOUGHT}{FINAL}It has rain.", stop=["ha"])["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("It ", "I have to look.")


def test_thoughts_can_be_off_or_left_out(ask, server):
    message = ask(f"{FINAL}Rain.", reasoning_effort="none")["choices"][0]["message"]
    assert (message["content"], "reasoning" in message) == ("Rain.", False)
    assert prompt_of(server).endswith(f"{TURN}{CHANNEL}analysis{MESSAGE}{END}{TURN}")
    assert "reasoning" not in ask(f"{THOUGHT}{FINAL}Rain.", include_reasoning=False)["choices"][0]["message"]
    assert prompt_of(server).endswith(TURN)


def test_a_budget_is_refused(server, http):
    answer = http.post(server.url + CHAT, json={"messages": HI, "thinking_budget": 7})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


def test_a_message_is_gone_on_with(ask):
    messages = [*HI, {"role": "assistant", "content": "It is"}]
    answer = ask(" rain.", messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert answer["choices"][0]["message"]["content"] == " rain."


def test_an_earlier_thought_reaches_the_template(ask, server):
    """Also beside a preamble, which the template refuses to have with it."""
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turn = {"role": "assistant", "content": "One moment.", "reasoning_content": "I have to look.", "tool_calls": [call]}
    ask(f"{FINAL}Rain.", messages=[*HI, turn, {"role": "tool", "tool_call_id": "a", "content": "rain"}], tools=TOOLS)
    assert f"{CHANNEL}analysis{MESSAGE}I have to look.{END}{TURN} to=functions.weather" in prompt_of(server)


# What must be said


def test_a_required_call_and_a_format_have_the_channels_in_their_grammar(ask, server):
    channel = VOCAB + MARKS.index(CHANNEL)
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for fields, has in (
        ({"tools": TOOLS, "tool_choice": "required"}, ["functions.weather", "functions.time_in"]),
        ({"response_format": schema}, ["final"]),
        ({"response_format": {"type": "json_object"}, "tools": TOOLS}, ["functions.weather", "final"]),
        ({"tools": [strict]}, ["functions.weather", "final"]),
    ):
        ask(f"{THOUGHT}{TO_WEATHER}", **fields)
        sampling = server.engine.requests[-1].sampling
        assert sampling.thinking is None
        assert f"<[{channel}]>" in sampling.grammar.text
        assert all(each in sampling.grammar.text for each in has)
        assert prompt_of(server).endswith(TURN)


def test_other_formats_begin_with_the_answer(ask, server):
    message = ask("rain", guided_choice=["rain", "sun"])["choices"][0]["message"]
    assert message["content"] == "rain"
    assert prompt_of(server).endswith(f"{TURN}{FINAL}")
    assert "channel" not in server.engine.requests[-1].sampling.grammar.text
