"""Tool calls and reasoning in the other dialects: their own clients unmodified, an agent framework, a scripted model."""

from __future__ import annotations

import json

import ollama
import openai
import pytest
from api_fakes import Script, Serving, says, serving
from pydantic import BaseModel
from tool_rig import QWEN, TOOLS, call, prompt_of, with_template

from baton.protocol.repetition import STOP_ON_REPETITION
from baton.protocol.request import FinishReason

ASK = [{"role": "user", "content": "How is Oslo?"}]
OSLO = call("weather", city="Oslo")
THOUGHT = "<think>\nHm.\n</think>\n\n"
BOTH = f"{THOUGHT}Let me look.\n{OSLO}\n{call('time_in', zone='CET')}"
RESPONSES_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
ANTHROPIC_TOOLS = [
    {"name": tool["function"]["name"], "description": "x", "input_schema": tool["function"]["parameters"]} for tool in TOOLS
]


@pytest.fixture(scope="module")
def shared_tool_server(text):
    with serving(with_template(text, QWEN)) as server:
        yield server


@pytest.fixture
def server(shared_tool_server: Serving):
    shared_tool_server.engine.script = Script()
    shared_tool_server.engine.requests.clear()
    return shared_tool_server


@pytest.fixture
def sdk(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


@pytest.fixture
def claude(server, anthropic):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


# Anthropic


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_blocks(server, claude, text, stream):
    server.engine.script = Script(reply=says(text, BOTH))
    fields = {"model": "smol", "max_tokens": 200, "messages": ASK, "tools": ANTHROPIC_TOOLS}
    if stream:
        with claude.messages.stream(**fields) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**fields)
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[0].thinking.strip() == "Hm."
    assert answer.content[1].text.strip() == "Let me look."
    calls = [(block.name, block.input) for block in answer.content[2:]]
    assert calls == [("weather", {"city": "Oslo"}), ("time_in", {"zone": "CET"})]
    assert answer.stop_reason == "tool_use"


def test_anthropic_results_go_to_the_template(server, claude, text):
    server.engine.script = Script(reply=says(text, "Cold."))
    messages = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "4 degrees"}]},
                {"type": "text", "text": "Well?"},
            ],
        },
    ]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    claude.messages.create(model="smol", max_tokens=9, messages=messages, tools=ANTHROPIC_TOOLS, tool_choice=choice)
    prompt = prompt_of(server)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in prompt
    assert "(Hm.)" in prompt
    assert "<tool_response>4 degrees</tool_response><|im_end|>\n<|im_start|>user\nWell?" in prompt
    assert '"name": "time_in"' in prompt


def test_anthropic_texts_and_results_stay_in_their_order(server, claude, text):
    server.engine.script = Script(reply=says(text, "Cold."))
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Oslo"}}]}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "4 degrees"}
    texts = [{"type": "text", "text": word} for word in ("Before.", "After.")]
    told = {"role": "user", "content": [texts[0], result, texts[1]]}
    claude.messages.create(model="smol", max_tokens=9, messages=[*ASK, used, told], tools=ANTHROPIC_TOOLS)
    prompt = prompt_of(server)
    assert prompt.index("Before.") < prompt.index("<tool_response>4 degrees") < prompt.index("After.")
    claude.messages.create(model="smol", max_tokens=9, messages=[*ASK, used], tools=ANTHROPIC_TOOLS)
    assert prompt_of(server).endswith("</tool_call><|im_end|>\n<|im_start|>assistant\n"), "a call is not gone on with"


@pytest.mark.parametrize(("disabled", "calls"), [(True, 1), (False, 2)])
def test_anthropic_one_call_at_most_where_parallel_ones_are_off(server, claude, text, disabled, calls):
    server.engine.script = Script(reply=says(text, BOTH))
    choice = {"type": "auto", "disable_parallel_tool_use": disabled}
    fields = {"model": "smol", "max_tokens": 200, "messages": ASK, "tools": ANTHROPIC_TOOLS, "tool_choice": choice}
    answer = claude.messages.create(**fields)
    assert [block.type for block in answer.content].count("tool_use") == calls


