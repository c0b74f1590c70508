"""Claude Code and Codex CLI: a tool loop with reasoning, against a scripted model behind the real front.

data/*.json        the requests of such a loop, written down from a run of each program and shortened: in `make test`
the programs       themselves, from npm, at the versions below, as docs/clients.md configures them: in `make chaos`
"""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from agent_rig import LARGE, QUESTION, SECRET, from_npm, run, steps, tool_results
from api_fakes import Script, Serving, serving
from client_pages import configured, exported
from tool_rig import QWEN, call, events_of, prompt_of, with_template

from baton.api.config import ApiConfig

CLAUDE_CODE, CODEX = "@anthropic-ai/claude-code@2.1.326", "@openai/codex@0.169.0"
DATA = Path(__file__).parent / "data"
CLAUDE_REQUESTS = json.loads((DATA / "claude_code_2.1.326.json").read_text())
CODEX_REQUESTS = json.loads((DATA / "codex_0.169.0.json").read_text())


@pytest.fixture(scope="module")
def shared_server(text):
    with serving(with_template(text, QWEN), model=LARGE) as server:
        yield server


CLAUDE_CALLS = (call("Read", file_path="notes.txt"), call("ToolSearch", query="select:WebFetch"))
CODEX_CALLS = (call("exec_command", cmd="cat notes.txt"), call("multi_agent_v1.close_agent", target="nobody"))


# Their requests


@pytest.mark.parametrize("cut", [1, 3, 50])
def test_claude_code_finds_thoughts_text_and_calls_in_order(server, text, http, cut):
    server.engine.script = Script(reply=steps(text, *CLAUDE_CALLS), tokens_per_delta=cut)
    names = []
    for recorded in CLAUDE_REQUESTS:
        with http.stream("POST", server.url + recorded["path"], json=recorded["body"], headers=recorded["headers"]) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers.get("x-baton-ignored") in (None, "thinking.display")
            events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: ")]
        blocks = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        names.append([block.get("name") or block["type"] for block in blocks])
        ended = next(event for event in events if event["type"] == "message_delta")["delta"]["stop_reason"]
        assert ended == ("tool_use" if blocks[-1]["type"] == "tool_use" else "end_turn")
    assert names == [["thinking", "text", "Read"], ["thinking", "text", "ToolSearch"], ["thinking", "text"]]


def test_claude_code_late_system_messages_and_tools_that_were_looked_for_reach_the_model(server, text, http):
    server.engine.script = Script(reply=steps(text))
    prompts = []
    for recorded in CLAUDE_REQUESTS:
        assert http.post(server.url + recorded["path"], json={**recorded["body"], "stream": False}).status_code == 200
        prompts.append(prompt_of(server))
    assert "system\n# Environment" in prompts[0], "in the midst of the conversation"
    assert '"name": "DeferredToolPlaceholder"' not in prompts[0], "it is there to be looked for"
    assert '"name": "WebFetch"' not in prompts[1]
    assert '"name": "WebFetch"' in prompts[2]
    assert "<tool_response>The tool WebFetch can be called now.</tool_response>" in prompts[2]
    assert "(I need the file.)" in prompts[2], "the thought of the turn before"


@pytest.mark.parametrize("cut", [1, 3, 50])
def test_codex_finds_thoughts_text_and_calls_in_order(server, text, http, cut):
    server.engine.script = Script(reply=steps(text, *CODEX_CALLS), tokens_per_delta=cut)
    items = []
    for recorded in CODEX_REQUESTS:
        events = events_of(http, server.url, recorded["path"], recorded["body"])
        assert events[-1]["type"] == "response.completed"
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        items.append([item["type"] for item in done])
        if len(items) == 2:
            assert (done[-1]["name"], done[-1]["namespace"]) == ("close_agent", "multi_agent_v1")
    assert items == [
        ["reasoning", "message", "function_call"],
        ["reasoning", "message", "function_call"],
        ["reasoning", "message"],
    ]


