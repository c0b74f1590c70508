"""Parts of drawn requests that have a shape of their own: tools, thoughts, formats of an answer, bodies of other dialects.

Some are right, some nearly, some hostile. chaos_fuzz.py puts them into requests.
"""

from __future__ import annotations

import random
from typing import Any

GOOD = ("weather", "time_in", "a.b-c", "f", "g/h", "_")
NAMES = ("weather", "time_in", "", "a b", "<|end|>", "x" * 200)
SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": ["x", "y"]}}},
    {"type": "object"}, {}, {"type": "array", "items": {"type": "number"}}, {"enum": [1, "a", None]}, {"$ref": "#"}, True,
    {"type": "string", "pattern": "(a+)+$"}, {"type": "string", "pattern": "("}, {"type": "nonsense"}, {"allOf": [{}] * 50},
    {"type": "string", "minLength": 5, "maxLength": 2}, {"$ref": "http://127.0.0.1/x"}, "not a schema", 7, None,
)  # fmt: skip
REGEXES = ("[a-c]{1,3}", "yes|no", "(", "(a*)*b", "\\d+", "", "a{1,100000}", "(?<=x)y")
GRAMMARS = ('root ::= "yes" | "no"', "root ::= root", 'start: "a" | "b"', "start: nothing", "root ::=", "☃" * 50)


def tool(dice: random.Random, name: str) -> Any:
    if dice.random() < 0.05:
        return dice.choice(
            (None, 1, "x", {}, {"type": "web_search"}, {"type": "function"}, {"type": "function", "function": []})
        )
    name = dice.choice(NAMES) if dice.random() < 0.05 else name
    function: dict[str, Any] = {"name": name, "description": dice.choice(("", "It.", "<|end|>", "é"))}
    if dice.random() < 0.8:
        function["parameters"] = dice.choice(SCHEMAS[:5] if dice.random() < 0.9 else SCHEMAS)
    if dice.random() < 0.1:
        function["strict"] = dice.choice((True, False, True, "yes"))
    return {"type": "function", "function": function}


def tool_fields(dice: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"tools": [tool(dice, name) for name in dice.sample(GOOD, dice.choice((0, 1, 1, 1, 2)))]}
    if dice.random() < 0.6:
        name = dice.choice([each["function"]["name"] for each in fields["tools"] if _has_name(each)] * 4 + list(NAMES))
        named = {"type": "function", "function": {"name": name}}
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": dice.choice(("auto", "required", 1)), "tools": [named]}}
        fields["tool_choice"] = dice.choice(("auto", "none", *["required"] * 4, *[named] * 4, allowed, "maybe", {}))
    if dice.random() < 0.3:
        fields["parallel_tool_calls"] = dice.choice((True, False, None, 1))
    return fields


def _has_name(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("function"), dict)


def tool_turns(dice: random.Random) -> list[dict[str, Any]]:
    """A call and its result, as a client plays them back."""
    arguments = dice.choice(
        ('{"city": "Oslo"}', "", "{broken", "[" * 300, '"text"', {"city": "Oslo"}, None, 5, '{"a": "\\u003c|end|>"}')
    )
    call = {"id": "c1", "type": "function", "function": {"name": dice.choice(NAMES), "arguments": arguments}}
    result = dice.choice(("4 degrees", "", [{"type": "text", "text": "4"}], None))
    calls = dice.choice(([call], [call], [call, call], [], [1], "x"))
    return [
        {"role": "assistant", "content": dice.choice((None, "", "Let me look.")), "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]


def thinking_fields(dice: random.Random) -> dict[str, Any]:
    budget = dice.choice((0, 1, 5, -1, -2, 2**40, "many"))
    return dice.choice(
        (
            {"enable_thinking": dice.choice((True, False, 1))},
            {"reasoning_effort": dice.choice(("none", "low", "high", "huge", 3))},
            {"thinking": dice.choice(({"type": "enabled", "budget_tokens": budget}, {"type": "disabled"}, {"type": 1}, True))},
            {"think": dice.choice((True, False, "low", 1))},
            {dice.choice(("thinking_budget", "thinking_token_budget", "reasoning_budget")): budget},
            {"reasoning": dice.choice(({"effort": "none"}, {"max_tokens": budget}, {"enabled": 1}, {"exclude": True}, []))},
            {"include_reasoning": dice.choice((True, False, 0)), "separate_reasoning": dice.choice((True, False))},
        )
    )


def format_fields(dice: random.Random) -> dict[str, Any]:
    """What the answer must look like."""
    schema, kind = dice.choice(SCHEMAS[:5] * 3 + SCHEMAS), dice.choice(("json", "regex", "choice", "grammar"))
    return dice.choice(
        (
            {"response_format": {"type": dice.choice(("json_object", "text", "xml"))}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}},
            {"guided_json": schema},
            {"guided_regex": dice.choice(REGEXES)},
            {"guided_choice": dice.choice((["yes", "no"], [], ["a"] * 2000, [1], "x"))},
            {"guided_grammar": dice.choice(GRAMMARS)},
            {"grammar": dice.choice(GRAMMARS)},
            {"structured_outputs": {kind: dice.choice((schema, "[ab]+", ["a"]))}},
        )
    )


def other_dialect(dice: random.Random, chat: dict[str, Any], text: str) -> tuple[str, dict[str, Any]]:
    """Path and body of another server's API; a route that is not there answers 404."""
    messages, stream = chat["messages"], dice.random() < 0.3
    few = {"max_tokens": dice.randint(1, 8), "stream": stream}
    options = {"num_predict": dice.randint(1, 8), "temperature": dice.choice((0, 0.5, "hot"))}
    tools = [
        {"name": dice.choice(NAMES), "description": "x", "input_schema": dice.choice(SCHEMAS)}
        for _ in range(dice.randint(0, 2))
    ]
    system, kind = dice.choice((text, [{"type": "text", "text": text}])), {"type": dice.choice(("auto", "any"))}
    length, stored = {"max_output_tokens": few["max_tokens"], "stream": stream}, dice.random() < 0.5
    several = dice.choice((text, [text, "b"], [1, 2, 3]))
    return dice.choice(
        (
            ("/v1/messages", {"messages": messages, **few, "system": system}),
            ("/v1/messages", {"messages": messages, **few, "tools": tools, "tool_choice": kind}),
            ("/v1/messages/count_tokens", {"messages": messages}),
            ("/v1/responses", {"input": dice.choice((text, messages)), **length}),
            ("/v1/responses", {"input": text, "previous_response_id": dice.choice(("resp_1", 5)), "store": stored, **length}),
            ("/api/chat", {"model": "tiny", "messages": messages, "stream": stream, "options": options}),
            ("/api/generate", {"model": "tiny", "prompt": text, "stream": stream, "options": options}),
            ("/api/show", {"model": dice.choice(("tiny", "other"))}),
            ("/api/pull", {"model": dice.choice(("tiny", "other")), "stream": stream}),
            ("/api/embed", {"model": "tiny", "input": several}),
            ("/api/embeddings", {"model": "tiny", "prompt": text}),
            ("/v1/weights", {"model": dice.choice(("nowhere", 5))}),  # it is awake, so they are refused
            (dice.choice(("/v1/cache/clear", "/reset_prefix_cache", "/v1/resume", "/v1/wake")), {}),
            ("/v1/embeddings", {"input": several, "encoding_format": dice.choice(("float", "base64"))}),
        )
    )
