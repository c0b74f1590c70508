"""One rank of a set, as a process of its own. Arguments: rank, ranks, descriptor, task. Its result goes to stdout as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from baton.errors import EngineError
from baton.models.shard import Shard
from baton.native.exchange import RankExchange
from baton.native.library import load_best


def numbers_of(rank: int, count: int):
    return np.random.default_rng(rank).standard_normal(count, np.float32) * np.float32(10.0**rank)


def sums(exchange, rounds: int = 50):
    """Many exchanges of all sizes, larger than a slot as well."""
    found = []
    for number in range(rounds):
        rows = numbers_of(exchange.rank, 1 + 397 * number % 5000)
        exchange.sum(rows)
        found.append(rows.tobytes().hex()[:64] + str(float(rows.astype(np.float64).sum())))
    parts = exchange.gather(numbers_of(exchange.rank, 3000))
    notes = [note.hex() for note in exchange.notes(bytes([exchange.rank]))]
    return [found, float(parts.astype(np.float64).sum()), exchange.least(100 - exchange.rank), notes]


def alone(exchange):
    """Only the first rank comes."""
    if exchange.rank:
        sys.stdin.read()
        return []
    try:
        exchange.sum(np.zeros(4, np.float32))
    except EngineError as error:
        return str(error)


def tokens(exchange):
    from ranks_model import greedy

    return greedy(exchange, Path(sys.argv[5]) if len(sys.argv) > 5 else None)


TASKS = {"sums": sums, "alone": alone, "tokens": tokens}

if __name__ == "__main__":
    rank, ranks, fd = map(int, sys.argv[1:4])
    numbers, seconds = (1 << 21, 300.0) if sys.argv[4] == "tokens" else (1024, 1.0 if sys.argv[4] == "alone" else 60.0)
    exchange = RankExchange(load_best(), fd, Shard(rank, ranks), numbers, wait_seconds=seconds)
    print(json.dumps(TASKS[sys.argv[4]](exchange)))
