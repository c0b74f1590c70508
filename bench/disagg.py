"""Prefill and decode apart, beside one instance that does both: real servers, the default model, the same cores.

    python bench/disagg.py [--streams 4] [--tokens 1500] [--seconds 20] [--only gaps,handoff,network,kill,router] [--json]

gaps      4 running streams, alone and while prompts of 1,500 tokens arrive one after the other: p50 and p99 between
          tokens of the streams, time to the first token of the prompts. mixed: `baton serve` as it comes (--decode-gap-ms), and
          with prompts at full speed (--decode-gap-ms 0), and with small chunks; 1P1D: `baton up --prefill 1 --decode 1` on as
          many threads in all. Goals: p99 beside prompts at most 1.5x that without; at least 5x better than mixed
handoff   1,000 tokens handed over while nothing else runs, by the router's own clock: the last chunk is computed .. decode has
          adopted it. Goal: 10 ms
network   the same with instances that share no memory, as on two machines: the KV goes over TCP
kill      SIGKILL of the decode instance under the streams: seconds until each has its next token. Goal: 3 s and computing again
router    CPU seconds of all processes per token, 8 streams: `baton up --mixed 1` against `baton serve`. Goal: at most 3 % more

Two cores allow no more than two threads that compute: prompts and streams have one each in 1P1D, and share two in mixed.
Machines are noisy: compare rows of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from baton.trust.secret import create_secret
from measuring.goals import markdown
from measuring.machine import all_stats, tree
from measuring.served import Server, served
from measuring.streams import Streams, p99, prompt

ANSWER_SECONDS_MAX = 600.0
WARM_SECONDS = 3.0
CLUSTER = {"prefill": 1, "decode": 1, "threads": 1}


# Gaps


def gaps(server: Server, options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Alone, beside prompts, alone again: contexts grow, and with them what a token costs."""
    first_tokens: list[float] = []
    with Streams(server, options.streams) as streams:
        time.sleep(WARM_SECONDS)
        begun = time.perf_counter()
        time.sleep(options.seconds / 2)
        middle = time.perf_counter()
        while time.perf_counter() - middle < options.seconds:
            asked = time.perf_counter()
            seed += 1
            server.post("/v1/completions", {"prompt": prompt(seed, options.tokens), "max_tokens": 1, "temperature": 0})
            first_tokens.append(time.perf_counter() - asked)
        end = time.perf_counter()
        time.sleep(options.seconds / 2)
        alone = streams.gaps(begun, middle) + streams.gaps(end, time.perf_counter())
        beside = streams.gaps(middle, end)
    return {
        "alone p50 ms": 1000 * median(alone),
        "alone p99 ms": 1000 * p99(alone),
        "beside p50 ms": 1000 * median(beside),
        "beside p99 ms": 1000 * p99(beside),
        "beside / alone": p99(beside) / p99(alone),
        "first token s": median(first_tokens),
        "prompts": len(first_tokens),
    }


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("serve", {"threads": 2}),
    "mixed, prompts first": ("serve", {"threads": 2, "decode_gap_ms": 0}),
    "mixed, chunks of 16": ("serve", {"threads": 2, "prefill_tokens_beside_decodes": 16}),
    "1P1D": ("up", CLUSTER),
}


