"""Baton beside its peers on this machine's CPU, in one run: medians of N rounds, and ratios.

    python bench/cpu.py --venvs DIR [--rounds 3] [--requests 32] [--output 128] [--threads 2] [--json FILE]

case        workload (the same token ids for every engine)
offline     all requests at once, prompts of 64 to 256 tokens                       output tok/s
decode      one stream, prompt of 128 tokens, time for the prompt subtracted        tok/s
prefill     one prompt of 1,024 tokens, 1 new token                                 prompt tok/s
http        the requests of `offline` through a server, 16 streaming clients        output tok/s, TTFT, ITL
ready       from the start of the process until it answers                          s
memory      of all its processes after the work (PSS)                               MiB

peer            how                                                        weights
llama.cpp       its server, from the xllamacpp wheel; all cases over HTTP  as in the file
transformers    generate() with padding, in process                        float32

Each peer lives in a virtual environment of its own below --venvs, made here if it is not there; one that cannot be installed
is left out, with the reason. Engines take turns within a round, so a busy hour hurts all of them. Waiting threads sleep in
all of them unless --spin is given: on a shared machine a spinning engine measures its neighbours. The kernel's CPU pressure
(share of the time in which somebody waited for a core) stands beside every row: above 0.1 a row says little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from baton.cli.bench.load import LoadPlan, run_load
from baton.cli.bench.measures import sum_up
from baton.cli.bench.workload import Ask
from baton.cli.http_stream import HttpError, Server, get_json
from baton.cli.say import bar
from baton.models.names import resolve

HERE = Path(__file__).parent / "peers"
IDS = range(200, 48000)
QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
START_SECONDS_MAX = 300.0
PACKAGES = {
    "llamacpp": (["--only-binary=:all:", "xllamacpp"],),
    # torch first and by itself: an open requirement resolves to a build with gigabytes of CUDA
    "transformers": (["torch==2.13.0"], ["transformers", "gguf", "accelerate"]),
}
ROWS = (
    ("offline", "offline, {requests} requests, output tok/s", True),
    ("decode", "decode, one stream, tok/s", True),
    ("prefill", "prefill of {prefill}, tok/s", True),
    ("http", "HTTP, {clients} streaming clients, output tok/s", True),
    ("http_ttft_ms", "HTTP, mean TTFT, ms", False),
    ("http_itl_ms", "HTTP, mean ITL, ms", False),
    ("http_itl_p99_ms", "HTTP, p99 ITL, ms", False),
    ("ready_s", "start to ready, s", False),
    ("memory_mib", "memory, MiB", False),
    ("pressure", "CPU pressure while measured", False),
)
"""(key, words, more is better)"""

Numbers = dict[str, float]


class Skipped(Exception):
    """This peer cannot be measured here; the message says why."""


class Work:
    """What every engine is asked in one round. Other rounds, other ids: no prefix cache may help."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        lengths, self._ids = Random(7), Random(number)
        self.output = options.output
        self.clients = options.clients
        self.batch = [self._prompt(lengths.randint(64, 256)) for _ in range(options.requests)]
        self.http = [self._prompt(len(prompt)) for prompt in self.batch]
        self.short, self.again = self._prompt(128), self._prompt(128)
        self.long = self._prompt(options.prefill)

    def _prompt(self, length: int) -> list[int]:
        return [self._ids.choice(IDS) for _ in range(length)]


def cases(generate: Callable[[list[list[int]], int], float], work: Work) -> Numbers:
    """`generate` returns the seconds for all prompts with that many new tokens each."""
    generate([work.short[:16]], 4)  # warm
    one = generate([work.short], 1)
    many = generate([work.again], work.output + 1)
    prefill = generate([work.long], 1)
    batch = generate(work.batch, work.output)
    return {
        "decode": work.output / max(1e-9, many - one),
        "prefill": len(work.long) / prefill,
        "offline": len(work.batch) * work.output / batch,
    }


# Processes


def pressure() -> float:
    """Seconds so far in which some task waited for a core; 0 where the kernel does not say."""
    try:
        return int(Path("/proc/pressure/cpu").read_text().splitlines()[0].rsplit("total=", 1)[1]) / 1e6
    except OSError:
        return 0.0


