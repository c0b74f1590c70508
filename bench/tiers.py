"""What lower tiers bring and cost, on real servers with the default model.

    python bench/tiers.py [--tokens 2000] [--rounds 5] [--only first,preempted,overcommit,idle,stall] [--json]

first        time to the first token of a prompt of 2,000 tokens: computed, found on the device, in the host tier, in files
             (warm, and cold: dropped from the page cache), in Redis, in Mooncake, where they are installed. One server a
             tier, all loaded, asked in turns; before each question the tiers above are cleared. Beside it a plain copy or
             read of the same bytes. Goals: host at most device + 2x the copy + 10 ms; for the others see bench/storage.py
preempted    1,500 tokens of prompt and output found again against computed again: what resuming costs. Goal: 3x cheaper
overcommit   twice as many sequences as the pool holds, their KV parked in the host tier, against a cap on how many run:
             throughput, and preemptions per completion. Goal: at least 95 %
stall        4 running streams and prompts that ask storage (Redis), for 10 s as it is and for 10 s while Redis is stopped: the
             longest gap of the streams. Goal: at most 2x
idle         tiers on and nothing to hit, against no tiers: CPU seconds of all processes per token. Goal: at most 3 % more

Times are medians over the rounds. A machine that does other things as well shows in all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kvcache"))  # They know how to start Redis.
from measuring.goals import markdown
from measuring.served import Server, served
from measuring.streams import Streams, p99, prompt


def first_token(server: Server, ids: list[int]) -> tuple[float, dict[str, Any], str]:
    begun = time.perf_counter()
    answer = server.post("/v1/completions", {"prompt": ids, "max_tokens": 1, "temperature": 0})
    return time.perf_counter() - begun, answer["usage"]["prompt_tokens_details"], answer["choices"][0]["text"]


def settle(server: Server, names: tuple[str, ...]) -> None:
    """Until copies have come to rest."""
    before: list[float] = []
    while (now := [server.metric(f'baton:kv_blocks_moved_total{{way="{name}"}}') for name in names]) != before:
        before = now
        time.sleep(0.5)


STALL_SECONDS = 10.0


# First token


class Way:
    """One way to come to a first token."""

    def __init__(
        self, name: str, server: Server, clear: list[str], tier: str, before: Callable[[], None] | None = None
    ) -> None:
        self.name, self.server, self.clear, self.tier, self.before = name, server, clear, tier, before
        self.seconds: list[float] = []
        self.texts: set[str] = set()

    def ask(self, ids: list[int]) -> None:
        if self.clear:
            self.server.post("/v1/cache/clear", {"tiers": self.clear})
        if self.before is not None:
            self.before()
        seconds, details, text = first_token(self.server, ids)
        tiers = details.get("cached_tokens_by_tier", {"device": details["cached_tokens"]})
        expected = 0 if self.tier == "none" else len(ids) - 1 - 16
        if self.tier != "none" and tiers.get(self.tier, 0) < expected:
            print(f"{self.name}: {tiers} of {len(ids)} tokens were cached", file=sys.stderr)
            return
        self.seconds.append(seconds)
        self.texts.add(text)


def drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def raw_read(folder: Path) -> float:
    begun = time.perf_counter()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            path.read_bytes()
    return time.perf_counter() - begun


def raw_copy(megabytes: float) -> float:
    source, target = bytearray(int(megabytes * 2**20)), bytearray(int(megabytes * 2**20))
    source[:] = b"x" * len(source)
    begun = time.perf_counter()
    target[:] = source
    return time.perf_counter() - begun


def other_stores(stack: ExitStack, scratch: Path) -> dict[str, str]:
    """Addresses of what is installed."""
    from mooncake_master import MooncakeMaster, why_not
    from redis_server import SERVER, RedisServer

    found: dict[str, str] = {}
    if SERVER is not None:
        redis = RedisServer(scratch)
        stack.callback(redis.stop)
        found["redis"] = f"redis://127.0.0.1:{redis.port}"
    if why_not() is None:
        master = MooncakeMaster(scratch)
        stack.callback(master.stop)
        found["mooncake"] = f"mooncake://127.0.0.1:{master.port}"
    return found


def measure_first(scratch: Path, tokens: int, rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        files = scratch / "files"
        plain = stack.enter_context(served(scratch, kv_memory_gib=0.5))
        host = stack.enter_context(served(scratch, kv_memory_gib=0.5, kv_host_gib=0.5))
        stored = stack.enter_context(served(scratch, kv_memory_gib=0.5, kv_storage=f"file:{files}"))
        ids = prompt(1, tokens)
        computed = [first_token(plain, prompt(100 + place, tokens))[0] for place in range(min(rounds, 3))]
        ways = [
            Way("device", plain, [], "device"),
            Way("host", host, ["device"], "host"),
            Way("files, warm", stored, ["device", "host"], "storage"),
            Way("files, cold", stored, ["device", "host"], "storage", lambda: drop_page_cache(files)),
        ]
        for name, url in other_stores(stack, scratch).items():
            server = stack.enter_context(served(scratch, kv_memory_gib=0.5, kv_storage=url))
            ways.append(Way(name, server, ["device", "host"], "storage"))
        texts = set()
        for server in dict.fromkeys(way.server for way in ways):
            texts.add(first_token(server, ids)[2])
            settle(server, ("device_to_host", "host_to_storage"))
        for _ in range(rounds):
            for way in ways:
                way.ask(ids)
        size = sum(path.stat().st_size for path in files.rglob("*") if path.is_file()) / 2**20
        drop_page_cache(files)
        cold, warm = raw_read(files), raw_read(files)
        figures: dict[str, Any] = {"computed": median(computed)}
        figures |= {way.name: median(way.seconds) if way.seconds else None for way in ways}
        figures |= {
            "MiB": size,
            "copy": median(raw_copy(size) for _ in range(5)),
            "raw read, cold": cold,
            "raw read, warm": warm,
        }
        figures["same text everywhere"] = len(texts.union(*(way.texts for way in ways))) == 1
    return figures


# Resuming


def measure_preempted(scratch: Path, rounds: int) -> dict[str, Any]:
    """A sequence of 1,500 tokens, 100 of them output, goes on: its KV from the host tier, or computed again."""
    with served(scratch, kv_memory_gib=0.5, kv_host_gib=0.5) as server:
        found: list[float] = []
        computed: list[float] = []
        for place in range(rounds):
            begun = prompt(500 + place, 1400)
            answer = server.post(
                "/v1/completions",
                {"prompt": begun, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True},
            )
            known = begun + answer["choices"][0]["token_ids"]
            settle(server, ("device_to_host",))
            server.post("/v1/cache/clear", {"tiers": ["device"]})
            found.append(first_token(server, known)[0])
            server.post("/v1/cache/clear", {"tiers": ["device", "host"]})
            computed.append(first_token(server, known)[0])
        return {"found": median(found), "computed": median(computed), "times cheaper": median(computed) / median(found)}


# Throughput


def run_all(server: Server, requests: int, tokens: int, outputs: int) -> float:
    """Seconds until all are answered."""

    def one(place: int) -> None:
        server.post(
            "/v1/completions",
            {"prompt": prompt(1000 + place, tokens), "max_tokens": outputs, "temperature": 0, "ignore_eos": True},
        )

    threads = [threading.Thread(target=one, args=(place,)) for place in range(requests)]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begun


def measure_overcommit(scratch: Path, rounds: int) -> dict[str, Any]:
    """16 requests of 64 + 192 tokens: 16 blocks each at their end, in a pool of 128."""
    pool = {"kv_blocks": 128, "max_model_len": 512}
    with (
        served(scratch, **pool, max_num_seqs=8) as capped,
        served(scratch, **pool, max_num_seqs=16, kv_host_gib=0.25) as parked,
        served(scratch, **pool, max_num_seqs=16) as dropped,
    ):
        servers = {"capped": capped, "parked": parked, "dropped": dropped}
        seconds: dict[str, list[float]] = {name: [] for name in servers}
        for _ in range(rounds + 1):
            for name, server in servers.items():
                server.post("/v1/cache/clear", {})
                seconds[name].append(run_all(server, 16, 64, 192))
        requests = 16 * (rounds + 1)
        preemptions = {name: server.metric("baton:preemptions_total") / requests for name, server in servers.items()}
        steps = {name: server.metric("baton:steps_total") / (rounds + 1) for name, server in servers.items()}
    for each in seconds.values():
        del each[0]  # they warm up
    ratio = median(c / p for c, p in zip(seconds["capped"], seconds["parked"], strict=True))
    return {
        **{f"{name}, s": median(each) for name, each in seconds.items()},
        "throughput of parked, of capped": ratio,
        **{f"steps, {name}": count for name, count in steps.items()},
        **{f"preemptions per completion, {name}": value for name, value in preemptions.items() if name != "capped"},
    }


def measure_idle(scratch: Path, rounds: int) -> dict[str, Any]:
    with (
        served(scratch, kv_memory_gib=0.5) as plain,
        served(scratch, kv_memory_gib=0.5, kv_host_gib=0.5, kv_storage=f"file:{scratch / 'idle'}") as tiered,
        served(scratch, kv_memory_gib=0.5, kv_host_gib=0.5) as hosted,
    ):
        cost: dict[str, list[float]] = {"plain": [], "host": [], "host and files": []}
        for place in range(rounds):
            for name, server in (("plain", plain), ("host", hosted), ("host and files", tiered)):
                begun = server.cpu_seconds
                for part in range(4):
                    ids = prompt(7000 + 10 * place + part, 200)
                    server.post("/v1/completions", {"prompt": ids, "max_tokens": 200, "temperature": 0, "ignore_eos": True})
                cost[name].append((server.cpu_seconds - begun) / 800)
    return {
        "CPU ms per token, plain": 1000 * median(cost["plain"]),
        **{
            f"{name}, times that": median(c / p for c, p in zip(cost[name], cost["plain"], strict=True))
            for name in ("host", "host and files")
        },
    }


def measure_stall(scratch: Path) -> dict[str, Any]:
    from redis_server import SERVER, RedisServer

    if SERVER is None:
        return {"skipped": "no redis-server"}
    redis = RedisServer(scratch)
    try:
        with (
            served(scratch, kv_memory_gib=0.5, kv_storage=f"redis://127.0.0.1:{redis.port}") as server,
            Streams(server, 4) as streams,
        ):
            time.sleep(3)
            healthy = gaps_beside_prompts(server, streams, 8000)
            redis.process.send_signal(signal.SIGSTOP)
            stalled = gaps_beside_prompts(server, streams, 9000)
            redis.process.send_signal(signal.SIGCONT)
            healed = gaps_beside_prompts(server, streams, 10_000)
    finally:
        redis.stop()
    usual = max(max(healthy), max(healed))
    return {
        "longest gap ms, storage well": 1000 * usual,
        "longest gap ms, storage stopped": 1000 * max(stalled),
        "p99 ms, storage well": 1000 * p99(healthy + healed),
        "p99 ms, storage stopped": 1000 * p99(stalled),
        "times": max(stalled) / usual,
    }


def gaps_beside_prompts(server: Server, streams: Streams, seed: int) -> list[float]:
    begun = time.perf_counter()
    while time.perf_counter() - begun < STALL_SECONDS:
        seed += 1
        first_token(server, prompt(seed, 500))
        time.sleep(0.5)
    return streams.gaps(begun, time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="first,preempted,overcommit,idle,stall")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = options.only.split(",")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if "first" in wanted:
            figures["first"] = measure_first(scratch, options.tokens, options.rounds)
        if "preempted" in wanted:
            figures["preempted"] = measure_preempted(scratch, options.rounds)
        if "overcommit" in wanted:
            figures["overcommit"] = measure_overcommit(scratch, 2 * options.rounds)
        if "idle" in wanted:
            figures["idle"] = measure_idle(scratch, 2 * options.rounds)
        if "stall" in wanted:
            figures["stall"] = measure_stall(scratch)
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for part, values in figures.items():
        rows = [[name, f"{value:.4g}" if isinstance(value, float) else str(value)] for name, value in values.items()]
        print(markdown([part, ""], rows))
        print()


if __name__ == "__main__":
    main()
