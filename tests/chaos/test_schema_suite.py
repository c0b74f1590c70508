"""JSON schemas of many kinds, asked of a served model with random weights: every answer that ends by itself is valid.

A random model is the hardest case: it has no habit of writing JSON, so whatever is right about an answer the grammar did.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from chaos_server import Reply, Server, ask

jsonschema = pytest.importorskip("jsonschema")


def thing(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}


WORD, NUMBER = {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": -99, "maximum": 999}
LEAF = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}}}
LEAF |= {"required": ["next"], "additionalProperties": False}
SCHEMAS: list[dict[str, Any]] = [
    *({"type": kind, **more} for kind, more in (("boolean", {}), ("null", {}), ("integer", {}), ("number", {}))),
    *(
        {"type": "integer", **more}
        for more in ({"minimum": 5, "maximum": 9}, {"minimum": -3, "maximum": 120}, {"multipleOf": 5})
    ),
    *({"type": "integer", **more} for more in ({"exclusiveMinimum": 0, "maximum": 7}, {"minimum": 1000, "maximum": 1001})),
    *({"type": "number", **more} for more in ({"minimum": 0, "maximum": 1}, {"exclusiveMaximum": 0.5, "minimum": -2.25})),
    *({"type": "string", **more} for more in ({"maxLength": 5}, {"minLength": 2, "maxLength": 4}, {"pattern": "^[a-c]{2,6}$"})),
    *({"type": "string", **more} for more in ({"pattern": "^(foo|bar)+$", "maxLength": 12}, {"enum": ["a", "bb", "ccc"]})),
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "uuid", "ipv4", "email", "hostname")),
    *({"enum": values} for values in ([1, 2, 3], ["x", None, True, 1.5], [[1], {"a": 2}], [""])),
    *({"const": value} for value in (7, "seven", None, {"a": [1, 2]}, [True, False])),
    *({"type": "array", "items": WORD, "maxItems": most} for most in (0, 1, 3)),
    *({"type": "array", "items": NUMBER, "minItems": least, "maxItems": 4} for least in (0, 1, 4)),
    {"type": "array", "prefixItems": [WORD, NUMBER], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [WORD, NUMBER], "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "array", "items": {"type": "array", "items": NUMBER, "maxItems": 2}, "maxItems": 3},
    {"type": "array", "items": {"anyOf": [WORD, NUMBER, {"type": "null"}]}, "maxItems": 4},
    thing({}),
    thing({"a": WORD}),
    thing({"a": WORD, "b": NUMBER}),
    thing({"a": WORD, "b": NUMBER}, required=["b"]),
    thing({"a": WORD, "b": NUMBER, "c": {"type": "boolean"}}, required=[]),
    thing({"in": thing({"deep": thing({"er": NUMBER})})}),
    thing({"list": {"type": "array", "items": thing({"k": WORD}), "maxItems": 2}}),
    thing({"kind": {"const": "circle"}, "r": {"type": "number"}}),
    {"anyOf": [thing({"kind": {"const": "a"}, "x": NUMBER}), thing({"kind": {"const": "b"}, "y": WORD})]},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}, thing({"z": NUMBER})]},
    {"oneOf": [thing({"t": {"const": 1}, "v": WORD}), thing({"t": {"const": 2}, "v": NUMBER})]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]},
    {"allOf": [thing({"a": NUMBER}), {"properties": {"a": {"maximum": 5}}}]},
    {"type": ["string", "null"], "maxLength": 4},
    {"type": ["integer", "boolean"], "minimum": 0, "maximum": 50},
    {"type": "object", "additionalProperties": NUMBER, "maxProperties": 2},
    {"type": "object", "properties": {"a": NUMBER}, "required": ["a"], "additionalProperties": {"type": "boolean"}},
    {"type": "object", "patternProperties": {"^k[0-9]$": WORD}, "additionalProperties": False},
    {"$ref": "#/$defs/leaf", "$defs": {"leaf": LEAF}},
    thing({"left": {"$ref": "#/$defs/n"}, "right": {"$ref": "#/$defs/n"}}, **{"$defs": {"n": NUMBER}}),
    {"title": "T", "description": "d", "examples": [1], "default": 1, **NUMBER},
    thing({"naïve key": WORD, 'quo"te': NUMBER, "back\\slash": {"type": "null"}}),
    thing({f"p{i}": {"type": "boolean"} for i in range(12)}),
    thing({f"p{i}": {"type": "null"} for i in range(12)}, required=["p3"]),
]
VARIANTS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.7, "seed": 9}]


def test_the_suite_is_a_fair_one():
    assert len({json.dumps(schema) for schema in SCHEMAS}) == len(SCHEMAS) >= 60


def test_every_completed_answer_is_valid(alone: Server):
    async def all_of(port: int) -> list[Reply]:
        turns = asyncio.Semaphore(16)

        async def one(schema: dict[str, Any], how: dict[str, Any]) -> Reply:
            wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
            async with turns:
                body = {"prompt": "Answer: ", "max_tokens": 300, "response_format": wanted, **how}
                return await ask(port, "/v1/completions", body)

        return await asyncio.gather(*(one(schema, how) for schema in SCHEMAS for how in VARIANTS))

    replies = asyncio.run(all_of(alone.port))
    completed = 0
    for (schema, how), reply in zip(((s, h) for s in SCHEMAS for h in VARIANTS), replies, strict=True):
        assert reply.status == 200, (schema, reply.content)
        (choice,) = reply.json["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema, jsonschema.Draft202012Validator)
            completed += 1
        else:
            assert choice["finish_reason"] == "length", (schema, how, choice)
    assert completed >= 0.8 * len(replies)
