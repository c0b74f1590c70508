"""`baton bench offline | serve | latency`: options in, one run, table or JSON out.

stdout has the numbers, stderr bars and errors. Exit code 1: an answer was incomplete.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from baton.cli.bench.drafts import drafts_of, drafts_since
from baton.cli.bench.measures import Record, read_slo, summarize
from baton.cli.bench.workload import PlannedRequest, random_requests, read_span, shared_prefix_requests, trace_requests
from baton.cli.help import HelpfulTyper
from baton.cli.options import expanded
from baton.cli.progress import stages
from baton.cli.say import FAILED, Failed, bar, complaints, console, print_json, resolve_model, served_name, stderr_lines
from baton.config import Device, LoadFormat, Quantization

if TYPE_CHECKING:
    from baton.cli.bench.load import LoadPlan
    from baton.cli.bench.offline import TimedLLM
    from baton.cli.http_stream import ServerAddress

app = HelpfulTyper()

HELP = """Measure throughput and latency.

\b
Examples:
  baton bench offline                          32 requests, no server
  baton bench latency --batch 1                one stream
  baton bench serve --rate 2 --html run.html   a running server, of any make
  baton bench serve --workload shared-prefix --concurrency 16
  baton bench serve --workload trace --trace conversation.jsonl --scale 0.05
"""

OFFLINE_HELP = """Throughput without a server: all requests at once, in this process.

\b
Examples:
  baton bench offline --requests 32 --input 64:256 --output 128
  baton bench offline ./model.gguf --workload shared-prefix --prefix 512
"""
LATENCY_HELP = """Latency of one batch at a time, without a server.

\b
Examples:
  baton bench latency --batch 1 --input 128 --output 128
  baton bench latency --input 1024 --output 1      prefill alone
"""
SERVE_HELP = """Load a server over HTTP, with streaming, and check that every answer is complete.

Any OpenAI-style server will do; Baton's own is the default.

\b
Examples:
  baton bench serve --requests 64 --rate 2 --slo ttft:500ms,itl:50ms
  baton bench serve --url http://host:8080 --concurrency 16 --html run.html
  baton bench serve --workload trace --trace conversation.jsonl --scale 0.05