def test_codex_developer_messages_are_one_system_message(server, text, http):
    server.engine.script = Script(reply=steps(text))
    first, *_, last = CODEX_REQUESTS
    answer = http.post(server.url + first["path"], json={**first["body"], "stream": False})
    assert answer.status_code == 200
    left_out = [
        f"tools[{place}].web_search" for place, tool in enumerate(first["body"]["tools"]) if tool["type"] == "web_search"
    ]
    assert answer.headers["x-baton-ignored"].split(", ")[-1] == left_out[0]
    prompt = prompt_of(server)
    assert prompt.count("<|im_start|>system\nYou are a coding agent") == 1
    assert prompt.index("<skills_instructions>") < prompt.index("<|im_end|>\n<|im_start|>user")
    assert '"name": "multi_agent_v1.close_agent"' in prompt
    http.post(server.url + last["path"], json={**last["body"], "stream": False})
    assert '<tool_call>{"name": "multi_agent_v1.close_agent", "arguments": {"target": "nobody"}}' in prompt_of(server)


# What they ask for and this server does not do


def responses(http, server: Serving, **fields):
    return http.post(server.url + "/v1/responses", json={"model": "smol", "input": "Hi", **fields})


def messages(http, server: Serving, **fields):
    body = {"model": "smol", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return http.post(server.url + "/v1/messages", json=body)


BUILT_IN = [
    {"type": "web_search"},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "image_generation"},
    {"type": "file_search", "vector_store_ids": ["x"]},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "mcp", "server_label": "x"},
    {"type": "computer_use_preview"},
]


def test_responses_built_in_tools_are_left_out_and_named(server, http):
    answer = responses(http, server, tools=BUILT_IN, max_output_tokens=2)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-baton-ignored"].split(", ") == [f"tools[{n}].{each['type']}" for n, each in enumerate(BUILT_IN)]


def test_responses_a_built_in_tool_that_is_demanded_is_refused(server, http):
    answer = responses(http, server, tools=BUILT_IN, tool_choice={"type": "web_search_preview"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert "cannot run" in answer.json()["error"]["message"]
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, {"type": "function", "name": "f"}]}
    function = {"type": "function", "name": "f", "parameters": {}}
    assert responses(http, server, tools=[*BUILT_IN, function], tool_choice=allowed, max_output_tokens=2).status_code == 200
    assert responses(http, server, tools=[{"type": "functon", "name": "f"}]).status_code == 400, "not a type that there is"


def test_responses_a_function_of_a_namespace_can_be_demanded(server, text, http):
    server.engine.script = Script(reply=steps(text, call("ns.f")))
    tools = [
        {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}]}
    ]
    answer = responses(http, server, tools=tools, tool_choice={"type": "function", "name": "f", "namespace": "ns"}).json()
    assert [(item["name"], item["namespace"]) for item in answer["output"] if item["type"] == "function_call"] == [("f", "ns")]


@pytest.mark.parametrize(
    ("edits", "named"),
    [
        ([], None),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], None),
        ([{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}}], "clear_tool_uses_20250919"),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 2}}], "clear_thinking_20251015"),
    ],
)
def test_anthropic_edits_that_would_only_take_something_out(server, http, edits, named):
    answer = messages(http, server, context_management={"edits": edits})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-baton-ignored") == (None if named is None else f"context_management.edits[0].{named}")


@pytest.mark.parametrize("value", [{"edits": [{"type": "rewrite_all"}]}, {"edits": 3}, [], "all", {"others": 1}])
def test_anthropic_edits_that_are_not_known_are_refused(server, http, value):
    answer = messages(http, server, context_management=value)
    assert answer.status_code == 400
    assert "context_management" in answer.json()["error"]["message"]


