"""A real server with random weights: a required call comes, whole and by its schema, from a model that knows nothing."""

from __future__ import annotations

import asyncio
import json

from chaos_server import Server, ask

PARAMETERS = {"properties": {"city": {"enum": ["a", "b"]}}, "required": ["city"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]  # the tiny model has room for few words
NAMED = {"type": "function", "function": {"name": "f"}}


def test_required_and_named_calls(alone: Server):
    async def calls(port: int, **fields) -> list[tuple[str, str, str]]:
        body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "parallel_tool_calls": False, **fields}
        reply = await ask(port, "/v1/chat/completions", {**body, "temperature": 1.0, "n": 2})
        assert reply.status == 200, reply.content
        choices = reply.json["choices"]
        return [
            (call["function"]["name"], call["function"]["arguments"], choice["finish_reason"])
            for choice in choices
            for call in choice["message"]["tool_calls"]
        ]

    for choice in ("required", NAMED):
        for seed in (1, 2):
            made = asyncio.run(calls(alone.port, tool_choice=choice, seed=seed))
            assert len(made) == 2
            assert {name for name, _, _ in made} == {"f"}
            assert all(json.loads(arguments)["city"] in ("a", "b") for _, arguments, _ in made)
            assert {finish for _, _, finish in made} == {"tool_calls"}
    assert "Traceback" not in alone.errors