"""

Workload = Literal["random", "shared-prefix", "trace"]
ModelArgument = Annotated[str, typer.Argument(metavar="[MODEL]", help="Model, as for baton serve.", show_default=True)]


def _flag(*names: str, help: str, metavar: str | None = None, **limits: Any) -> Any:
    return typer.Option(*names, help=help, metavar=metavar, **limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchCase:
    """Options of the workload."""

    workload: Annotated[Workload, _flag("--workload", help="Kind of prompts (docs/cli.md).")] = "random"
    requests: Annotated[int, _flag("--requests", "--num-prompts", metavar="N", min=1, help="Number of requests.")] = 32
    inputs: Annotated[str, _flag("--input", "--input-len", metavar="N|A:B", help="Prompt tokens per request, or a range.")] = (
        "64:256"
    )
    outputs: Annotated[
        str, _flag("--output", "--output-len", metavar="N|A:B", help="Output tokens per request, or a range.")
    ] = "128"
    prefix: Annotated[
        int, _flag("--prefix", metavar="N", min=1, help="shared-prefix: tokens that the prompts of a group share.")
    ] = 256
    groups: Annotated[int, _flag("--groups", metavar="N", min=1, help="shared-prefix: number of groups.")] = 4
    trace: Annotated[Path | None, _flag("--trace", metavar="FILE", help="trace: file with one request per line, as JSON.")] = (
        None
    )
    scale: Annotated[float, _flag("--scale", metavar="F", min=1e-6, help="trace: factor for all lengths.")] = 1.0
    speed: Annotated[float, _flag("--speed", metavar="F", min=1e-6, help="trace: factor for the speed of replay.")] = 1.0
    seed: Annotated[int, _flag("--seed", metavar="N", help="Random seed: the same seed gives the same workload.")] = 0

    def planned(self) -> list[PlannedRequest]:
        if self.workload == "trace":
            if self.trace is None:
                raise Failed("--workload trace needs --trace FILE")
            return trace_requests(self.trace, self.requests, self.scale, self.speed, self.seed)
        if self.trace is not None:
            raise Failed("--trace FILE needs --workload trace")
        inputs, outputs = read_span(self.inputs, "--input"), read_span(self.outputs, "--output")
        if self.workload == "random":
            return random_requests(self.requests, inputs, outputs, self.seed)
        return shared_prefix_requests(self.requests, self.groups, self.prefix, inputs, outputs, self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Options of the output."""

    slo: Annotated[
        str | None, _flag("--slo", metavar="LIST", help="Latency bounds for goodput: ttft:500ms,itl:50ms (also tpot, e2e).")
    ] = None
    as_json: Annotated[bool, _flag("--json", help="Print one JSON object.")] = False
    html: Annotated[Path | None, _flag("--html", metavar="FILE", help="Write a page with plots. It fetches nothing.")] = None

    def bounds(self) -> dict[str, float]:
        """Checks the options before a long run, not after."""
        if self.html is not None and not self.html.parent.is_dir():
            raise Failed(f"--html {self.html}: there is no directory {self.html.parent}; make it first")
        return read_slo(self.slo) if self.slo else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Options of the server and its load."""

    url: Annotated[str, _flag("--url", "--base-url", metavar="URL", help="Address of the server.")] = "http://127.0.0.1:8000"
    model: Annotated[
        str | None, _flag("--model", metavar="NAME", help="Name of the model on that server. \\[default: the first one]")
    ] = None
    api_key: Annotated[str | None, _flag("--api-key", metavar="KEY", help="API key for that server.")] = None
    endpoint: Annotated[
        Literal["completions", "chat"], _flag("--endpoint", help="Endpoint: /v1/completions or /v1/chat/completions.")
    ] = "completions"
    ids: Annotated[str | None, _flag("--ids", metavar="A:B", help="Send token ids from this range instead of words.")] = None
    rate: Annotated[
        float | None,
        _flag("--rate", "--request-rate", metavar="R", min=1e-6, help="Requests per second. \\[default: all at once]"),
    ] = None
    regular: Annotated[bool, _flag("--regular", help="Send at equal intervals. Without it: at random ones (Poisson).")] = False
    concurrency: Annotated[
        int | None, _flag("--concurrency", "--max-concurrency", metavar="N", min=1, help="Requests open at once, at most.")
    ] = None
    timeout: Annotated[float, _flag("--timeout", metavar="S", min=0.1, help="Seconds per answer, at most.")] = 600.0
    warmup: Annotated[
        int, _flag("--warmup", metavar="N", min=0, help="Short requests before the run, which are not counted.")
    ] = 1

    def plan(self, seed: int) -> LoadPlan:
        from baton.cli.bench.load import LoadPlan
        from baton.cli.http_stream import ServerAddress

        server = ServerAddress(self.url, self.api_key)
        return LoadPlan(
            server=server, model=self.model or first_model(server), endpoint=self.endpoint,
            usable_ids=_id_span(self.ids, self.endpoint), rate=self.rate, regular=self.regular,
            concurrency=self.concurrency, timeout_seconds=self.timeout, seed=seed,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """Settings of the engine in this process."""

    device: Annotated[Device, _flag("--device", help="Compute device, as for baton serve.")] = "auto"
    quantization: Annotated[Quantization, _flag("--quantization", help="How weights are stored and multiplied.")] = "auto"
    load_format: Annotated[LoadFormat, _flag("--load-format", help="Weights of the model's files, or random ones.")] = "auto"
    model_shape: Annotated[
        str, _flag("--model-shape", metavar="NAME", help="With random weights: shape of a well-known model, as llama-3-8b.")
    ] = ""
    threads: Annotated[int, _flag("--threads", metavar="N", min=0, help="Compute threads. 0: one per core.")] = 0
    slots: Annotated[
        int, _flag("--max-num-seqs", "--slots", metavar="N", min=1, help="Sequences that run at once, at most.")
    ] = 64
    tokens_per_step: Annotated[
        int, _flag("--max-num-batched-tokens", "--tokens-per-step", metavar="N", min=1, help="Tokens per step, at most.")
    ] = 512
    kv_memory_gib: Annotated[
        float | None, _flag("--kv-memory-gib", metavar="G", min=0.01, help="Memory for the KV cache in GiB.")
    ] = None


@app.command(help=OFFLINE_HELP)
@expanded
def offline(model: ModelArgument = "smollm2", *, asked: BenchCase, machine: MachineFacts, wanted: Wanted) -> None:
    with complaints("bench offline"):
        workload, bounds = asked.planned(), wanted.bounds()
        llm = load_timed(model, machine, quiet=wanted.as_json)
        warm_up(llm)
        from baton.cli.bench.offline import run_offline

        with bar("requests", quiet=wanted.as_json) as advance:
            records, seconds = run_offline(llm, workload, advance)
        about = {"kind": "offline", "model": model, "workload": asked.workload, "slots": machine.slots}
        _print_results(wanted, {**about, **summarize(records, seconds, bounds)}, records)


@app.command(help=LATENCY_HELP)
@expanded
def latency(
    model: ModelArgument = "smollm2",
    batch: Annotated[int, _flag("--batch", "--batch-size", metavar="N", min=1, help="Requests per batch.")] = 1,
    inputs: Annotated[int, _flag("--input", "--input-len", metavar="N", min=1, help="Prompt tokens.")] = 128,
    outputs: Annotated[int, _flag("--output", "--output-len", metavar="N", min=1, help="Output tokens.")] = 128,
    rounds: Annotated[
        int, _flag("--rounds", "--num-iters", metavar="N", min=1, help="Number of batches, one after the other.")
    ] = 5,
    seed: Annotated[int, _flag("--seed", metavar="N", help="Random seed: the same seed gives the same workload.")] = 0,
    *,
    machine: MachineFacts,
    wanted: Wanted,
) -> None:
    with complaints("bench latency"):
        bounds = wanted.bounds()
        llm = load_timed(model, machine, quiet=wanted.as_json)
        warm_up(llm)
        records, seconds = _rounds(llm, rounds, batch, (inputs, outputs), seed, quiet=wanted.as_json)
        about = {"kind": "latency", "model": model, "batch": batch, "rounds": rounds}
        _print_results(wanted, {**about, **summarize(records, seconds, bounds)}, records)


@app.command(help=SERVE_HELP)
@expanded
def serve(*, target: Target, asked: BenchCase, wanted: Wanted) -> None:
    with complaints("bench serve"):
        workload, bounds = asked.planned(), wanted.bounds()
        plan = target.plan(asked.seed)
        before = drafts_of(plan.server)
        records, seconds = _load(plan, workload, target.warmup, quiet=wanted.as_json)
        about = {"kind": "serve", "url": target.url, "model": plan.model, "endpoint": target.endpoint}
        how = {"workload": asked.workload, "rate": target.rate, "concurrency": target.concurrency}
        drafts = drafts_since(before, drafts_of(plan.server))
        _print_results(wanted, {**about, **how, **summarize(records, seconds, bounds), **drafts}, records)


def _rounds(
    llm: TimedLLM, rounds: int, batch: int, lengths: tuple[int, int], seed: int, *, quiet: bool
) -> tuple[list[Record], float]:
    """Runs one batch after the other, each with new prompts: a cached prompt would skip the prefill."""
    from baton.cli.bench.offline import run_offline

    records: list[Record] = []
    total = 0.0
    with bar("rounds", quiet=quiet) as advance:
        for number in range(rounds):
            advance(number, rounds, "")
            workload = random_requests(batch, (lengths[0],) * 2, (lengths[1],) * 2, seed + 1000 * number)
            some, seconds = run_offline(llm, workload, lambda done, count, note: None)
            for record in some:
                _shift(record, total)
            records += some
            total += seconds
    return records, total


def _shift(record: Record, seconds: float) -> None:
    record.sent, record.ended = record.sent + seconds, record.ended + seconds
    record.pieces = [moment + seconds for moment in record.pieces]


def _load(plan: LoadPlan, workload: Sequence[PlannedRequest], warmup: int, *, quiet: bool) -> tuple[list[Record], float]:
    from baton.cli.bench.load import run_load

    async def both() -> tuple[list[Record], float]:
        if warmup:
            first, _ = await run_load(plan, random_requests(warmup, (8, 8), (4, 4), seed=-1), lambda done, total, note: None)
            if not first[0].ok:
                raise Failed(f"a first short request failed: {first[0].error}")
        return await run_load(plan, workload, advance)

    with bar("requests", quiet=quiet) as advance:
        return asyncio.run(both())


def first_model(server: ServerAddress) -> str:
    from baton.cli.http_stream import HttpError, get_json

    async def ask() -> str:
        async with asyncio.timeout(10.0):
            return str((await get_json(server, "/v1/models"))["data"][0]["id"])

    try:
        return asyncio.run(ask())
    except TimeoutError:
        raise Failed(f"{server.url} does not answer within 10 s; is it loading? `baton serve` says when it is ready") from None
    except HttpError as error:
        raise Failed(f"{error}; start one with `baton serve`, or give --url") from None
    except (KeyError, IndexError, TypeError):
        raise Failed(f"{server.url}/v1/models lists no model; give --model") from None


def _id_span(ids: str | None, endpoint: str) -> range:
    if ids is None:
        return range(0)
    if endpoint == "chat":
        raise Failed("--ids: chats are made of text; leave it out, or use --endpoint completions")
    first, last = read_span(ids, "--ids")
    return range(first, last)


def load_timed(model: str, machine: MachineFacts, *, quiet: bool) -> TimedLLM:
    from baton.cli.run import quiet_waiting

    quiet_waiting()
    path = resolve_model(model, command="bench", quiet=quiet)
    with stages(stderr_lines("bench"), quiet=quiet) as shown:
        shown.announce(f"loading {served_name(model)}", at_once=False)
        from baton.cli.bench.offline import TimedLLM
        from baton.native.build import compilation_announced

        with compilation_announced(shown.announce):
            return TimedLLM(str(path), **asdict(machine))


def warm_up(llm: TimedLLM) -> None:
    """Runs a few steps: the first steps of a process are slower."""
    from baton.cli.bench.offline import run_offline

    run_offline(llm, random_requests(2, (8, 8), (4, 4), seed=-1), lambda done, total, note: None)


# Output


def _print_results(wanted: Wanted, summary: dict[str, Any], records: Sequence[Record]) -> None:
    if wanted.html is not None:
        from baton.cli.bench.report import page

        command = shlex.join(["baton", *sys.argv[1:]])
        wanted.html.write_text(page(f"baton bench {summary['kind']}", command, summary, records), encoding="utf-8")
    if wanted.as_json:
        print_json(summary)
    else:
        print_table(summary)
        if wanted.html is not None:
            typer.echo(f"report: {wanted.html}", err=True)
    if summary["failed"]:
        raise typer.Exit(FAILED)


def print_table(summary: Mapping[str, Any]) -> None:
    from rich.table import Table

    done = f"{summary['completed']} of {summary['requests']} complete"
    short = f", {summary['short']} shorter than asked for" if summary["short"] else ""
    typer.echo(f"requests    {done}{short} in {summary['seconds']:.2f} s ({summary['requests_per_second']:.2f} a second)")
    cached = f", {summary['cached_tokens']:,} of them cached" if summary["cached_tokens"] else ""
    typer.echo(f"tokens      {summary['input_tokens']:,} in{cached}; {summary['output_tokens']:,} out")
    rates = f"{summary['output_tokens_per_second']:,.1f} out, {summary['total_tokens_per_second']:,.1f} in and out"
    typer.echo(f"tok/s       {rates}")
    if "draft_tokens" in summary:
        share = f"{summary['accepted_draft_tokens']:,} of {summary['draft_tokens']:,} ({summary['draft_acceptance_rate']:.0%})"
        typer.echo(f"drafts      {share} accepted, {summary['acceptance_length']:.2f} tokens per row with drafts")
    if "goodput_requests_per_second" in summary:
        bounds = ", ".join(f"{name} {bound:g} ms" for name, bound in summary["slo_ms"].items())
        met = f"{summary['slo_met']} of {summary['requests']} within {bounds}"
        typer.echo(f"goodput     {summary['goodput_requests_per_second']:.3f} requests a second ({met})")
    table = Table("ms", "mean", "p50", "p90", "p99", "max", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("ttft", "tpot", "itl", "e2e"):
        table.add_row(name.upper(), *(f"{value:,.1f}" for value in summary[f"{name}_ms"].values()))
    console().print(table)
    for error in summary["errors"]:
        typer.echo(f"failed: {error}", err=True)
