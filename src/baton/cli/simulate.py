"""`baton simulate`: runs the simulator and reports the result.

stdout has the result (text or one JSON object), stderr the bar and errors. Exit codes: 0 no violation, 1 a bug in the core, 2 a
wrong command, 130 Ctrl-C. The simulator is loaded when a run begins, not for `--help`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import TYPE_CHECKING, Annotated

import typer

from baton.cli.simulate_report import bar, print_json, print_mutants, print_outcome, print_summary

if TYPE_CHECKING:
    from baton.sim.campaign import Violation
    from baton.sim.mutants import MutantResult
    from baton.sim.run import Kind
    from baton.sim.scenario import Scenario
    from baton.sim.trace import PerfettoTrace
    from baton.sim.world import Tracer

SEEDS = "0:200"
FOUND, USAGE, INTERRUPTED = 1, 2, 130


HELP = """Rehearse the core in virtual time, with faults, and check every step of it. No GPU is needed.

A seed makes a scenario: clients, sizes, and what goes wrong. The same seed is the same run on any machine, down to the digest.

\b
Examples:
  baton simulate                      seeds 0 to 199, on all cores
  baton simulate --seeds 0:100000     a night's work
  baton simulate --seed 4711          one seed, with its digest
    ... --trace                       and what happened in it
    ... --perfetto t.json             and a picture of it, for ui.perfetto.dev
  baton simulate --shrink found       write small scenarios of findings,
  baton simulate --scenario found/invariant-21-seed-4711.json --trace
                                      and look at one of them
  baton simulate --mutants            would it find a bug?

Exit code 0: no violation and, from 1,000 seeds on, every rare state was reached. 1: otherwise. 2: wrong usage.
"""


class WrongUsage(Exception):
    """The options are wrong; the message is one line that says what to do instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedRange:
    """The options of the command."""

    seeds: str | None
    seed: int | None
    scenario: Path | None
    mutants: bool
    jobs: int | None
    as_json: bool
    trace: bool
    perfetto: Path | None
    shrink: Path | None
    kind: Kind = "instance"

    @property
    def option(self) -> str:
        return "" if self.kind == "instance" else f"--{self.kind} "


def simulate(
    seeds: Annotated[str | None, typer.Option(metavar="A:B", help=f"Seeds A to B - 1.  \\[default: {SEEDS}]")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Run this one seed.")] = None,
    scenario: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run this scenario (JSON), as --shrink writes it.")
    ] = None,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Clusters: routers, prefill and decode instances. Seeds of their own.")
    ] = False,
    front: Annotated[
        bool, typer.Option("--front", help="`baton serve`: one engine behind its front. Seeds of their own.")
    ] = False,
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Plant known bugs, one at a time, and report whether each is found.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of processes.  \\[default: one per core]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event, one column per actor. One run only.")] = False,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev. One run only.")
    ] = None,
    shrink: Annotated[
        Path | None, typer.Option(metavar="DIR", help="On a violation: write the smallest scenario that shows it.")
    ] = None,
) -> None:
    if cluster and front:
        typer.echo("baton simulate: --cluster and --front contradict each other: give one of them", err=True)
        raise typer.Exit(USAGE)
    kind: Kind = "cluster" if cluster else "front" if front else "instance"
    order = SeedRange(
        seeds=seeds, seed=seed, scenario=scenario, mutants=mutants, jobs=jobs,
        as_json=as_json, trace=trace, perfetto=perfetto, shrink=shrink, kind=kind,
    )  # fmt: skip
    raise typer.Exit(_run_command(order))


def _run_command(order: SeedRange) -> int:
    try:
        _check(order)
        if order.mutants:
            return _mutants(order)
        return _campaign(order) if _runs_many_seeds(order) else _one_run(order)
    except WrongUsage as wrong:
        typer.echo(f"baton simulate: {wrong}", err=True)
        return USAGE
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        return INTERRUPTED


# Checking options


def _runs_many_seeds(order: SeedRange) -> bool:
    return order.seed is None and order.scenario is None


