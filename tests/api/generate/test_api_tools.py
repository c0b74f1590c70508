"""Tools over HTTP, with OpenAI's own client unmodified and a scripted model."""

from __future__ import annotations

import json

import openai
import pytest
from api_fakes import Script, Serving, says, serving
from pydantic import BaseModel
from tool_rig import QWEN, TOOLS, call, function, prompt_of, with_template

from baton.api.config import ApiConfig

HI = [{"role": "user", "content": "How is Oslo?"}]
OSLO = call("weather", city="Oslo")


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
def ask(server, sdk, text):
    """The model says `answer`; what the client gets of it."""

    def asked(answer: str, **fields):
        server.engine.script = Script(reply=says(text, answer))
        return sdk.chat.completions.create(**{"model": "smol", "messages": HI, "tools": TOOLS, **fields})

    return asked


def calls_of(message) -> list[tuple[str, dict]]:
    return [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls or []]


# Answers


def test_a_call(ask, server):
    choice = ask(f"Let me look.\n{OSLO}").choices[0]
    assert choice.message.content == "Let me look.\n"
    assert calls_of(choice.message) == [("weather", {"city": "Oslo"})]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].type == "function"
    assert len(choice.message.tool_calls[0].id) == 9
    assert '"name": "time_in"' in prompt_of(server)


def test_no_content_beside_calls_is_null(ask):
    message = ask(f"{OSLO}\n{call('time_in', zone='CET')}").choices[0].message
    assert message.content is None
    assert calls_of(message) == [("weather", {"city": "Oslo"}), ("time_in", {"zone": "CET"})]
    assert len({each.id for each in message.tool_calls}) == 2


def test_an_answer_without_a_call(ask):
    choice = ask("It is cold.").choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("It is cold.", None, "stop")


@pytest.mark.parametrize("answer", ["<tool_call>{oops}</tool_call>", call("nobody"), "<tool_call>", '{"name": "weather"'])
def test_a_malformed_call_is_content(ask, answer):
    choice = ask(answer).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (answer, None, "stop")


def test_an_answer_that_is_cut_says_so(ask, text):
    choice = ask(OSLO, max_tokens=len(text.tokenizer.encode('<tool_call>\n{"name": "weather", "arguments": {"ci'))).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"c')


def test_an_answer_that_ends_inside_a_character_shows_it(server, sdk, text):
    tokens = text.tokenizer.encode("\U0001f9ff", add_special_tokens=False)
    server.engine.script = Script(reply=lambda request, index: tokens[:-1])
    message = sdk.chat.completions.create(model="smol", messages=HI, tools=TOOLS).choices[0].message
    assert message.content == "\ufffd"


def test_what_might_have_become_a_stop_string_comes_before_the_call(server, sdk, text):
    server.engine.script = Script(reply=says(text, f"Let me look.\n{OSLO}"))
    fields = {"model": "smol", "messages": HI, "tools": TOOLS, "stop": ["\nEND"]}
    deltas = [chunk.choices[0].delta for chunk in sdk.chat.completions.create(**fields, stream=True)]
    called = next(place for place, delta in enumerate(deltas) if delta.tool_calls)
    assert "".join(delta.content or "" for delta in deltas[: called + 1]) == "Let me look.\n"


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
def test_streamed_calls(server, sdk, text, tokens_per_delta):
    answer = f"One moment.\n{OSLO}\n{call('time_in', zone='CET')}"
    server.engine.script = Script(reply=says(text, answer), tokens_per_delta=tokens_per_delta)
    chunks = list(sdk.chat.completions.create(model="smol", messages=HI, tools=TOOLS, stream=True))
    choices = [chunk.choices[0] for chunk in chunks]
    deltas = [delta for choice in choices for delta in choice.delta.tool_calls or []]
    assert "".join(choice.delta.content or "" for choice in choices) == "One moment.\n"
    named = [delta for delta in deltas if delta.id is not None]
    assert [(delta.index, delta.function.name, delta.type) for delta in named] == [
        (0, "weather", "function"),
        (1, "time_in", "function"),
    ]
    for index, arguments in enumerate(({"city": "Oslo"}, {"zone": "CET"})):
        assert json.loads("".join(delta.function.arguments for delta in deltas if delta.index == index)) == arguments
    assert choices[-1].finish_reason == "tool_calls"
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    if tokens_per_delta == 1:
        assert len([delta for delta in deltas if delta.index == 0]) > 3, "arguments come as they are made"


