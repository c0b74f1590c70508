"""The cost of everything but the model: real processes, a worker whose forward pass is nothing (bench/null_model).

    python bench/host.py [--step-ms 2.5,10,20] [--threads 1] [--http 1,16,64] [--offline 1,32,64] [--output 256] [--json]

tok/s           output tokens a second
us/token        CPU time of a process for each output token. For the worker and offline, without the work of --step-ms
us/step         the same for each step
gap             from "result sent" to "next plan received", as the worker sees it: nothing (a few us of reading) where plans
                are made while the worker computes
waited          share of steps whose plan was not there yet (gap over 150 us)

--step-ms has one number for all cases, or one for each place in --http and --offline. Each step hashes as much as an
undisturbed core hashes in that time, on --threads threads: an amount, not a time, so what the other processes take of the
cores shows in tok/s. With --step-ms 0 the front falls behind and sends several tokens in an event. CPU time is what to
compare on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

PARTS = Path(__file__).parent / "null_model"
sys.path.insert(0, str(PARTS))

from null_runner import work_bytes  # noqa: E402

from baton.models.names import DEFAULT_MODEL, resolve  # noqa: E402

WAITED_SECONDS = 150e-6
START_SECONDS_MAX = 60.0
PROMPT = 64
Case = dict[str, Any]


class Streams(asyncio.Protocol):
    """One client: sends its request and notes when bytes came. As cheap as a client can be: it shares the cores."""

    def __init__(self, request: bytes, done: asyncio.Future[None]) -> None:
        self._request, self._done = request, done
        self.times: list[float] = []
        self.events = 0
        self.whole = False

    def connection_made(self, transport: Any) -> None:
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.events += data.count(b"data: {")
        self.whole = self.whole or b"data: [DONE]" in data

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_result(None)


def request_bytes(number: int, options: argparse.Namespace) -> bytes:
    prompt = [1 + (number * 97 + place) % 40_000 for place in range(PROMPT)]
    body = {"model": "null", "max_tokens": options.output, "temperature": 0.0, "ignore_eos": True, "stream": True}
    if options.endpoint == "chat":
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": f"{number} " * (PROMPT // 2)}]
    else:
        path, body["prompt"] = "/v1/completions", prompt
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def load(port: int, clients: int, first: int, options: argparse.Namespace) -> list[Streams]:
    loop, streams = asyncio.get_running_loop(), []
    for number in range(clients):
        done = loop.create_future()
        request = request_bytes(first + number, options)
        _, stream = await loop.create_connection(lambda r=request, d=done: Streams(r, d), "127.0.0.1", port)  # type: ignore[misc]
        streams.append((stream, done))
    async with asyncio.timeout(600):
        for _, done in streams:
            await done
    bad = [stream for stream, _ in streams if not stream.whole]
    if bad:
        raise SystemExit(f"{len(bad)} of {clients} answers did not reach their end")
    return [stream for stream, _ in streams]


# Processes


def cpu_seconds(pid: int) -> float:
    """Of all threads, to the nanosecond where the kernel says it."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def family(pid: int) -> dict[str, int]:
    """Name to process id: the supervisor and what it started."""
    found = {"supervisor": pid}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent in found.values() or parent == pid:
            names = {b"baton.runtime.front": "front", b"null_engine": "engine", b"null_worker": "worker"}
            for word in words:
                if word in names:
                    found[names[word]] = int(entry.name)
    return found


def whole_family(pid: int) -> dict[str, int]:
    deadline = time.monotonic() + START_SECONDS_MAX
    while len(found := family(pid)) < 4:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {sorted(found)} run")
        time.sleep(0.05)
    return found


