"""What a server on the GPU answers: structured output, embeddings, and all of it with weights and KV cache in 8 bits."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos_server import Server, ask

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
EIGHT_BITS = {"dtype": "bfloat16", "quantization": "fp8", "kv_dtype": "fp8"}
KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16", "deterministic": False},
    "fp8, deterministic": EIGHT_BITS,
    "fp8": {**EIGHT_BITS, "deterministic": False},
}


@pytest.fixture(scope="module", params=KINDS)
def server(request, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    scratch = tmp_path_factory.mktemp("server")
    with Server(tiny, scratch, block_size=16, kv_blocks=128, **KINDS[request.param]) as one:
        one.wait_ready()
        one.kind = request.param  # type: ignore[attr-defined]
        yield one


def ask_all(server: Server, path: str, bodies: list[dict[str, Any]]) -> list[Any]:
    """All at once."""

    async def together() -> list[Any]:
        return await asyncio.gather(*(ask(server.port, path, {"model": "tiny", **body}) for body in bodies))

    replies = asyncio.run(together())
    assert [reply.status for reply in replies] == [200] * len(bodies), replies[0].content
    return replies


def test_structured_output(server: Server):
    """Greedy and drawn, among others that write what they like."""
    messages = [{"role": "user", "content": "say it"}]
    asked = [{"messages": messages, "max_tokens": 120, "temperature": t, "seed": 4} for t in (0.0, 1.0, 1.0, 0.7)]
    bodies = [{**body, "seed": n, "response_format": FORMAT} for n, body in enumerate(asked)] + asked
    replies = ask_all(server, "/v1/chat/completions", bodies)
    ended = [reply.json["choices"][0] for reply in replies[:4]]
    values = [json.loads(choice["message"]["content"]) for choice in ended if choice["finish_reason"] == "stop"]
    assert len(values) >= 2
    for value in values:
        assert set(value) == {"name", "n"}
        assert 0 <= value["n"] <= 99
        assert len(value["name"]) <= 6


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings(server: Server, pooling: str):
    texts = ["a text", "another one, and longer " * 6, "x"]
    together = ask_all(server, "/v1/embeddings", [{"input": texts, "pooling": pooling}])[0].json
    vectors = [row["embedding"] for row in together["data"]]
    assert [len(vector) for vector in vectors] == [32, 32, 32]
    assert all(math.isclose(math.hypot(*vector), 1.0, abs_tol=1e-5) for vector in vectors)
    alone = [ask_all(server, "/v1/embeddings", [{"input": text, "pooling": pooling}])[0].json["data"][0] for text in texts]
    for one, vector in zip(alone, vectors, strict=True):
        assert sum(a * b for a, b in zip(one["embedding"], vector, strict=True)) > 0.99
        if "deterministic" in server.kind or server.kind == "float32":  # type: ignore[attr-defined]
            assert one["embedding"] == vector
    assert sum(a * b for a, b in zip(vectors[0], vectors[1], strict=True)) < 0.999


def test_tokens_alone_and_in_company(server: Server):
    """Equal where that is promised; else there are as many as were asked for."""
    bodies = [
        {"prompt": "once upon a time " * (1 + n), "max_tokens": 20, "temperature": 0.8 * (n % 2), "seed": n} for n in range(8)
    ]
    bodies = [{**body, "ignore_eos": True, "return_token_ids": True} for body in bodies]
    together = [reply.tokens[0] for reply in ask_all(server, "/v1/completions", bodies)]
    assert [len(tokens) for tokens in together] == [20] * 8
    assert len({tuple(tokens) for tokens in together}) > 1
    if server.kind in ("float32", "fp8, deterministic"):  # type: ignore[attr-defined]
        assert [ask_all(server, "/v1/completions", [body])[0].tokens[0] for body in bodies] == together
