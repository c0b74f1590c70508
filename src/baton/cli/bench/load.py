"""Sends a workload to a server and records the time of every piece of every answer.

when requests are sent      --rate R           at R per second, at random (Poisson) or regular distances, however many are open
                            a trace            at its own times
                            else               all at once
how many may be open        --concurrency N    a due request waits for a free place, and its clock starts then

Users behave like open arrival (a rate without a bound); a closed loop (N clients) hides a slow server.

An answer is complete with status 200, tokens, a finish_reason, and [DONE] at its end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any, Literal

from baton.cli.bench.measures import Record
from baton.cli.bench.workload import PlannedRequest
from baton.cli.http_stream import HttpError, ServerAddress, stream_events

DELTA_TOKENS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")
"""Keys of a chat's delta whose values are generated tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadPlan:
    """Server, arrival times and limits of a load."""

    server: ServerAddress
    model: str
    endpoint: Literal["completions", "chat"] = "completions"
    usable_ids: Sequence[int] = ()
    "Token ids from which prompts are drawn; empty: send words."
    rate: float | None = None
    regular: bool = False
    concurrency: int | None = None
    timeout_seconds: float = 600.0
    seed: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    "Fields merged into every request body."

    def body(self, ask: PlannedRequest) -> dict[str, Any]:
        fixed = {"model": self.model, "max_tokens": ask.output_tokens, "temperature": 0.0, "ignore_eos": True, "stream": True}
        fixed["stream_options"] = {"include_usage": True}
        if self.endpoint == "chat":
            return {**fixed, "messages": [{"role": "user", "content": ask.text()}], **self.extra}
        return {**fixed, "prompt": ask.token_ids(self.usable_ids) if self.usable_ids else ask.text(), **self.extra}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


async def run_load(
    plan: LoadPlan, asks: Sequence[PlannedRequest], progress: Callable[[int, int, str], None]
) -> tuple[list[Record], float]:
    """The record of every request, in order, and the duration of the run."""
    times = send_times(asks, plan)
    places = asyncio.Semaphore(plan.concurrency or len(asks))
    begin = perf_counter()
    done = failed = 0

    async def one(ask: PlannedRequest, at: float) -> Record:
        nonlocal done, failed
        await asyncio.sleep(max(0.0, begin + at - perf_counter()))
        async with places:
            record = await send(plan, ask, begin)
        done, failed = done + 1, failed + (not record.ok)
        progress(done, len(asks), f"{failed} failed" if failed else "")
        return record

    progress(0, len(asks), "")
    records = await asyncio.gather(*(one(ask, at) for ask, at in zip(asks, times, strict=True)))
    return list(records), perf_counter() - begin


def send_times(asks: Sequence[PlannedRequest], plan: LoadPlan) -> list[float]:
    if plan.rate is None:
        return [ask.at_seconds or 0.0 for ask in asks]
    rng, now, times = Random(plan.seed), 0.0, []
    for _ in asks:
        times.append(now)
        now += 1.0 / plan.rate if plan.regular else rng.expovariate(plan.rate)
    return times


async def send(plan: LoadPlan, ask: PlannedRequest, begin: float) -> Record:
    record = Record(sent=perf_counter() - begin, asked_tokens=ask.output_tokens)
    try:
        async with asyncio.timeout(plan.timeout_seconds):
            await _read_answer(plan, ask, begin, record)
    except TimeoutError:
        record.error = f"no end within {plan.timeout_seconds:g} s"
    except HttpError as error:
        record.error = str(error)
    record.ended = perf_counter() - begin
    return record


async def _read_answer(plan: LoadPlan, ask: PlannedRequest, begin: float, record: Record) -> None:
    finished = closed = False
    async with aclosing(stream_events(plan.server, plan.path, plan.body(ask))) as events:
        async for event in events:
            now = perf_counter() - begin
            if event == b"[DONE]":
                closed = True
                break
            content = json.loads(event)
            if "error" in content:
                raise HttpError(f"error in the stream: {content['error']}")
            _note_usage(content, record)
            for choice in content.get("choices", ()):
                if _has_tokens(choice):
                    record.pieces.append(now)
                finished = finished or choice.get("finish_reason") is not None
    record.output_tokens = record.output_tokens or len(record.pieces)
    if finished and record.output_tokens and not record.pieces:
        record.pieces.append(perf_counter() - begin)  # tokens without text, e.g. half a character
    missing = {"tokens": bool(record.pieces), "a finish_reason": finished, "[DONE]": closed}
    if not all(missing.values()):
        record.error = f"the stream ended without {', '.join(name for name, there in missing.items() if not there)}"


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Whether the choice has generated text; reasoning and tool calls count."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(name) for name in DELTA_TOKENS))


def _note_usage(content: dict[str, Any], record: Record) -> None:
    usage = content.get("usage") or {}
    record.input_tokens = usage.get("prompt_tokens", record.input_tokens)
    record.output_tokens = usage.get("completion_tokens", record.output_tokens)
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or record.cached_tokens