def _check(order: SeedRange) -> None:
    """Checks everything that can be checked without a run. Raises WrongUsage."""
    given = [name for name, value in (("--seed", order.seed), ("--seeds", order.seeds), ("--scenario", order.scenario))
             if value is not None]  # fmt: skip
    if len(given) > 1:
        raise WrongUsage(f"{' and '.join(given)} contradict each other: give one of them")
    one_run = "--trace" if order.trace else "--perfetto" if order.perfetto is not None else None
    if order.mutants:
        for other in (*given, one_run, "--shrink" if order.shrink is not None else None):
            if other not in (None, "--seeds"):
                raise WrongUsage(f"--mutants runs many seeds of many programs: leave out {other}")
    elif one_run is not None and _runs_many_seeds(order):
        raise WrongUsage(f"{one_run} shows one run: add --seed N or --scenario FILE")
    if order.trace and order.as_json:
        raise WrongUsage("--trace prints text and --json prints JSON: leave out one (--perfetto FILE goes with --json)")
    if order.perfetto is not None and not order.perfetto.parent.is_dir():
        raise WrongUsage(f"--perfetto {order.perfetto}: there is no directory {order.perfetto.parent}: make it first")
    if order.shrink is not None:
        try:
            order.shrink.mkdir(parents=True, exist_ok=True)  # before a long run, not after
        except OSError as error:
            raise WrongUsage(f"--shrink {order.shrink}: cannot be made ({error.strerror}): give another directory")


def read_range(text: str) -> range:
    """Reads a range of seeds, A:B as in Python: B is exclusive."""
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal()):
        raise WrongUsage(f"--seeds {text}: write A:B, two whole numbers, like --seeds {SEEDS} (for one seed: --seed N)")
    if int(first) >= int(last):
        raise WrongUsage(f"--seeds {text}: no seed is in there: A must be less than B")
    return range(int(first), int(last))


def read_scenario(path: Path) -> Scenario:
    """Reads and validates the whole scenario before it runs. Raises WrongUsage."""
    import msgspec

    from baton.errors import InvalidConfig
    from baton.protocol.request import GenerateRequest
    from baton.sim.scenario import Scenario

    try:
        scenario = Scenario.load(path)
        for number in range(len(scenario.cluster.instances)) if scenario.cluster is not None else ():
            scenario.of_instance(number).config()
        if scenario.cluster is None:
            scenario.config()
        for client in scenario.clients:  # a wire would validate the scenario
            msgspec.convert(msgspec.to_builtins(client.request()), GenerateRequest)
    except OSError as error:
        raise WrongUsage(f"--scenario {path}: cannot be read ({error.strerror}): give a file that --shrink wrote")
    except msgspec.DecodeError as error:
        raise WrongUsage(f"--scenario {path}: is no scenario ({error}): correct the file")
    except InvalidConfig as error:
        raise WrongUsage(f"--scenario {path}: cannot be run ({error}): correct the file")
    if len({client.id for client in scenario.clients}) < len(scenario.clients):
        raise WrongUsage(f"--scenario {path}: two clients have one id: correct the file")
    return scenario


# Many seeds


def _campaign(order: SeedRange) -> int:
    from baton.sim.campaign import cores, run_campaign

    seeds = read_range(order.seeds or SEEDS)
    with bar("seeds", len(seeds), hidden=order.as_json) as advance:
        campaign = run_campaign(
            seeds, order.jobs or cores(), lambda done, found: advance(done, f"{found} violations"), order.kind
        )
    if order.as_json:
        print_json(campaign)
    else:
        print_summary(campaign, order.option)
    if campaign.interrupted:
        typer.echo(f"interrupted after {campaign.seeds:,} of {len(seeds):,} seeds", err=True)
        return INTERRUPTED
    _shrink_seeds(order, campaign.violations)
    return 0 if campaign.ok else FOUND


# One run