def test_anthropic_a_call_that_is_cut_is_no_call_to_make(server, claude, text):
    server.engine.script = Script(reply=says(text, OSLO))
    length = len(text.tokenizer.encode(OSLO)) - 8
    answer = claude.messages.create(model="smol", max_tokens=length, messages=ASK, tools=ANTHROPIC_TOOLS)
    assert (answer.content[0].type, answer.stop_reason) == ("tool_use", "max_tokens")


def test_anthropic_thinking_off(server, claude, text):
    server.engine.script = Script(reply=says(text, "Cold."))
    claude.messages.create(model="smol", max_tokens=9, messages=ASK, thinking={"type": "disabled"})
    assert prompt_of(server).endswith("<think>\n\n</think>\n\n")


# Ollama


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_calls(server, text, stream):
    server.engine.script = Script(reply=says(text, BOTH))
    answer = ollama.Client(host=server.url).chat("smol", ASK, tools=TOOLS, stream=stream)
    messages = [part.message for part in answer] if stream else [answer.message]
    assert "".join(message.thinking or "" for message in messages).strip() == "Hm."
    assert "".join(message.content or "" for message in messages).strip() == "Let me look."
    calls = [(each.function.name, each.function.arguments) for message in messages for each in message.tool_calls or []]
    assert calls == [("weather", {"city": "Oslo"}), ("time_in", {"zone": "CET"})]


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_a_call_that_is_cut_is_not_sent(server, text, stream):
    """There is no object to make of it, its arguments are no text of the answer, and a client would run it."""
    server.engine.script = Script(reply=says(text, OSLO))
    options = {"num_predict": len(text.tokenizer.encode(OSLO)) - 8}
    answer = ollama.Client(host=server.url).chat("smol", ASK, tools=TOOLS, options=options, stream=stream)
    parts = list(answer) if stream else [answer]
    assert not any(part.message.tool_calls for part in parts)
    assert "".join(part.message.content for part in parts) == ""
    assert parts[-1].done_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_a_call_that_is_cut_has_an_object_as_input(server, claude, text, stream):
    server.engine.script = Script(reply=says(text, OSLO))
    most = len(text.tokenizer.encode(OSLO)) - 8
    fields = {"model": "smol", "max_tokens": most, "messages": ASK, "tools": ANTHROPIC_TOOLS}
    if stream:
        with claude.messages.stream(**fields) as events:
            answer = events.get_final_message()
    else:
        answer = claude.messages.create(**fields)
    assert (answer.stop_reason, answer.content[0].name) == ("max_tokens", "weather")
    assert isinstance(answer.content[0].input, dict)
    if not stream:
        assert answer.content[0].input == {}


def test_responses_a_call_that_is_cut_is_never_completed(server, sdk, text):
    """Agents run a call when its item is done."""
    server.engine.script = Script(reply=says(text, f"Let me look.\n{OSLO}"))
    most = len(text.tokenizer.encode(f"Let me look.\n{OSLO}")) - 8
    fields = {"model": "smol", "input": "How is Oslo?", "max_output_tokens": most, "tools": RESPONSES_TOOLS}
    events = list(sdk.responses.create(**fields, stream=True))
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [(item.type, item.status) for item in done] == [("message", "completed"), ("function_call", "incomplete")]
    assert events[-1].type == "response.incomplete"
    whole = sdk.responses.create(**fields)
    for output in (events[-1].response.output, whole.output):
        assert [(item.type, item.status) for item in output] == [("message", "completed"), ("function_call", "incomplete")]
        assert output[1].arguments == done[1].arguments


def test_responses_a_call_that_is_whole_is_completed_though_the_answer_is_cut(server, sdk, text):
    """The arguments are all there; only the closing mark is not."""
    server.engine.script = Script(reply=says(text, OSLO))
    most = len(text.tokenizer.encode(OSLO)) - 3
    fields = {"model": "smol", "input": "How is Oslo?", "max_output_tokens": most, "tools": RESPONSES_TOOLS}
    answer = sdk.responses.create(**fields)
    assert (answer.status, answer.output[0].status) == ("incomplete", "completed")
    assert json.loads(answer.output[0].arguments) == {"city": "Oslo"}