def memory_mib(pid: int) -> float:
    """PSS of the process and all below it: shared pages count once."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents.setdefault(int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1]), []).append(int(folder.name))
            except OSError:
                continue
    total, todo = 0, [pid]
    while todo:
        todo += parents.get(each := todo.pop(), [])
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
            total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total / 1024


@contextmanager
def started(command: list[str], options: argparse.Namespace, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **({} if options.spin else QUIET)}
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        text=True,
        env=environment,
        stderr=options.log,
        **{"stdout": subprocess.PIPE, **settings},
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)


def read_ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise Skipped(f"its process ended with status {process.wait()} before it was ready (see --log)")


def watched(measure: Callable[[], Numbers]) -> Numbers:
    begin, waited = time.perf_counter(), pressure()
    numbers = measure()
    return {**numbers, "pressure": (pressure() - waited) / (time.perf_counter() - begin)}


# HTTP


def over_http(server: Server, model: str, prompts: list[list[int]], output: int, clients: int | None) -> tuple[Numbers, float]:
    """Every answer must be complete and as long as it was asked to be: a number for less work is no number."""
    asks = [Ask(tuple(prompt), output) for prompt in prompts]
    plan = LoadPlan(server=server, model=model, concurrency=clients, usable_ids=range(max(map(max, prompts)) + 1))
    records, seconds = asyncio.run(run_load(plan, asks, lambda done, total, note: None))
    summary = sum_up(records, seconds)
    if summary["failed"] or summary["short"]:
        raise Skipped(f"{summary['failed']} answers failed, {summary['short']} were short: {summary['errors'][:1]}")
    return summary, seconds


def http_case(server: Server, model: str, work: Work) -> Numbers:
    summary: Any = over_http(server, model, work.http, work.output, work.clients)[0]
    return {
        "http": summary["output_tokens_per_second"],
        "http_ttft_ms": summary["ttft_ms"]["mean"],
        "http_itl_ms": summary["itl_ms"]["mean"],
        "http_itl_p99_ms": summary["itl_ms"]["p99"],
    }


def wait_healthy(server: Server, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline and process.poll() is None:
        try:
            asyncio.run(get_json(server, "/health"))
            return
        except HttpError:
            time.sleep(0.05)
    raise Skipped("it was not ready in time, or ended (see --log)")


# Engines


def driven(command: list[str], options: argparse.Namespace, work: Work) -> tuple[str, Numbers]:
    """An engine behind JSON lines (bench/peers/*_driver.py)."""
    begin = time.perf_counter()
    with started(command, options) as process:
        name = read_ready(process)["ready"]
        ready = time.perf_counter() - begin

        def generate(prompts: list[list[int]], output: int) -> float:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"prompts": prompts, "output": output}) + "\n")
            process.stdin.flush()
            answer = read_ready(process)
            if answer["tokens"] != len(prompts) * output:
                raise Skipped(f"{answer['tokens']} tokens instead of {len(prompts) * output}")
            return float(answer["seconds"])

        numbers = watched(lambda: cases(generate, work))
        return name, {**numbers, "ready_s": ready, "memory_mib": memory_mib(process.pid)}


def baton(options: argparse.Namespace, work: Work) -> tuple[str, Numbers]:
    """In process for what needs no server, then `baton serve`. Ready and memory are the server's."""
    name, numbers = driven([sys.executable, str(HERE / "baton_driver.py"), options.path, str(options.threads)], options, work)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, "-m", "baton.cli.main", "serve", options.path, "--port", str(port)]
    command += ["--threads", str(options.threads), "--served-model-name", "model"]
    begin = time.perf_counter()
    with started(command, options, stdout=subprocess.DEVNULL) as process:
        server = Server(f"http://127.0.0.1:{port}")
        wait_healthy(server, process)
        ready = time.perf_counter() - begin
        over_http(server, "model", [work.short[:16]], 4, 1)
        http = watched(lambda: http_case(server, "model", work))
        share = max(http.pop("pressure"), numbers["pressure"])
        return name, {**numbers, **http, "pressure": share, "ready_s": ready, "memory_mib": memory_mib(process.pid)}


def llamacpp(options: argparse.Namespace, work: Work) -> tuple[str, Numbers]:
    if not options.path.endswith(".gguf"):
        raise Skipped("llama.cpp reads .gguf files, and the model is a folder")
    context = len(work.long) + 64 + sum(len(prompt) + work.output for prompt in work.batch)
    settings = [options.threads, len(work.batch), context, 50 if options.spin else 0]
    command = [str(options.venvs / "llamacpp/bin/python"), str(HERE / "llamacpp_server.py"), options.path, *map(str, settings)]
    begin = time.perf_counter()
    with started(command, options) as process:
        said = read_ready(process)
        server = Server(said["url"])
        wait_healthy(server, process)
        ready = time.perf_counter() - begin

        def measure() -> Numbers:
            offline = cases(lambda prompts, output: over_http(server, "model", prompts, output, None)[1], work)
            return {**offline, **http_case(server, "model", work)}

        numbers = watched(measure)
        return said["ready"], {**numbers, "ready_s": ready, "memory_mib": memory_mib(process.pid)}


def hf_transformers(options: argparse.Namespace, work: Work) -> tuple[str, Numbers]:
    python = str(options.venvs / "transformers/bin/python")
    return driven([python, str(HERE / "transformers_driver.py"), options.path, str(options.threads)], options, work)


ENGINES = {"baton": baton, "llamacpp": llamacpp, "transformers": hf_transformers}


def ensure_installed(peer: str, options: argparse.Namespace) -> None:
    """A virtual environment with the peer in it. A mark says that it is whole."""
    folder: Path = options.venvs / peer
    mark = folder / ".whole"
    if peer not in PACKAGES or mark.exists():
        return
    steps = [[sys.executable, "-m", "venv", str(folder)]] if not (folder / "bin/python").exists() else []
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in [*steps, *([*pip, *packages] for packages in PACKAGES[peer])]:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
            raise Skipped(f"cannot be installed: {lines[-1] if lines else 'pip gave no reason'}")
    mark.touch()


# The run


def run(options: argparse.Namespace) -> dict[str, Any]:
    names: dict[str, str] = {}
    rounds: dict[str, list[Numbers]] = {engine: [] for engine in options.engines}
    skipped: dict[str, str] = {}
    with bar("rounds x engines") as advance:
        total, done = options.rounds * len(options.engines), 0
        for number in range(options.rounds):
            for engine in options.engines:
                advance(done, total, engine)
                done += 1
                if engine in skipped:
                    continue
                try:
                    ensure_installed(engine, options)
                    names[engine], numbers = ENGINES[engine](options, Work(options, number))
                    rounds[engine].append(numbers)
                    print(f"{engine}: {json.dumps({k: round(v, 2) for k, v in numbers.items()})}", file=sys.stderr, flush=True)
                except (Skipped, HttpError) as why:
                    skipped[engine] = str(why)
    medians = {
        engine: {key: median(row[key] for row in rows) for key in rows[0]}
        for engine, rows in rounds.items()
        if rows and engine not in skipped
    }
    return {"engines": names, "medians": medians, "rounds": rounds, "skipped": skipped}


def table(found: dict[str, Any], options: argparse.Namespace) -> str:
    """Markdown. A ratio above 1 means that Baton is better."""
    medians: dict[str, Numbers] = found["medians"]
    peers = [engine for engine in medians if engine != "baton"]
    head = ["", *(found["engines"][engine] for engine in medians), *(f"Baton against {peer}" for peer in peers)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, words, more_is_better in ROWS:
        cells = [words.format(**vars(options))]
        cells += [f"{row[key]:,.2f}" if key in row else "-" for row in medians.values()]
        for peer in peers:
            ours, theirs = medians.get("baton", {}).get(key), medians[peer].get(key)
            ratio = None if key == "pressure" or not ours or not theirs else ours / theirs if more_is_better else theirs / ours
            cells.append(f"{ratio:.2f}" if ratio else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, *(f"\nLeft out: {peer}: {why}" for peer, why in found["skipped"].items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, required=True, help="folder for the peers' virtual environments")
    parser.add_argument("--model", default="smollm2", help="as for baton serve")
    parser.add_argument("--engines", default="baton,llamacpp,transformers", help="comma separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output", type=int, default=128, help="new tokens a request")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--spin", action="store_true", help="let waiting threads of the peers spin, as is their default")
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--log", type=Path, default=Path(os.devnull), help="what the engines say on stderr")
    options = parser.parse_args()
    options.engines = options.engines.split(",")
    options.path = str(resolve(options.model))
    options.venvs = options.venvs.absolute()
    options.venvs.mkdir(parents=True, exist_ok=True)
    with options.log.open("w") as options.log:
        found = run(options)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(table(found, options))
    sys.exit(0 if "baton" not in found["skipped"] else 1)


if __name__ == "__main__":
    main()
