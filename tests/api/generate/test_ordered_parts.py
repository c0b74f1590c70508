"""One answer, cut into deltas in any way, is the same blocks in the same order, in every dialect, streamed or whole."""

from __future__ import annotations

import itertools
import json

import pytest
from api_fakes import Script, Serving, says, serving
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tool_rig import QWEN, TOOLS, call, events_of, with_template

ASK = [{"role": "user", "content": "How is Oslo?"}]
ANSWER = (
    f"<think>\nHm.\n</think>\n\nLet me look.\n{call('weather', city='Oslo')} That was one.\n"
    f"{call('time_in', zone='CET')}{call('weather', city='Bergen')} Done."
)
BLOCKS = [
    ("reasoning", "Hm."),
    ("text", "Let me look."),
    ("call", "weather", {"city": "Oslo"}),
    ("text", "That was one."),
    ("call", "time_in", {"zone": "CET"}),
    ("call", "weather", {"city": "Bergen"}),
    ("text", "Done."),
]
"By hand, from ANSWER."
CUTS = st.lists(st.integers(1, 40), max_size=60).map(tuple)
MANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def shared_tool_server(text):
    with serving(with_template(text, QWEN)) as server:
        yield server


@pytest.fixture
def server(shared_tool_server: Serving):
    shared_tool_server.engine.script = Script()
    shared_tool_server.engine.requests.clear()
    return shared_tool_server


def scripted(server, text, cuts: tuple[int, ...], answer: str = ANSWER) -> None:
    server.engine.script = Script(reply=says(text, answer), cuts=cuts, tokens_per_delta=cuts[-1] if cuts else 1)


def merged(blocks: list[tuple]) -> list[tuple]:
    """Neighbours of a kind are one block. Calls are (kind, index, name, text) while they are merged."""
    joined: list[list] = []
    for kind, *rest in blocks:
        if joined and joined[-1][0] == kind and (kind != "call" or joined[-1][1] == rest[0]):
            joined[-1][-1] += rest[-1]
        else:
            joined.append([kind, *rest])
    return [
        (*block[:1], block[2], json.loads(block[3])) if block[0] == "call" else (block[0], block[1].strip()) for block in joined
    ]


# What a client makes of each dialect's stream, in the order in which it comes


def chat_blocks(http, url: str) -> list[tuple]:
    blocks: list[tuple] = []
    for chunk in events_of(http, url, "/v1/chat/completions", {"messages": ASK, "tools": TOOLS}):
        delta = chunk["choices"][0]["delta"]
        if delta.get("reasoning_content"):
            blocks.append(("reasoning", delta["reasoning_content"]))
        if delta.get("content"):
            blocks.append(("text", delta["content"]))
        for part in delta.get("tool_calls", ()):
            blocks.append(("call", part["index"], part["function"].get("name"), part["function"]["arguments"]))
    return merged(blocks)


def responses_blocks(http, url: str) -> list[tuple]:
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    events = events_of(http, url, "/v1/responses", {"input": "How is Oslo?", "tools": tools})
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    assert all(item["status"] == "completed" for item in done)
    return item_blocks(done)


def item_blocks(items: list[dict]) -> list[tuple]:
    blocks: list[tuple] = []
    for item in items:
        if item["type"] == "function_call":
            assert item["call_id"], "a call without an id"
            blocks.append(("call", item["name"], json.loads(item["arguments"])))
        else:
            kind = "text" if item["type"] == "message" else "reasoning"
            blocks.append((kind, item["content"][0]["text"].strip()))
    return blocks


def anthropic_tools() -> list[dict]:
    return [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]


def anthropic_blocks(http, url: str) -> list[tuple]:
    blocks: list[tuple] = []
    body = {"messages": ASK, "max_tokens": 400, "tools": anthropic_tools()}
    for event in events_of(http, url, "/v1/messages", body):
        if event["type"] == "content_block_start":
            block = event["content_block"]
            kind = {"text": "text", "thinking": "reasoning", "tool_use": "call"}[block["type"]]
            blocks.append((kind, event["index"], block["name"], "") if kind == "call" else (kind, ""))
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            words = {key: delta.get(key, "") for key in ("text", "thinking", "partial_json")}
            blocks[-1] = (*blocks[-1][:-1], blocks[-1][-1] + "".join(words.values()))
    assert not any(first[0] == second[0] != "call" for first, second in itertools.pairwise(blocks)), "one block is two"
    return merged(blocks)


