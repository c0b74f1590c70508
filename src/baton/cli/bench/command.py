"""`baton bench offline | serve | latency`: options in, one run, table or JSON out.

stdout is for the numbers, stderr for bars and complaints. Exit code 1: an answer was not complete.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from baton.cli.bench.measures import Record, read_slo, sum_up
from baton.cli.bench.workload import Ask, random_asks, read_span, shared_prefix_asks, trace_asks
from baton.cli.say import FAILED, Failed, bar, complaints, console, print_json, resolve_model, waiting

if TYPE_CHECKING:
    from baton.cli.bench.offline import TimedLLM

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

HELP = """Measure throughput and latency.

\b
Examples:
  baton bench offline                          32 requests, no server
  baton bench latency --batch 1                one stream
  baton bench serve --rate 2 --html run.html   a server that runs, also a peer's
  baton bench serve --workload shared-prefix --concurrency 16
  baton bench serve --workload trace --trace conversation.jsonl --scale 0.05
"""

Workload = Literal["random", "shared-prefix", "trace"]
WorkloadOption = Annotated[Workload, typer.Option("--workload", help="What is asked (docs/cli.md).", show_default=True)]
RequestsOption = Annotated[int, typer.Option("--requests", "--num-prompts", metavar="N", min=1, help="How many.")]
InputOption = Annotated[str, typer.Option("--input", "--input-len", metavar="N|A:B", help="Prompt tokens, or a span of them.")]
OutputOption = Annotated[
    str, typer.Option("--output", "--output-len", metavar="N|A:B", help="Output tokens, or a span of them.")
]
PrefixOption = Annotated[int, typer.Option("--prefix", metavar="N", min=1, help="shared-prefix: tokens that a group shares.")]
GroupsOption = Annotated[int, typer.Option("--groups", metavar="N", min=1, help="shared-prefix: how many groups.")]
TraceOption = Annotated[Path | None, typer.Option("--trace", metavar="FILE", help="trace: JSON lines.")]
ScaleOption = Annotated[float, typer.Option("--scale", metavar="F", min=1e-6, help="trace: factor for all lengths.")]
SpeedOption = Annotated[float, typer.Option("--speed", metavar="F", min=1e-6, help="trace: how much faster than it was.")]
SeedOption = Annotated[int, typer.Option("--seed", metavar="N", help="The same seed is the same workload.")]
SloOption = Annotated[
    str | None, typer.Option("--slo", metavar="LIST", help="For goodput, like ttft:500ms,itl:50ms (also tpot, e2e).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
HtmlOption = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots. It fetches nothing.")]
ModelArgument = Annotated[str, typer.Argument(metavar="[MODEL]", help="As for baton serve.", show_default=True)]
ThreadsOption = Annotated[int, typer.Option("--threads", metavar="N", min=0, help="Compute threads. 0: one a core.")]
SlotsOption = Annotated[int, typer.Option("--slots", "--max-num-seqs", metavar="N", min=1, help="Sequences at once.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The workload options, as they were typed."""

    workload: Workload
    requests: int
    inputs: str
    outputs: str
    prefix: int
    groups: int
    trace: Path | None
    scale: float
    speed: float
    seed: int

    def asks(self) -> list[Ask]:
        if self.workload == "trace":
            if self.trace is None:
                raise Failed("--workload trace needs --trace FILE")
            return trace_asks(self.trace, self.requests, self.scale, self.speed, self.seed)
        if self.trace is not None:
            raise Failed("--trace FILE needs --workload trace")
        inputs, outputs = read_span(self.inputs, "--input"), read_span(self.outputs, "--output")
        if self.workload == "random":
            return random_asks(self.requests, inputs, outputs, self.seed)
        return shared_prefix_asks(self.requests, self.groups, self.prefix, inputs, outputs, self.seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """How the numbers are to be told."""

    kind: str
    about: Mapping[str, Any]
    slo: Mapping[str, float]
    as_json: bool
    html: Path | None


@app.command(
    help="Throughput without a server: all requests at once, in this process.\n\n\b\nExample:\n  baton bench offline --requests 32 --input 64:256 --output 128"
)
def offline(
    model: ModelArgument = "smollm2",
    workload: WorkloadOption = "random",
    requests: RequestsOption = 32,
    inputs: InputOption = "64:256",
    outputs: OutputOption = "128",
    prefix: PrefixOption = 256,
    groups: GroupsOption = 4,
    trace: TraceOption = None,
    scale: ScaleOption = 1.0,
    speed: SpeedOption = 1.0,
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    slots: SlotsOption = 64,
    slo: SloOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    asked = Asked(
        workload=workload, requests=requests, inputs=inputs, outputs=outputs, prefix=prefix, groups=groups,
        trace=trace, scale=scale, speed=speed, seed=seed,
    )  # fmt: skip
    with complaints("bench offline"):
        asks, bounds = asked.asks(), read_slo(slo) if slo else {}
        about = {"model": model, "workload": workload, "slots": slots}
        wanted = Wanted(kind="offline", about=about, slo=bounds, as_json=as_json, html=_writable(html))
        llm = load_timed(model, quiet=as_json, threads=threads, slots=slots)
        warm_up(llm)
        from baton.cli.bench.offline import run_offline

        with bar("requests", quiet=as_json) as advance:
            records, seconds = run_offline(llm, asks, advance)
        _tell(wanted, records, seconds)


@app.command(
    help="Latency of one batch at a time, without a server.\n\n\b\nExample:\n  baton bench latency --batch 1 --input 128 --output 128"
)
def latency(
    model: ModelArgument = "smollm2",
    batch: Annotated[int, typer.Option("--batch", "--batch-size", metavar="N", min=1, help="Requests at once.")] = 1,
    inputs: Annotated[int, typer.Option("--input", "--input-len", metavar="N", min=1, help="Prompt tokens.")] = 128,
    outputs: Annotated[int, typer.Option("--output", "--output-len", metavar="N", min=1, help="Output tokens.")] = 128,
    rounds: Annotated[int, typer.Option("--rounds", "--num-iters", metavar="N", min=1, help="How often.")] = 5,
    seed: SeedOption = 0,
    threads: ThreadsOption = 0,
    slo: SloOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    with complaints("bench latency"):
        bounds = read_slo(slo) if slo else {}
        about = {"model": model, "batch": batch, "rounds": rounds}
        wanted = Wanted(kind="latency", about=about, slo=bounds, as_json=as_json, html=_writable(html))
        llm = load_timed(model, quiet=as_json, threads=threads, slots=max(batch, 1))
        warm_up(llm)
        records, seconds = _rounds(llm, rounds, batch, (inputs, outputs), seed, quiet=as_json)
        _tell(wanted, records, seconds)


def _rounds(
    llm: TimedLLM, rounds: int, batch: int, lengths: tuple[int, int], seed: int, *, quiet: bool
) -> tuple[list[Record], float]:
    """One batch after the other, each with prompts of its own: a cached prompt would be no prefill."""
    from baton.cli.bench.offline import run_offline

    records: list[Record] = []
    total = 0.0
    with bar("rounds", quiet=quiet) as advance:
        for number in range(rounds):
            advance(number, rounds, "")
            asks = random_asks(batch, (lengths[0],) * 2, (lengths[1],) * 2, seed + 1000 * number)
            some, seconds = run_offline(llm, asks, lambda done, count, note: None)
            for record in some:
                _shift(record, total)
            records += some
            total += seconds
    return records, total


def _shift(record: Record, seconds: float) -> None:
    record.sent, record.ended = record.sent + seconds, record.ended + seconds
    record.pieces = [moment + seconds for moment in record.pieces]


@app.command(
    help="Load a server over HTTP, with streaming, and check that every answer is complete. Any OpenAI-style server will do.\n\n\b\nExamples:\n  baton bench serve --requests 64 --rate 2 --slo ttft:500ms,itl:50ms\n  baton bench serve --url http://host:8080 --concurrency 16 --html run.html"
)
def serve(
    url: Annotated[str, typer.Option("--url", "--base-url", metavar="URL", help="The server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Its name there.  \\[default: the first one]")] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help="For that server.")] = None,
    endpoint: Annotated[Literal["completions", "chat"], typer.Option(help="Which route of /v1.")] = "completions",
    ids: Annotated[str | None, typer.Option(metavar="A:B", help="Send token ids of this span instead of words.")] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", "--request-rate", metavar="R", min=1e-6, help="Requests a second.  \\[default: all at once]"),
    ] = None,
    regular: Annotated[bool, typer.Option("--regular", help="At equal distances; else at random ones (Poisson).")] = False,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", "--max-concurrency", metavar="N", min=1, help="Open at once, at most.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="S", min=0.1, help="Seconds that an answer may take.")] = 600.0,
    workload: WorkloadOption = "random",
    requests: RequestsOption = 32,
    inputs: InputOption = "64:256",
    outputs: OutputOption = "128",
    prefix: PrefixOption = 256,
    groups: GroupsOption = 4,
    trace: TraceOption = None,
    scale: ScaleOption = 1.0,
    speed: SpeedOption = 1.0,
    seed: SeedOption = 0,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Short requests before the run.")] = 1,
    slo: SloOption = None,
    as_json: JsonOption = False,
    html: HtmlOption = None,
) -> None:
    asked = Asked(
        workload=workload, requests=requests, inputs=inputs, outputs=outputs, prefix=prefix, groups=groups,
        trace=trace, scale=scale, speed=speed, seed=seed,
    )  # fmt: skip
    with complaints("bench serve"):
        asks, bounds = asked.asks(), read_slo(slo) if slo else {}
        about = {"url": url, "endpoint": endpoint, "workload": workload, "rate": rate, "concurrency": concurrency}
        wanted = Wanted(kind="serve", about=about, slo=bounds, as_json=as_json, html=_writable(html))
        from baton.cli.bench.load import LoadPlan
        from baton.cli.http_stream import Server

        server = Server(url, api_key)
        name = model or first_model(server)
        plan = LoadPlan(
            server=server, model=name, endpoint=endpoint, usable_ids=_id_span(ids, endpoint), rate=rate, regular=regular,
            concurrency=concurrency, timeout_seconds=timeout, seed=seed,
        )  # fmt: skip
        records, seconds = _load(plan, asks, warmup, quiet=as_json)
        _tell(wanted, records, seconds)