def test_responses_a_text_that_is_cut_is_incomplete_in_its_own_event(server, sdk, text):
    server.engine.script = Script(reply=says(text, "Once upon a time there was"))
    events = list(sdk.responses.create(model="smol", input="Hi", max_output_tokens=3, stream=True))
    assert next(event for event in events if event.type == "response.output_item.done").item.status == "incomplete"


def test_an_answer_that_repeats_itself_is_a_stop_to_typed_clients(server, sdk, claude, http, text):
    """Agents ask for more where an answer ended by its length: here there would be more of the same."""
    server.engine.script = Script(reply=says(text, "word " * 20, then_end=False), ends_by=FinishReason.REPETITION)
    rule = {"stop_on_repetition": True}
    for stream in (False, True):
        chat = sdk.chat.completions.create(model="smol", messages=ASK, stream=stream, extra_body=rule)
        chat = [*chat][-1].choices[0] if stream else chat.choices[0]
        assert (chat.finish_reason, chat.ended_by) == ("stop", "repetition")
    response = sdk.responses.create(model="smol", input="Hi", extra_body=rule)
    assert (response.status, response.incomplete_details, response.ended_by) == ("completed", None, "repetition")
    assert response.output[0].status == "completed"
    message = claude.messages.create(model="smol", max_tokens=300, messages=ASK, extra_body=rule)
    assert (message.stop_reason, message.ended_by) == ("end_turn", "repetition")
    line = http.post(server.url + "/api/chat", json={"model": "smol", "messages": ASK, "stream": False, **rule}).json()
    assert (line["done_reason"], line["ended_by"]) == ("stop", "repetition")
    assert all(request.sampling.repetition_stop == STOP_ON_REPETITION for request in server.engine.requests)
    assert server.engine.requests[-1].sampling.repetition_stop is not None


def test_a_repetition_inside_a_call_is_not_a_whole_call(server, sdk, claude, text):
    """Whoever takes it for whole would run half of a call."""
    begun = OSLO[: OSLO.index("Oslo") + 2]
    server.engine.script = Script(reply=says(text, begun, then_end=False), ends_by=FinishReason.REPETITION)
    chat = sdk.chat.completions.create(model="smol", messages=ASK, tools=TOOLS).choices[0]
    assert (chat.finish_reason, chat.ended_by) == ("length", "repetition")
    fields = {"model": "smol", "input": "How is Oslo?", "tools": RESPONSES_TOOLS}
    response = sdk.responses.create(**fields)
    assert (response.status, response.output[0].status) == ("incomplete", "incomplete")
    events = list(sdk.responses.create(**fields, stream=True))
    assert (events[-1].type, events[-1].response.ended_by) == ("response.incomplete", "repetition")
    message = claude.messages.create(model="smol", max_tokens=300, messages=ASK, tools=ANTHROPIC_TOOLS)
    assert (message.stop_reason, message.ended_by) == ("max_tokens", "repetition")


def test_an_answer_that_was_ended_has_words_that_typed_clients_know(server, sdk, claude, http, text):
    """Their enums have neither abort nor timeout; what happened stands beside it."""
    server.engine.script = Script(reply=says(text, "word " * 200), delay_seconds=0.02)
    limit = {"timeout": 0.3}
    chat = sdk.chat.completions.create(model="smol", messages=ASK, extra_body=limit).choices[0]
    assert (chat.finish_reason, chat.ended_by) == ("length", "timeout")
    response = sdk.responses.create(model="smol", input="Hi", extra_body=limit)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.ended_by == "timeout"
    message = claude.messages.create(model="smol", max_tokens=300, messages=ASK, extra_body=limit)
    assert (message.stop_reason, message.ended_by) == ("max_tokens", "timeout")
    line = http.post(server.url + "/api/chat", json={"model": "smol", "messages": ASK, "stream": False, **limit}).json()
    assert (line["done_reason"], line["ended_by"]) == ("length", "timeout")


