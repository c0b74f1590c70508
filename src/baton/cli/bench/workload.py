"""Workloads of benchmarks. The same seed gives the same workload on any machine.

random          every prompt is different: no cache can help
shared-prefix   groups of requests begin alike, as with a long system prompt
trace           JSON lines with timestamp (ms), input_length, output_length and hash_ids, as published with Mooncake: equal hash
                ids mean equal blocks of 512 tokens. --scale shortens lengths, --speed replays faster

A prompt is a list of numbers (symbols), not of tokens: the sender maps each to a token id or a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from baton.cli.say import Failed

SYMBOLS = 1 << 20
TRACE_BLOCK_TOKENS = 512

WORDS_TEXT = """
    the of and to in is it on as for was with be by at from his that not are but had have this which or one you were her all
    she there would their we him been has when who will more no if out so said what up its about into than them can only
    other new some could time these two may then do first any my now such like our over man me even most made after also
"""
WORDS = tuple(WORDS_TEXT.split())
"""Words that are one token each, with their space, in nearly every vocabulary."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    symbols: tuple[int, ...]
    output_tokens: int
    at_seconds: float | None = None
    "Send time after the start. None: the load generator decides."

    def token_ids(self, usable: Sequence[int]) -> list[int]:
        return [usable[symbol % len(usable)] for symbol in self.symbols]

    def text(self) -> str:
        return " ".join(WORDS[symbol % len(WORDS)] for symbol in self.symbols)


def random_requests(count: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int) -> list[PlannedRequest]:
    rng = Random(seed)
    return [PlannedRequest(_symbols(rng, rng.randint(*inputs)), rng.randint(*outputs)) for _ in range(count)]


def shared_prefix_requests(
    count: int, groups: int, prefix: int, inputs: tuple[int, int], outputs: tuple[int, int], seed: int
) -> list[PlannedRequest]:
    """Requests whose prompts begin with shared prefixes. `inputs`: tokens after the prefix. Groups alternate, so that a small
    cache has to hold all of them."""
    rng = Random(seed)
    prefixes = [_symbols(rng, prefix) for _ in range(groups)]
    return [
        PlannedRequest(prefixes[number % groups] + _symbols(rng, rng.randint(*inputs)), rng.randint(*outputs))
        for number in range(count)
    ]


def trace_requests(path: Path, count: int | None, scale: float, speed: float, seed: int) -> list[PlannedRequest]:
    """Read requests from a trace. `scale`: factor on all lengths. `speed`: factor on its clock. `count`: maximum of
    requests."""
    rng = Random(seed)
    asks: list[PlannedRequest] = []
    first: float | None = None
    for place, row in _rows(path):
        if count is not None and len(asks) == count:
            break
        try:
            stamp = float(row.get("timestamp", 0)) / 1000.0
            length, output = int(row["input_length"]), int(row["output_length"])
            hashes = [int(each) for each in row.get("hash_ids", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise Failed(f"{path}, line {place}: needs numbers input_length and output_length ({error!r})") from None
        first = stamp if first is None else first
        symbols = _trace_symbols(hashes, max(1, round(length * scale)), max(1, round(TRACE_BLOCK_TOKENS * scale)), rng)
        asks.append(PlannedRequest(symbols, max(1, round(output * scale)), (stamp - first) / speed))
    if not asks:
        raise Failed(f"{path}: no request in it")
    return asks


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Failed(f"--trace {path}: cannot be read ({error})") from None
    for place, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield place, dict(json.loads(line))
            except (ValueError, TypeError) as error:
                raise Failed(f"{path}, line {place}: not a JSON object ({error})") from None


def _trace_symbols(hashes: Iterable[int], length: int, block: int, rng: Random) -> tuple[int, ...]:
    """Symbols of a traced prompt. Equal hash ids become equal blocks; the rest is unique to this request."""
    made: list[int] = []
    for each in hashes:
        if len(made) < length:
            made += _symbols(Random(each), block)
    return (*made[:length], *_symbols(rng, length - len(made)))


def _symbols(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(SYMBOLS) for _ in range(max(0, count)))


def read_span(text: str, option: str) -> tuple[int, int]:
    """Reads `128` or `64:256`. Raises Failed."""
    low, colon, high = text.partition(":")
    try:
        span = int(low), int(high) if colon else int(low)
    except ValueError:
        raise Failed(f"{option} {text}: write a number of tokens like 128, or a span like 64:256") from None
    if not 1 <= span[0] <= span[1]:
        raise Failed(f"{option} {text}: must be at least 1, and the first number not above the second")
    return span
