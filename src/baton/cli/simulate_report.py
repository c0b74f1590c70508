"""Output of `baton simulate`: summaries and tables on stdout, or one JSON object; a bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from baton.sim.campaign import Campaign
    from baton.sim.mutants import MutantResult
    from baton.sim.world import Outcome

SHOWN = 20
"""Maximum of violations that the summary lists."""


def print_summary(campaign: Campaign, options: str) -> None:
    typer.echo(f"seeds      {campaign.seeds:,} in {campaign.seconds:.1f} s with {campaign.jobs} jobs")
    typer.echo(f"requests   {campaign.requests:,}")
    rate = f"{campaign.events_per_second:,.0f} per second and core"
    typer.echo(f"events     {campaign.events:,} counted ({rate}), {campaign.heap_events:,} on the heap")
    typer.echo(f"tokens     {campaign.tokens:,} in {campaign.virtual_seconds:,.0f} virtual seconds")
    typer.echo(f"digest     {campaign.digest}")
    typer.echo(f"violations {len(campaign.violations)}")
    for violation in campaign.violations[:SHOWN]:
        typer.echo(f"  seed {violation.seed}: {violation.message}")
        typer.echo(f"    replay: baton simulate {options}--seed {violation.seed} --trace")
    if len(campaign.violations) > SHOWN:
        typer.echo(f"  ... and {len(campaign.violations) - SHOWN} more (--json tells all)")
    _print_sometimes(campaign)
    _print_pairs(campaign)


def _print_pairs(campaign: Campaign) -> None:
    never = campaign.pairs_missing
    typer.echo(f"pairs of faults: {campaign.pairs:,} met in one run, {len(never):,} never")
    for pair in never[:SHOWN]:
        typer.echo(f"  {pair}")
    if len(never) > SHOWN:
        typer.echo(f"  ... and {len(never) - SHOWN} more (--json lists all)")
    if never and campaign.seeds >= campaign.pair_seeds:
        typer.echo(f"FAILED: {len(never):,} pairs of faults never met in {campaign.seeds:,} seeds")


def _print_sometimes(campaign: Campaign) -> None:
    """Rare states and the number of seeds that reached them; unreached ones are marked."""
    from rich.table import Table
    from rich.text import Text

    from baton.sim.campaign import LARGE

    table = Table("state", "seeds", "share", title="Rare states", title_justify="left", box=None, pad_edge=False)
    table.columns[1].justify = table.columns[2].justify = "right"
    for name, seeds in campaign.sometimes.items():
        style = "yellow" if name in campaign.missing else ""
        share = f"{100 * seeds / max(1, campaign.seeds):.1f} %"
        table.add_row(Text(name, style), Text(f"{seeds:,}", style), Text(share, style))
    _console().print(table)
    if campaign.missing and campaign.seeds >= LARGE:
        typer.echo(f"FAILED: reached in less than 0.1 % of the seeds: {'; '.join(campaign.missing)}")
    elif campaign.missing:
        typer.echo(f"not reached (no failure below {LARGE:,} seeds): {'; '.join(campaign.missing)}")


def print_outcome(outcome: Outcome, what: str, again: str, perfetto: Path | None) -> None:
    """Prints one run. `what`: its description; `again`: the options that reproduce it."""
    typer.echo(f"{what}: {'ok' if outcome.invariant is None else 'VIOLATION'}")
    typer.echo(f"requests   {outcome.requests:,}")
    typer.echo(f"events     {outcome.events:,} counted, {outcome.heap_events:,} on the heap")
    typer.echo(f"tokens     {outcome.tokens:,} in {outcome.virtual_seconds:.3f} virtual seconds")
    typer.echo(f"digest     {outcome.digest}")
    typer.echo(f"reached    {'; '.join(sorted(outcome.sometimes))}")
    if perfetto is not None:
        typer.echo(f"trace      {perfetto} (open it in https://ui.perfetto.dev)")
    if outcome.invariant is not None:
        typer.echo(f"violation  {outcome.violation}")
        typer.echo(f"  replay: baton simulate {again} --trace")


def print_mutants(results: Sequence[MutantResult], survivors: Sequence[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("mutant", "file", "fault", "killed by", "invariant", box=None, pad_edge=False)
    for result in results:
        killed = "SURVIVED" if result.killed_by_seed is None else f"seed {result.killed_by_seed}"
        style = "bold red" if result.killed_by_seed is None else ""
        cells = (result.name, result.file, result.fault, killed, "" if result.invariant is None else str(result.invariant))
        table.add_row(*(Text(cell, style) for cell in cells))
    _console().print(table)
    typer.echo(f"{len(results) - len(survivors)} of {len(results)} mutants killed")
    if survivors:
        typer.echo(f"FAILED: nothing found {', '.join(survivors)}: the simulator lacks a check or a scenario")


def print_json(answer: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


def _console() -> Console:
    """A console for tables. A pipe has no width; it gets one that breaks no line."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160)


@contextmanager
def bar(what: str, total: int, *, hidden: bool) -> Iterator[Callable[[int, str], None]]:
    """A bar on stderr, only on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console: Console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as progress:
        task = progress.add_task(what, total=total, note="")
        yield lambda done, note: progress.update(task, completed=done, note=note)
