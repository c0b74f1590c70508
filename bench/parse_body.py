"""From the bytes of a chat request to what is checked: our tables of fields, against msgspec's Structs. Medians, microseconds
of a processor.

    python bench/parse_body.py

The Struct has the same fields with their types and ranges; it does not tell an unknown field, an alias or a contradiction from
each other, and stops at the first error with msgspec's words. That is the least that Structs would cost.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from baton.api.config import ApiConfig, ServedModel
from baton.api.http.json_body import parse_object
from baton.api.openai.schemas import Schema

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class Chat(msgspec.Struct):
    messages: list[Message]
    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    top_k: int | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=16)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    user: str | None = None


def body() -> bytes:
    """Eight turns of 400 characters each, and the settings that clients send."""
    turns = [{"role": ("user", "assistant")[place % 2], "content": "some words " * 36} for place in range(8)]
    settings = {"model": "smollm2", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7, "top_p": 0.9}
    more = {
        "max_tokens": 512,
        "stop": ["\n\n"],
        "seed": 7,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "user": "somebody",
    }
    return json.dumps({"messages": [{"role": "system", "content": "Be short."}, *turns], **settings, **more}).encode()


def microseconds(work: Callable[[], object], rounds: int = 60, times: int = 50) -> float:
    measured = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(times):
            work()
        measured.append((time.thread_time() - begin) / times * 1e6)
    return statistics.median(measured)


def main() -> None:
    config, data = ApiConfig(), body()
    schema = Schema(ServedModel(name="smollm2", context_tokens=8192, head_width=49152, fingerprint="", created=0), config)
    decoder = msgspec.json.Decoder(Chat)
    print(f"body of {len(data)} bytes")
    print(f"JSON to objects, with our bounds            {microseconds(lambda: parse_object(data, config.limits)):7.1f} us")
    whole = microseconds(lambda: schema.chat(parse_object(data, config.limits)))
    print(f"all of it: JSON, then the tables of fields  {whole:7.1f} us")
    print(f"msgspec: JSON to a Struct                   {microseconds(lambda: decoder.decode(data)):7.1f} us")


if __name__ == "__main__":
    main()