def test_anthropic_server_tools_are_left_out_and_named(server, http):
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    own = {"name": "f", "input_schema": {"type": "object"}}
    answer = messages(http, server, tools=[search, own])
    assert (answer.status_code, answer.headers["x-baton-ignored"]) == (200, "tools[0].web_search_20250305")
    assert '"name": "web_search"' not in prompt_of(server)
    refused = messages(http, server, tools=[search, own], tool_choice={"type": "tool", "name": "web_search"})
    assert refused.status_code == 400
    assert "cannot run" in refused.json()["error"]["message"]
    assert messages(http, server, tools=[{"type": "other_20250305", "name": "x"}]).status_code == 400


def test_anthropic_deferred_tools_are_offered_where_the_server_would_look_for_them(server, http):
    """Nobody else would find them."""
    deferred = {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True}
    messages(http, server, tools=[deferred, {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}])
    assert '"name": "f"' in prompt_of(server)


@pytest.mark.parametrize("name", [["f"], {"f": 1}, 1, None])
def test_anthropic_deferred_tool_whose_name_is_no_text_is_refused(server, http, name):
    answer = messages(http, server, tools=[{"name": name, "input_schema": {"type": "object"}, "defer_loading": True}])
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_with_unknown_fields_refused_so_are_tools_that_would_be_left_out(text, http):
    with serving(text, ApiConfig(unknown_fields="refuse")) as strict:
        answer = responses(http, strict, tools=[{"type": "web_search"}])
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_field")
        edit = {"edits": [{"type": "clear_tool_uses_20250919"}]}
        assert messages(http, strict, context_management=edit).status_code == 400
        assert messages(http, strict, context_management={"edits": []}).status_code == 200


def test_the_sdks_take_what_comes_back(server, text, anthropic):
    server.engine.script = Script(reply=steps(text, call("ns.f")))
    tools = [
        {"type": "namespace", "name": "ns", "description": "x", "tools": [{"type": "function", "name": "f", "parameters": {}}]}
    ]
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as sdk:
        found = sdk.responses.create(model="smol", input="Hi", tools=[*tools, {"type": "web_search"}])
        assert (found.output[-1].name, found.output[-1].namespace) == ("f", "ns")
    server.engine.script = Script(reply=steps(text))
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
        edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
        told = claude.beta.messages.create(
            model="smol", max_tokens=99, messages=[{"role": "user", "content": "Hi"}], context_management=edits
        )
        assert [block.type for block in told.content] == ["thinking", "text"]


# The programs themselves


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 4])
def test_claude_code_finishes_a_tool_loop(server, text, tmp_path, cut):
    program = from_npm(CLAUDE_CODE, "claude")
    calls = (call("Read", file_path=str(tmp_path / "work" / "notes.txt")), call("ToolSearch", query="select:WebFetch"))
    server.engine.script = Script(reply=steps(text, *calls), tokens_per_delta=cut)
    settings = exported(configured("Claude Code", server.url, "smol", context=LARGE.context_tokens))
    said = run([program, "-p", QUESTION, "--allowedTools", "Read"], tmp_path, **settings)
    assert f"The secret word is {SECRET}." in said
    first, second = tool_results(server, text)
    assert f"is {SECRET}" in first
    assert second == "The tool WebFetch can be called now."


@pytest.mark.slow
@pytest.mark.parametrize("cut", [1, 4])
def test_codex_finishes_a_tool_loop(server, text, tmp_path, cut):
    """Its sandbox needs rights that a container may not give, so it is off."""
    program = from_npm(CODEX, "codex")
    server.engine.script = Script(reply=steps(text, *CODEX_CALLS), tokens_per_delta=cut)
    home = tmp_path / "codex"
    home.mkdir()
    (home / "config.toml").write_text(configured("Codex CLI", server.url, "smol", context=LARGE.context_tokens))
    command = [program, "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", QUESTION]
    assert f"The secret word is {SECRET}." in run(command, tmp_path, CODEX_HOME=str(home))
    first, second = tool_results(server, text)
    assert f"is {SECRET}" in first
    assert "invalid agent id" in second, "the program has found the function in its namespace"