def compare_gaps(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    rows = {}
    for number, (name, (command, settings)) in enumerate(WAYS.items()):
        with served(scratch, command, **settings) as server:
            rows[name] = gaps(server, options, 1000 * (number + 1))
    print(
        markdown(
            ["way", *next(iter(rows.values()))], [[name, *(f"{v:.3g}" for v in row.values())] for name, row in rows.items()]
        )
    )
    ratio = rows["mixed"]["beside p99 ms"] / rows["1P1D"]["beside p99 ms"]
    print(
        f"1P1D beside prompts: {rows['1P1D']['beside / alone']:.2f}x its own p99 (goal 1.5), "
        f"{ratio:.1f}x better than mixed (goal 5)"
    )
    return rows


# Hand-off


def handoff(options: argparse.Namespace, scratch: Path) -> dict[str, float]:
    with served(scratch, "up", **CLUSTER) as server:
        return handed_over(server)


def network(options: argparse.Namespace, scratch: Path) -> dict[str, float]:
    secret = scratch / "secret"
    create_secret(secret)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    cluster = served(scratch, "router", wait=False, cluster_port=port, cluster_secret=secret)
    member = {"router": f"tcp://127.0.0.1:{port}", "cluster_secret": secret, "transfer_address": "127.0.0.1:0", "threads": 1}
    with cluster as server, ExitStack() as stack:
        for role in ("prefill", "decode"):
            instance = stack.enter_context(served(scratch, role=role, name=role, **member))
            plan = json.loads(instance.get("/config"))["plan"]
            near, _ = plan["pool_read_at"].split()
            Path(near.removeprefix("unix:")).unlink()
        server.wait_ready()
        return handed_over(server)


def handed_over(server: Server) -> dict[str, float]:
    name = "baton:router_handoff_seconds"
    found = []
    for seed in range(10):
        before = server.metric(f"{name}_sum"), server.metric(f"{name}_count")
        server.post("/v1/completions", {"prompt": prompt(9000 + seed, 1000), "max_tokens": 4, "temperature": 0})
        after = server.metric(f"{name}_sum"), server.metric(f"{name}_count")
        if after[1] > before[1]:
            found.append((after[0] - before[0]) / (after[1] - before[1]))
    if not found:
        print("no prompt was handed over", file=sys.stderr)
        return {}
    row = {"median ms": 1000 * median(found), "longest ms": 1000 * max(found), "hand-offs": len(found)}
    print(
        f"hand-off of 1,000 tokens, idle: {row['median ms']:.1f} ms (longest {row['longest ms']:.1f} of {len(found)}; goal 10)"
    )
    return row


# A killed decode instance


def engines(server: Server, role: str) -> list[int]:
    """Engine processes of that role, as the router knows them."""
    found = json.loads(server.get("/v1/cluster"))
    return [int(one["pid"]) for one in found["instances"] if one["role"] == role and one.get("pid")]


def kill(options: argparse.Namespace, scratch: Path) -> dict[str, float]:
    with served(scratch, "up", **CLUSTER) as server, Streams(server, options.streams) as streams:
        time.sleep(WARM_SECONDS)
        victims = engines(server, "decode")
        stats = all_stats()
        at = time.perf_counter()
        for pid in tree(victims, stats):
            os.kill(pid, signal.SIGKILL)
        waits = []
        deadline = time.monotonic() + 120
        for stream in streams.streams:
            while (
                not (after := [t for t in list(stream.times) if t > at + 0.05])
                and time.monotonic() < deadline
                and not stream.failed
            ):
                time.sleep(0.02)
            waits.append(after[0] - at if after else float("nan"))
    row = {"first new token s": max(waits)}
    shown = ", ".join(f"{wait:.2f}" for wait in waits)
    print(f"decode instance killed under {options.streams} streams: next token after {shown} s")
    return row


# What the router costs


def cpu_per_token(server: Server, seconds: float) -> float:
    with Streams(server, 8) as streams:
        time.sleep(WARM_SECONDS)
        begun, used = time.perf_counter(), server.cpu_seconds
        time.sleep(seconds)
        used, end = server.cpu_seconds - used, time.perf_counter()
        return used / max(1, len(streams.gaps(begun, end)))


def router(options: argparse.Namespace, scratch: Path) -> dict[str, float]:
    found: dict[str, list[float]] = {"serve": [], "up": []}
    for _ in range(2):
        for command, settings in (("serve", {"threads": 2}), ("up", {"mixed": 1, "prefill": 0, "decode": 0, "threads": 2})):
            with served(scratch, command, **settings) as server:
                found[command].append(cpu_per_token(server, options.seconds))
    alone, routed = (min(values) for values in found.values())
    print(
        f"CPU per token, ms: serve {1000 * alone:.3f}, router and one instance {1000 * routed:.3f}: "
        f"{routed / alone:.3f}x (goal 1.03)"
    )
    return {"serve": alone, "router": routed, "ratio": routed / alone}


PARTS = {"gaps": compare_gaps, "handoff": handoff, "network": network, "kill": kill, "router": router}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1500, help="of each prompt that arrives")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in options.only.split(","):
            found[part] = PARTS[part](options, Path(folder))
    if options.json:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