def _load(plan: Any, asks: Sequence[Ask], warmup: int, *, quiet: bool) -> tuple[list[Record], float]:
    from baton.cli.bench.load import run_load

    async def both() -> tuple[list[Record], float]:
        if warmup:
            first, _ = await run_load(plan, random_asks(warmup, (8, 8), (4, 4), seed=-1), lambda done, total, note: None)
            if not first[0].ok:
                raise Failed(f"a first short request failed: {first[0].error}")
        return await run_load(plan, asks, advance)

    with bar("requests", quiet=quiet) as advance:
        return asyncio.run(both())


def first_model(server: Any) -> str:
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


def load_timed(model: str, *, quiet: bool, **settings: Any) -> TimedLLM:
    from baton.cli.run import quiet_waiting

    quiet_waiting()
    path = resolve_model(model, quiet=quiet)
    with waiting(f"loading {model}", quiet=quiet):
        from baton.cli.bench.offline import TimedLLM

        return TimedLLM(str(path), **settings)


def warm_up(llm: TimedLLM) -> None:
    """The first steps of a process pay for things that later ones do not."""
    from baton.cli.bench.offline import run_offline

    run_offline(llm, random_asks(2, (8, 8), (4, 4), seed=-1), lambda done, total, note: None)


# Telling


def _writable(path: Path | None) -> Path | None:
    """Now, and not at the end of a long run."""
    if path is not None and not path.parent.is_dir():
        raise Failed(f"--html {path}: there is no directory {path.parent}; make it first")
    return path


def _tell(wanted: Wanted, records: Sequence[Record], seconds: float) -> None:
    summary = {"kind": wanted.kind, **wanted.about, **sum_up(records, seconds, wanted.slo)}
    if wanted.html is not None:
        from baton.cli.bench.report import page

        command = shlex.join(["baton", *sys.argv[1:]])
        wanted.html.write_text(page(f"baton bench {wanted.kind}", command, summary, records), encoding="utf-8")
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
