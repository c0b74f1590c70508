"""Traffic for bench/fleet.py: requests with times, lengths and block keys, in the order of their arrival.

    conversation   sessions fitted to the public Mooncake trace (FAST25-release/traces/conversation_trace.jsonl)
    tenants        system prompts of 200 tokens of 300 tenants (Zipf), a short question, a short answer
    short          prompts of two blocks that nobody repeats: the most marked keys that a pool can have
    trace          a file in the format of Mooncake's traces (--trace)

What the conversation trace has (12,031 requests), and the generator's rule for it:

    the first 512 tokens of all requests are equal                the first 32 blocks are shared by all
    34 to 39 % of requests continue an earlier one; blocks        after every turn, 37 % of sessions have another one
    are used 1, 2, 3, 4 times: 76, 14, 5, 2 %
    first turns: p50 5,120 tokens, p90 25,000, mean 10,600        lognormal, median 5,120, sigma 1.2
    later turns add p50 1,024 tokens, mean 3,400 (with the        the answer and lognormal, median 650, sigma 1.75
    answer before)
    answers: mean 343 tokens, p10 24, p90 597                     normal, 343 and 220, at least 1
    next turn after p25 66 s, p50 123 s, p75 264 s, p90 483 s     lognormal, median 123, sigma 1.13

Prompts are limited to the context, as they would be refused. Keys are drawn and not computed by hashing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import accumulate, count
from math import log
from pathlib import Path
from random import Random
from typing import NamedTuple

from baton.protocol.ids import BlockKey

SIZE = 16
"""Tokens per block."""
CONTEXT = 61_440
"""Tokens of the longest prompt and its answer."""
TRACE_SIZE = 512
"""Tokens per hash id of a trace."""
KEY_BYTES = 12


class Arrival(NamedTuple):
    at: float
    tokens: int
    "Of the prompt."
    output: int
    keys: list[BlockKey]
    "Keys of its blocks: those of the prompt, then those of the answer. Requests of one session share the list, which grows."


def extend(keys: list[BlockKey], tokens: int, rng: Random) -> None:
    """Draw keys for all full blocks of so many tokens."""
    for _ in range(len(keys), tokens // SIZE):
        keys.append(BlockKey(rng.randbytes(KEY_BYTES)))


def answer_tokens(rng: Random, mean: float, deviation: float) -> int:
    return max(1, round(rng.gauss(mean, deviation)))


def conversation(rng: Random, rate: float) -> Iterator[Arrival]:
    """Sessions that begin at random times, so that `rate` requests per second arrive in the end."""
    common: list[BlockKey] = []
    extend(common, TRACE_SIZE, rng)
    order, waiting = count(), [(0.0, 0, 0, 0, common)]
    more, begin = 0.37, rate * (1 - 0.37)
    while True:
        at, _, turn, before, keys = heappop(waiting)
        if not turn:
            heappush(waiting, (at + rng.expovariate(begin), next(order), 0, 0, common))
            keys, tokens = list(common), round(rng.lognormvariate(log(5_120), 1.2))
        else:
            tokens = before + round(rng.lognormvariate(log(650), 1.75))
        output = answer_tokens(rng, 343, 220)
        tokens = max(1, min(tokens, CONTEXT - output))
        if tokens <= before:
            continue  # the session is as long as the context
        extend(keys, tokens + output, rng)
        yield Arrival(at, tokens, output, keys)
        if rng.random() < more:
            later = at + rng.lognormvariate(log(123), 1.13)
            heappush(waiting, (later, next(order), turn + 1, tokens + output, keys))


def tenants(rng: Random, rate: float, number: int = 300) -> Iterator[Arrival]:
    prompts: list[list[BlockKey]] = [[] for _ in range(number)]
    for keys in prompts:
        extend(keys, 200, rng)
    weights = list(accumulate(1 / place for place in range(1, number + 1)))
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        keys = list(rng.choices(prompts, cum_weights=weights)[0])
        tokens, output = 200 + round(rng.lognormvariate(log(60), 0.8)), answer_tokens(rng, 150, 80)
        extend(keys, tokens + output, rng)
        yield Arrival(at, tokens, output, keys)


def short(rng: Random, rate: float) -> Iterator[Arrival]:
    at = 0.0
    while True:
        at += rng.expovariate(rate)
        keys: list[BlockKey] = []
        extend(keys, 40, rng)
        yield Arrival(at, 30, 10, keys)


def trace(rng: Random, rate: float, path: Path) -> Iterator[Arrival]:
    """Requests of a trace, with its times scaled so that `rate` per second arrive. Answers are not in it as blocks: their keys
    are drawn."""
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    scale = len(rows) / rate / max(1, rows[-1]["timestamp"])
    blocks: dict[int, list[BlockKey]] = {}
    for row in rows:
        output = row["output_length"]
        tokens = min(row["input_length"], CONTEXT - output)
        keys: list[BlockKey] = []
        for number in row["hash_ids"]:
            if number not in blocks:
                blocks[number] = []
                extend(blocks[number], TRACE_SIZE, rng)
            keys += blocks[number]
        del keys[tokens // SIZE :]
        extend(keys, tokens + output, rng)
        yield Arrival(row["timestamp"] * scale, tokens, output, keys)