def test_the_clients_own_accumulator_reads_the_stream(server, sdk, text):
    server.engine.script = Script(reply=says(text, OSLO))
    with sdk.chat.completions.stream(model="smol", messages=HI, tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    assert calls_of(final.choices[0].message) == [("weather", {"city": "Oslo"})]


class weather(BaseModel):
    city: str


def test_parse_with_pydantic(server, sdk, text):
    server.engine.script = Script(reply=says(text, OSLO))
    parsed = sdk.chat.completions.parse(model="smol", messages=HI, tools=[openai.pydantic_function_tool(weather)])
    (made,) = parsed.choices[0].message.tool_calls
    assert made.function.parsed_arguments == weather(city="Oslo")
    assert '"strict": true' in prompt_of(server)


def test_every_choice_has_its_own_calls(server, sdk, text):
    replies = [says(text, OSLO), says(text, "No idea."), says(text, call("time_in", zone="CET"))]
    server.engine.script = Script(reply=lambda request, index: replies[index](request, index))
    answer = sdk.chat.completions.create(model="smol", messages=HI, tools=TOOLS, n=3)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop", "tool_calls"]
    assert [calls_of(choice.message)[:1] for choice in answer.choices] == [
        [("weather", {"city": "Oslo"})],
        [],
        [("time_in", {"zone": "CET"})],
    ]
    assert answer.choices[0].message.tool_calls[0].id != answer.choices[2].message.tool_calls[0].id


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_call_are_of_every_token(server, sdk, text, stream):
    ids = text.tokenizer.encode(OSLO)
    server.engine.script = Script(reply=says(text, OSLO))
    fields = {"model": "smol", "messages": HI, "tools": TOOLS, "logprobs": True, "top_logprobs": 1}
    if stream:
        chunks = list(sdk.chat.completions.create(**fields, stream=True))
        rows = [row for chunk in chunks for row in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])]
    else:
        rows = sdk.chat.completions.create(**fields).choices[0].logprobs.content
    assert [bytes(row.bytes) for row in rows[:-1]] == [text.tokenizer.id_to_bytes(token) for token in ids]


def test_stop_strings_look_at_the_content_alone(ask, server):
    choice = ask(OSLO + "\nand Oslo again", stop=["Oslo"]).choices[0]
    assert calls_of(choice.message) == [("weather", {"city": "Oslo"})]
    assert choice.message.content == "\nand "


# Requests


def test_one_call_at_most_without_parallel_ones(ask, server):
    choice = ask(OSLO + call("time_in", zone="CET"), parallel_tool_calls=False).choices[0]
    assert calls_of(choice.message) == [("weather", {"city": "Oslo"})]
    assert choice.finish_reason == "tool_calls"
    assert server.engine.aborts, "the engine goes on for nobody"


def test_tool_choice_none_tells_and_finds_nothing(ask, server):
    choice = ask(OSLO, tool_choice="none").choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (OSLO, None)
    assert "time_in" not in prompt_of(server)


def test_allowed_tools_are_told_and_no_other_is_called(ask, server):
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time_in"}}]}
    choice = ask(OSLO, tool_choice={"type": "allowed_tools", "allowed_tools": allowed}).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (OSLO, None)
    assert '"name": "weather"' in prompt_of(server), "the prompt stays that of all turns"


def test_a_whole_conversation(ask, server):
    made = ask(OSLO).choices[0].message
    results = [{"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": "4 degrees"}]
    final = ask("Four degrees.", messages=[*HI, made, *results]).choices[0]
    assert final.message.content == "Four degrees."
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>' in prompt_of(server)
    assert "<tool_response>4 degrees</tool_response>" in prompt_of(server)


def test_broken_arguments_can_be_played_back(ask, server):
    broken = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    ask("Sorry.", messages=[*HI, {"role": "assistant", "tool_calls": [broken]}, {"role": "tool", "content": "?"}])
    assert r"\"city\":" in prompt_of(server)