def test_ollama_results_go_to_the_template(server, text):
    server.engine.script = Script(reply=says(text, "Cold."))
    asked = {
        "role": "assistant",
        "thinking": "Hm.",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    }
    result = {"role": "tool", "tool_name": "weather", "content": "4 degrees"}
    client = ollama.Client(host=server.url)
    assert client.chat("smol", [*ASK, asked, result], think=False).message.content == "Cold."
    prompt = prompt_of(server)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in prompt
    assert "<tool_response>4 degrees</tool_response>" in prompt
    assert "(Hm.)" in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert {"tools", "thinking"} <= set(client.show("smol").capabilities)


# Responses


@pytest.mark.parametrize("stream", [False, True])
def test_responses_items(server, sdk, text, stream):
    server.engine.script = Script(reply=says(text, BOTH))
    answer = sdk.responses.create(model="smol", input="How is Oslo?", tools=RESPONSES_TOOLS, stream=stream)
    if stream:
        events = list(answer)
        assert [event.sequence_number for event in events] == list(range(len(events)))
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == json.dumps({"city": "Oslo"}) + json.dumps({"zone": "CET"})
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta").strip() == "Hm."
        answer = events[-1].response
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    assert answer.output[0].content[0].text.strip() == "Hm."
    assert answer.output_text.strip() == "Let me look."
    assert [json.loads(item.arguments) for item in answer.output[2:]] == [{"city": "Oslo"}, {"zone": "CET"}]
    assert answer.usage.output_tokens_details.reasoning_tokens > 0
    # The next turn: only the results are sent, the calls are known.
    server.engine.script = Script(reply=says(text, "Cold."))
    outputs = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"result {place}"}
        for place, item in enumerate(answer.output[2:])
    ]
    assert sdk.responses.create(model="smol", input=outputs, previous_response_id=answer.id).output_text == "Cold."
    prompt = prompt_of(server)
    assert prompt.index('{"city": "Oslo"}') < prompt.index("<tool_response>result 0") < prompt.index("<tool_response>result 1")


# An agent framework: it asks, calls our function with the model's arguments, and asks again with the result.


def _models(server):
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    by_openai = OpenAIProvider(base_url=server.url + "/v1", api_key="none")
    yield OpenAIChatModel("smol", provider=by_openai)
    yield OpenAIResponsesModel("smol", provider=by_openai)
    yield AnthropicModel("smol", provider=AnthropicProvider(base_url=server.url, api_key="none"))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["chat", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_its_tool(server, text, which, stream):
    called = []

    def turns(request, index):
        prompt = text.tokenizer.decode(request.prompt, skip_special_tokens=False)
        return says(text, "It is cold." if "<tool_response>" in prompt else OSLO)(request, index)

    server.engine.script = Script(reply=turns)
    from pydantic_ai import Agent

    agent = Agent(list(_models(server))[which])

    @agent.tool_plain
    def weather(city: str) -> str:
        """Weather in a city."""
        called.append(city)
        return "4 degrees"

    if stream:
        assert agent.run_stream_sync("How is Oslo?").get_output() == "It is cold."
    else:
        assert agent.run_sync("How is Oslo?").output == "It is cold."
    assert called == ["Oslo"]
    assert "<tool_response>4 degrees</tool_response>" in prompt_of(server)


# Structured output: the same grammar, whatever the client calls it.

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


class Answer(BaseModel):
    a: int


def test_structured_output(server, sdk, claude, text):
    server.engine.script = Script(reply=says(text, '{"a": 4}'))
    assert sdk.responses.parse(model="smol", input="x", text_format=Answer).output_parsed == Answer(a=4)
    form = {"type": "json_schema", "schema": SCHEMA}
    claude.messages.create(model="smol", max_tokens=20, messages=ASK, output_config={"format": form})
    ollama.Client(host=server.url).chat("smol", ASK, format=SCHEMA)
    ollama.Client(host=server.url).generate("smol", "x", format="json")
    kinds = [request.sampling.grammar.kind for request in server.engine.requests]
    assert kinds == ["json_schema"] * 4  # any object is a schema too