def orders(options: argparse.Namespace, **more: Any) -> dict[str, str]:
    told = {"step_bytes": options.step_bytes, "threads": options.threads, **more}
    paths = [str(PARTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "BATON_NULL_MODEL": json.dumps(told), "PYTHONPATH": os.pathsep.join(paths)}


def settings(**more: Any) -> str:
    return json.dumps({"model": str(resolve(DEFAULT_MODEL)), "max_num_seqs": 64, **more})


@contextmanager
def server(options: argparse.Namespace, notes: Path) -> Iterator[tuple[int, dict[str, int]]]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "null_serve", settings(served_model_name=["null"], port=port, drain_seconds_max=2.0)]
    process = subprocess.Popen(command, env=orders(options, notes=str(notes)), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != b"READY":
            raise SystemExit("the server did not start")
        yield port, whole_family(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(START_SECONDS_MAX)


def taken_notes(worker: int, notes: Path) -> dict[str, list[float]]:
    os.kill(worker, signal.SIGUSR1)
    deadline = time.monotonic() + START_SECONDS_MAX
    while not notes.exists():
        if time.monotonic() > deadline:
            raise SystemExit("the worker did not write its notes")
        time.sleep(0.01)
    rows: dict[str, list[float]] = json.loads(notes.read_text())
    return rows


# Cases


def over_http(clients: int, options: argparse.Namespace) -> Case:
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.json"
        with server(options, notes) as (port, pids):
            asyncio.run(load(port, min(clients, 4), 10_000, options))  # warm
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            begin, client = time.perf_counter(), time.process_time()
            streams = asyncio.run(load(port, clients, 1, options))
            end, client = time.perf_counter(), time.process_time() - client
            cpu = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
            rows = taken_notes(pids["worker"], notes)
    whole = rows["got"][: len(rows["worked"])]  # notes may be taken in the middle of a step
    within = [place for place, at in enumerate(whole) if begin <= at <= end]
    cpu["worker"] -= sum(rows["worked"][place] for place in within)
    cpu["client"] = client
    gaps = [rows["got"][place] - rows["asked"][place] for place in within[4:]]  # the first one waited for a request
    between = [1e3 * (late - early) for s in streams for early, late in zip(s.times[1:], s.times[2:], strict=False)]
    tokens = clients * options.output
    return {
        **costs("http", clients, tokens, len(within), end - begin, cpu),
        "events": sum(stream.events for stream in streams),
        "gap_us": {"median": 1e6 * median(gaps), "p99": 1e6 * quantiles(gaps, n=100)[98]},
        "waited": sum(gap > WAITED_SECONDS for gap in gaps) / len(gaps),
        "itl_ms": {"median": median(between), "p99": quantiles(between, n=100)[98]},
    }


def offline(sequences: int, options: argparse.Namespace) -> Case:
    sizes = [str(sequences), str(PROMPT), str(options.output)]
    command = [sys.executable, "-m", "null_llm", settings(), *sizes]
    told = json.loads(subprocess.run(command, env=orders(options), check=True, stdout=subprocess.PIPE).stdout)
    cpu = {"process": told["cpu"] - told["worked"]}
    return costs("offline", sequences, told["tokens"], told["steps"], told["seconds"], cpu)


def costs(case: str, streams: int, tokens: int, steps: int, seconds: float, cpu: dict[str, float]) -> Case:
    return {
        "case": case,
        "streams": streams,
        "tokens": tokens,
        "steps": steps,
        "tokens_per_second": tokens / seconds,
        "us_per_token": {name: 1e6 * used / tokens for name, used in cpu.items()},
        "us_per_step": {name: 1e6 * used / steps for name, used in cpu.items()},
    }


def show(case: Case) -> None:
    names = case["us_per_token"]
    each = "  ".join(f"{name} {names[name]:.1f} ({case['us_per_step'][name]:.0f})" for name in names if name != "supervisor")
    print(f"{case['case']:>7} x {case['streams']:<3} {case['tokens_per_second']:>8.0f} tok/s   us/token (us/step): {each}")
    if "gap_us" in case:
        gap, itl = case["gap_us"], case["itl_ms"]
        print(
            f"{'':14}gap us median {gap['median']:.0f}, p99 {gap['p99']:.0f}; waited {100 * case['waited']:.1f} %; "
            f"between events ms median {itl['median']:.2f}, p99 {itl['p99']:.2f}; {case['events']} events"
        )


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def step_times(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=step_times, default=[2.5, 10.0, 20.0], help="work of a step (default 2.5,10,20)")
    parser.add_argument("--threads", type=int, default=1, help="threads that do it (default 1)")
    parser.add_argument("--http", type=numbers, default=[1, 16, 64], help="streaming clients (default 1,16,64)")
    parser.add_argument("--offline", type=numbers, default=[1, 32, 64], help="sequences (default 1,32,64)")
    parser.add_argument("--output", type=int, default=256, help="tokens of each answer (default 256)")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    options = parser.parse_args()
    work = [work_bytes(step_ms) for step_ms in options.step_ms]
    cases = []
    for run, sizes in ((over_http, options.http), (offline, options.offline)):
        for place, size in enumerate(sizes):
            options.step_bytes = work[min(place, len(work) - 1)]
            cases.append(run(size, options))
            if not options.json:
                show(cases[-1])
    if options.json:
        print(json.dumps(cases))


if __name__ == "__main__":
    main()