def test_no_tool_smuggles_in_a_control_token(ask, server, text):
    """Not in a description, a schema's type, or the arguments of an earlier call, however they are spelled."""
    tool = function("weather", city={"type": "<|im_end|>", "description": "<|im_end|>"})
    made = {"function": {"name": "weather", "arguments": '{"type": "\\u003c|im_end|>", "x": "<|im_end|>"}'}}
    ask("No.", tools=[tool], messages=[*HI, {"role": "assistant", "tool_calls": [made]}])
    ends = text.tokenizer.added_ids["<|im_end|>"]
    assert server.engine.requests[-1].prompt.count(ends) == 3  # of the tools, the question and the call
    assert prompt_of(server).count("<|im_end|>") == 7


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "x"}, "tools"),
        ({"tools": [1]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": 1}}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": [function(f"f{n}") for n in range(257)]}, "tools"),
        ({"tools": [function("f", x="y" * 2**20)]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"functions": [TOOLS[0]["function"]]}, "functions"),
        ({"function_call": {"name": "weather"}}, "function_call"),
    ],
)
def test_what_is_wrong_is_said(server, http, fields, param):
    answer = http.post(server.url + "/v1/chat/completions", json={"messages": HI, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not server.engine.requests


def test_tools_can_be_off(text, http):
    with serving(with_template(text, QWEN), ApiConfig(tool_call_parser="none")) as server:
        answer = http.post(server.url + "/v1/chat/completions", json={"messages": HI, "tools": TOOLS})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


def test_tokenize_counts_the_tools(server, http):
    counts = [
        http.post(server.url + "/tokenize", json={"messages": HI, **more}).json()["count"] for more in ({}, {"tools": TOOLS})
    ]
    assert counts[1] > counts[0] + 40


# A template that does not know tools


def test_any_model_can_call(text, http):
    """SmolLM2's template has no tools: they are put into words, and plain JSON is a call."""
    with serving(text) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="none") as sdk:
        server.engine.script = Script(reply=says(text, '{"name": "weather", "arguments": {"city": "Oslo"}}'))
        fields = {"model": "smol", "tools": TOOLS}
        made = sdk.chat.completions.create(messages=HI, **fields).choices[0].message
        assert calls_of(made) == [("weather", {"city": "Oslo"})]
        assert "You can call these tools" in prompt_of(server)
        results = [{"role": "tool", "tool_call_id": made.tool_calls[0].id, "content": word} for word in ("cold", "wet")]
        sdk.chat.completions.create(messages=[*HI, made, *results], **fields)
        assert "Result: cold\nResult: wet" in prompt_of(server)
        assert '{"name": "weather", "arguments": {"city": "Oslo"}}<|im_end|>' in prompt_of(server)


# Calls that must come: what the engine is asked; that a worker obeys a grammar is tested with the workers


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("choice", "names"), [("required", ["weather", "time_in"]), ("any", ["weather", "time_in"]), (NAMED, ["weather"])]
)
def test_a_call_that_is_required_is_enforced_by_a_grammar(ask, server, choice, names):
    answer = ask(OSLO, tool_choice=choice).choices[0]
    assert calls_of(answer.message) == [("weather", {"city": "Oslo"})]
    assert answer.finish_reason == "tool_calls"
    grammar = server.engine.requests[-1].sampling.grammar
    assert grammar.kind == "lark"
    for tool in TOOLS:
        named = tool["function"]["name"] in names
        assert (json.dumps(json.dumps(tool["function"]["name"]))[1:-1] in grammar.text) is named
        assert all((json.dumps(key) in grammar.text) is named for key in tool["function"]["parameters"]["properties"])
    assert grammar.ends


def test_a_strict_tool_is_held_to_its_schema_where_the_model_is_free(ask, server):
    strict = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}
    ask(call("weather", city="Oslo"), tools=[strict, TOOLS[1]])
    grammar = server.engine.requests[-1].sampling.grammar
    assert grammar.kind == "lark"
    assert "unbound" in grammar.text
    assert '"city"' in grammar.text
    assert '"zone"' not in grammar.text  # the other one is not strict: any object will do
    ask(call("weather", city="Oslo"), tools=[{**strict, "function": {**strict["function"], "strict": False}}])
    assert server.engine.requests[-1].sampling.grammar is None


def test_a_strict_tool_whose_schema_cannot_be_enforced_is_refused_in_words(text, http):
    """In Qwen3-Coder's style it was accepted, and its texts and its arguments as a whole were free."""
    parameters = {"type": "object", "properties": {"city": {"type": "string", "format": "x"}}}
    with serving(with_template(text, QWEN), ApiConfig(tool_call_parser="qwen3_coder")) as server:
        for more, words in (({}, "weather: city is strict, and format 'x'"), ({"not": {}}, "weather is strict, and not")):
            tool = {"type": "function", "function": {"name": "weather", "strict": True, "parameters": {**parameters, **more}}}
            fields = {"messages": HI, "tools": [tool], "tool_choice": "required"}
            answer = http.post(server.url + "/v1/chat/completions", json=fields)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("tools", "invalid_grammar")
            assert f"{words} cannot be enforced in calls as this model writes them" in error["message"]
        assert not server.engine.requests


def test_no_grammar_where_the_model_is_free(ask, server):
    for choice in ("auto", "none"):
        ask("No.", tool_choice=choice)
        assert server.engine.requests[-1].sampling.grammar is None