def _one_run(order: SeedRange) -> int:
    from baton.sim.campaign import part_of, violations_of
    from baton.sim.run import kind_of, run

    scenario = _scenario(order)
    if scenario.cluster is not None and order.perfetto is not None:
        raise WrongUsage("--perfetto draws a plain instance: use --trace for a cluster or a front")
    tracer, picture = _tracers(order, cluster=scenario.cluster is not None)
    begin = process_time()
    outcome = run(scenario, tracer)
    seconds = process_time() - begin
    if picture is not None and order.perfetto is not None:
        picture.save(order.perfetto, outcome)
    if order.as_json:
        print_json(part_of(outcome, seconds, kind_of(scenario)).campaign(seconds, jobs=1))
    else:
        what = f"seed {order.seed}" if order.seed is not None else f"scenario {order.scenario}"
        again = f"{order.option}--seed {order.seed}" if order.seed is not None else f"--scenario {order.scenario}"
        print_outcome(outcome, what, again, order.perfetto)
    _shrink(order, scenario, violations_of(outcome))
    return 0 if outcome.invariant is None else FOUND


def _scenario(order: SeedRange) -> Scenario:
    from baton.sim.run import make

    if order.scenario is not None:
        return read_scenario(order.scenario)
    assert order.seed is not None
    return make(order.seed, order.kind)


def _tracers(order: SeedRange, *, cluster: bool) -> tuple[Tracer | None, PerfettoTrace | None]:
    """The tracer of the run, and the part of it to save afterwards."""
    from baton.sim.trace import ColumnTrace, LineTrace, PerfettoTrace, Tee

    picture = PerfettoTrace() if order.perfetto is not None else None
    if not order.trace:
        return picture, picture
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the run
    columns = LineTrace(typer.echo) if cluster else ColumnTrace(typer.echo)
    return (columns if picture is None else Tee([columns, picture])), picture


# Shrinking


def _shrink_seeds(order: SeedRange, violations: Sequence[Violation]) -> None:
    """Shrinks the first seed of each invariant: many seeds often show the same bug."""
    from baton.sim.run import make

    for violation in {violation.invariant: violation for violation in reversed(violations)}.values():
        _shrink(order, make(violation.seed, order.kind), [violation])


def _shrink(order: SeedRange, scenario: Scenario, violations: Sequence[Violation]) -> None:
    """Writes each violation as a small scenario file, if requested."""
    if order.shrink is None or not violations:
        return
    from baton.sim.shrink import shrink

    for violation in violations:
        kind = "" if scenario.cluster is None else "front-" if scenario.cluster.front else "cluster-"
        name = f"{kind}invariant-{violation.invariant}-seed-{violation.seed}"
        small = shrink(scenario, violation.invariant, lambda text, name=name: typer.echo(f"{name}: {text}", err=True))  # type: ignore[misc]
        small.fails = None  # only for kept mutants: this scenario must pass once the bug is fixed
        small.note = f"seed {violation.seed}: {violation.message}"
        path = order.shrink / f"{name}.json"
        small.save(path)
        typer.echo(f"shrunk: {path}  (baton simulate --scenario {path} --trace)", err=True)


# Mutants


def _mutants(order: SeedRange) -> int:
    """Every mutant must be found by some seed; a survivor is a gap in the simulator."""
    from baton.sim.campaign import cores
    from baton.sim.mutants import SEEDS, NoMutants, mutants, run_mutants

    try:
        names = [mutant.name for mutant in mutants()]
    except NoMutants as missing:
        raise WrongUsage(f"--mutants: {missing}")
    seeds = range(SEEDS) if order.seeds is None else read_range(order.seeds)
    if seeds.start:
        raise WrongUsage(f"--seeds {order.seeds}: mutants begin at seed 0: write --seeds 0:{seeds.stop}")
    done = 0

    def progress(result: MutantResult) -> None:
        nonlocal done
        done += 1
        advance(done, result.name)

    with bar("mutants", len(names), hidden=order.as_json) as advance:
        results = run_mutants(names, seeds.stop, order.jobs or cores(), progress)
    survivors = [result.name for result in results if result.killed_by_seed is None]
    if order.as_json:
        print_json({"mutants": results, "survivors": survivors})
    else:
        print_mutants(results, survivors)
    return FOUND if survivors else 0
