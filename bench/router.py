"""Tokens a second through one router process: real router, real instances with a model that computes nothing.

    python bench/router.py [--instances 4] [--clients 4] [--streams 64,256] [--output 256] [--json]

tok/s     output tokens a second of all streams
router    share of one core that the router process uses, and its processor time for each token
shares    where that time goes: HTTP, sealing of messages, codec, the router machine, detokenizing, channels, the event loop

Clients are processes that count bytes. Needs more cores than the router, instances (three processes each) and clients together;
on fewer the processor time for each token is what to compare.
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
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from baton.models.names import DEFAULT_MODEL, resolve
from host import PARTS, START_SECONDS_MAX, cpu_seconds, load, numbers


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def process_of(module: str, parent: int) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            started_by = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            if started_by == parent and module.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                return int(entry.name)
        except (OSError, IndexError):
            continue
    raise SystemExit(f"no {module} runs")


def client(options: argparse.Namespace) -> None:
    """One client process: streams to the port, and prints when the first and the last byte came."""
    options.endpoint = "completions"
    sys.stdin.readline()
    begin = time.time()
    asyncio.run(load(options.port, options.share, options.first, options))
    print(json.dumps([begin, time.time()]), flush=True)


def measure(port: int, streams: int, options: argparse.Namespace) -> tuple[float, float]:
    """Begin and end of all streams."""
    share = streams // options.clients
    more = ["--port", str(port), "--share", str(share), "--output", str(options.output)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, *more, "--first", str(1 + number * share + streams * 1000)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(options.clients)
    ]
    time.sleep(1.5)  # until they have imported all that they need
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    spans = [json.loads(process.communicate()[0]) for process in processes]
    return min(span[0] for span in spans), max(span[1] for span in spans)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    port, cases = free_port(), []
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes.json"
        serve = {
            "model": options.model or str(resolve(DEFAULT_MODEL)),
            "served_model_name": ["null"],
            "port": port,
            "max_num_seqs": 128,
        }
        serve |= {"log_level": "warning", "drain_seconds_max": 2.0}
        paths = [str(PARTS), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "BATON_ROUTER_NOTES": str(notes)}
        environment["BATON_NULL_MODEL"] = json.dumps({"step_bytes": options.step_bytes, "threads": 1})
        command = [sys.executable, "-m", "null_up", json.dumps({"serve": serve, "instances": options.instances})]
        up = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        try:
            assert up.stdout is not None
            if up.stdout.readline().strip() != b"READY":
                raise SystemExit("the cluster did not start")
            router = process_of("null_router", up.pid)
            measure(port, options.clients * 2, options)  # warm
            for streams in options.streams:
                os.kill(router, signal.SIGUSR1)
                before = cpu_seconds(router)
                begin, end = measure(port, streams, options)
                used = cpu_seconds(router) - before
                os.kill(router, signal.SIGUSR2)
                cases.append(case(streams, options, end - begin, used, counted(notes)))
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(START_SECONDS_MAX)
    return cases


def counted(notes: Path) -> dict[str, int]:
    deadline = time.monotonic() + START_SECONDS_MAX
    while not notes.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    found: dict[str, int] = json.loads(notes.read_text())
    notes.unlink()
    return found


def case(streams: int, options: argparse.Namespace, seconds: float, used: float, shares: dict[str, int]) -> dict[str, Any]:
    tokens = (streams // options.clients) * options.clients * options.output
    total = max(1, sum(shares.values()))
    return {
        "streams": streams,
        "tokens_per_second": tokens / seconds,
        "router_core": used / seconds,
        "router_us_per_token": 1e6 * used / tokens,
        "shares": {name: round(count / total, 3) for name, count in sorted(shares.items(), key=lambda one: -one[1])},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=4, help="instances behind the router (default 4)")
    parser.add_argument("--clients", type=int, default=4, help="processes that read the streams (default 4)")
    parser.add_argument("--streams", type=numbers, default=[64, 256], help="open streams (default 64,256)")
    parser.add_argument("--output", type=int, default=256, help="tokens of each answer (default 256)")
    parser.add_argument("--step-bytes", type=int, default=0, help="work of a step: bytes that are hashed (default none)")
    parser.add_argument("--model", default="", help="whose tokenizer is used (default: the default model)")
    parser.add_argument("--json", action="store_true")
    for name in ("--port", "--share", "--first"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.port:
        client(options)
        return
    cases = run(options)
    if options.json:
        print(json.dumps(cases))
        return
    for one in cases:
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in one["shares"].items())
        print(
            f"{one['streams']:>5} streams {one['tokens_per_second']:>8.0f} tok/s   router {one['router_core']:.2f} cores, "
            f"{one['router_us_per_token']:.1f} us/token: {shares}"
        )


if __name__ == "__main__":
    main()