def ollama_blocks(http, url: str) -> list[tuple]:
    blocks: list[tuple] = []
    for line in events_of(http, url, "/api/chat", {"messages": ASK, "tools": TOOLS}):
        message = line["message"]
        if message.get("thinking"):
            blocks.append(("reasoning", message["thinking"]))
        if message["content"]:
            blocks.append(("text", message["content"]))
        for part in message.get("tool_calls", ()):
            function = part["function"]
            blocks.append(("call", function["index"], function["name"], json.dumps(function["arguments"])))
    return merged(blocks)


@MANY
@given(cuts=CUTS)
@example(cuts=(3,))
@example(cuts=(7,))
@example(cuts=(1000,))
def test_every_cut_gives_the_same_blocks(server, http, text, cuts):
    scripted(server, text, cuts)
    for blocks in (chat_blocks, responses_blocks, anthropic_blocks, ollama_blocks):
        assert blocks(http, server.url) == BLOCKS, blocks.__name__


@MANY
@given(cuts=CUTS)
@example(cuts=(1000,))
def test_every_cut_gives_the_same_whole_answer(server, http, text, cuts):
    def ask(path: str, **body):
        return http.post(server.url + path, json={"model": "smol", "stream": False, **body}).json()

    scripted(server, text, cuts)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    assert item_blocks(ask("/v1/responses", input="How is Oslo?", tools=tools)["output"]) == BLOCKS
    content = ask("/v1/messages", messages=ASK, max_tokens=400, tools=anthropic_tools())["content"]
    kinds = {"text": "text", "thinking": "reasoning", "tool_use": "call"}
    found = [
        ("call", block["name"], block["input"])
        if block["type"] == "tool_use"
        else (kinds[block["type"]], block[block["type"]].strip())
        for block in content
    ]
    assert found == BLOCKS
    calls = [block[1:] for block in BLOCKS if block[0] == "call"]
    words = " ".join(block[1] for block in BLOCKS if block[0] == "text")
    for message in (
        ask("/v1/chat/completions", messages=ASK, tools=TOOLS)["choices"][0]["message"],
        ask("/api/chat", messages=ASK, tools=TOOLS)["message"],
    ):
        assert " ".join(message["content"].split()) == words
        assert (message.get("reasoning_content") or message["thinking"]).strip() == "Hm."
        functions = [part["function"] for part in message["tool_calls"]]
        arguments = [part["arguments"] for part in functions]
        parsed = [json.loads(part) if isinstance(part, str) else part for part in arguments]
        assert list(zip([part["name"] for part in functions], parsed, strict=True)) == calls
    scripted(server, text, cuts, "Once upon a time")
    assert ask("/v1/completions", prompt="x", max_tokens=99)["choices"][0]["text"] == "Once upon a time"


@MANY
@given(cuts=CUTS)
@example(cuts=(1000,))
def test_log_probabilities_come_with_the_text_that_they_are_of(server, http, text, cuts):
    """Of /v1/responses: with each delta, again when the text is done, and in a whole answer."""
    scripted(server, text, cuts)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": "How is Oslo?", "tools": tools, "include": ["message.output_text.logprobs"]}
    events = events_of(http, server.url, "/v1/responses", body)
    by_delta: dict[int, list] = {}
    for event in events:
        if event["type"] == "response.output_text.delta":
            by_delta.setdefault(event["output_index"], []).extend(event["logprobs"])
    done = {event["output_index"]: event["logprobs"] for event in events if event["type"] == "response.output_text.done"}
    whole = http.post(server.url + "/v1/responses", json={"model": "smol", **body}).json()["output"]
    in_whole = {place: item["content"][0]["logprobs"] for place, item in enumerate(whole) if item["type"] == "message"}
    assert by_delta == done == in_whole
    assert list(done) == [1, 3, 6]
    assert "".join(row["token"] for row in done[6]).strip().endswith("Done.")
    tokens = {place: len(rows) for place, rows in done.items()}
    assert all(1 < count < 20 for count in tokens.values()), tokens


@MANY
@given(cuts=CUTS)
@example(cuts=(1000,))
def test_chunks_keep_tokens_and_log_probabilities_in_order(server, http, text, cuts):
    scripted(server, text, cuts)
    body = {"messages": ASK, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    chunks = [event["choices"][0] for event in events_of(http, server.url, "/v1/chat/completions", body)]
    rows = [row["token"] for chunk in chunks for row in chunk["logprobs"]["content"]]
    ids = [token for chunk in chunks for token in chunk["token_ids"]]
    expected = says(text, ANSWER)(None, 0)
    assert ids == expected
    assert "".join(rows) == text.tokenizer.decode(expected, skip_special_tokens=False)
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["tool_calls"]
