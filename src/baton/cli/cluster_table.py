"""`baton up` in a terminal: a live table, with log lines above it.

Child processes inherit a pipe as stderr, and this process prints their lines above the table: two writers would corrupt the
terminal.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from time import monotonic
from typing import TYPE_CHECKING, TextIO, cast

from baton.cli.cluster_view import PlainReporter, summary_text
from baton.observe.line_writer import LineWriter

if TYPE_CHECKING:
    from rich.table import Table

    from baton.protocol.control import InstanceReady, LoadProgress
    from baton.protocol.instance import ClusterView, InstanceView


class LiveReporter(PlainReporter):
    """PlainReporter's lines above a live table. Must be used inside `with reporter.drawing()`."""

    def __init__(
        self,
        command: str,
        ready_text: Callable[[InstanceReady, float], str],
        *,
        drain_seconds: float,
        names: Sequence[str],
    ) -> None:
        super().__init__(command, ready_text, drain_seconds=drain_seconds)
        self._names = names
        self._rates = Rates()
        self._restarts = dict.fromkeys((*names, "router"), 0)
        self._progress: dict[str, str] = {}
        self._view: ClusterView | None = None
        self._print: Callable[[str], None] = print
        self._draw: Callable[[Table], None] = lambda table: None

    def say(self, text: str) -> None:
        self._print(f"baton {self._command}: {text}")

    def show(self, text: str) -> None:
        self._print(text)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draws the table within the block, which must be entered on the loop that reads the children's output."""
        from rich.console import Console
        from rich.live import Live

        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            pipe, terminal = stack.enter_context(stderr_in_a_pipe())
            writer = stack.enter_context(closing(LineWriter()))
            console = Console(file=cast(TextIO, TerminalWriter(terminal, writer)), highlight=False)
            live = stack.enter_context(Live(console=console, auto_refresh=False))
            self._print = lambda text: console.print(text, markup=False, soft_wrap=True)
            self._draw = lambda table: live.update(table, refresh=True)
            lines = LineReader(pipe, self._print)
            loop.add_reader(pipe, lines.read)
            stack.callback(lines.read)  # the last lines
            stack.callback(loop.remove_reader, pipe)
            self._draw_again()
            yield

    def on_progress(self, name: str, progress: LoadProgress) -> None:
        if progress.stage:
            super().on_progress(name, progress)
        share = f"loading {progress.done / max(progress.total, 1):.0%}"
        self._progress[name] = progress.stage.partition(" ")[0] or share
        self._draw_again()

    def on_instance_ready(self, name: str) -> None:
        self._progress.pop(name, None)

    def on_lost(self, name: str, why: str) -> None:
        super().on_lost(name, why)
        self._progress.pop(name, None)
        self._restarts[name] = self._restarts.get(name, 0) + 1

    def print_summary(self, view: ClusterView) -> None:
        """Redraws the table, which has the summary below it."""
        self._rates.take(view)
        self._view = view
        self._draw_again()

    def _draw_again(self) -> None:
        away = {name: self._progress.get(name, "starting") for name in self._names}
        self._draw(table_of(self._view, away, self._rates, self._restarts))


class TerminalWriter(io.TextIOBase):
    """A terminal that is written by a thread: a stopped terminal (Ctrl-S) does not block the cluster."""

    def __init__(self, terminal: TextIO, writer: LineWriter) -> None:
        self._terminal = terminal
        self._writer = writer

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property above, too, and mypy thinks not
        return self._terminal.encoding

    def write(self, text: str) -> int:
        self._writer.put(self._terminal, text)
        return len(text)

    def isatty(self) -> bool:
        return self._terminal.isatty()

    def fileno(self) -> int:
        return self._terminal.fileno()


class LineReader:
    """Splits the bytes of a pipe into lines, and never blocks."""

    def __init__(self, fd: int, take: Callable[[str], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._take = take
        self._rest = b""

    def read(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))


@contextmanager
def stderr_in_a_pipe() -> Iterator[tuple[int, TextIO]]:
    """Replaces stderr by a pipe: (the pipe's read end, the terminal). Output of this process and its children goes to the
    pipe."""
    terminal = os.dup(2)
    reading, writing = os.pipe()
    os.dup2(writing, 2)
    os.close(writing)
    shown = os.fdopen(terminal, "w", encoding="utf-8")
    try:
        yield reading, shown
    finally:
        shown.flush()
        os.dup2(terminal, 2)
        os.close(reading)
        shown.close()


class Rates:
    """Tokens per second of each instance, from its last two reports."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, int, float]] = {}

    def take(self, view: ClusterView) -> None:
        now = monotonic()
        for instance in view.instances:
            tokens = instance.stats.output_tokens
            at, before, rate = self._seen.get(instance.name, (now, tokens, 0.0))
            if tokens != before or now - at > 2.0:
                rate = max(0, tokens - before) / (now - at) if now > at else 0.0
                self._seen[instance.name] = (now, tokens, rate)
            elif instance.name not in self._seen:
                self._seen[instance.name] = (now, tokens, 0.0)

    def of(self, name: str) -> float:
        return self._seen.get(name, (0.0, 0, 0.0))[2]


TITLES = ("instance", "state", "run", "wait", "KV blocks", "tok/s", "preempt", "lost", "restarts")
"""Legend. lost: workers. KV blocks: held + cached of all blocks."""
TIERS = "tiers"


def table_of(view: ClusterView | None, away: dict[str, str], rates: Rates, restarts: dict[str, int]) -> Table:
    """A row per instance, and the router's figures below. `away`: states of instances that have not joined. Fits 80 columns,
    without tiers."""
    from rich.table import Table
    from rich.text import Text

    there = {} if view is None else {instance.name: instance for instance in view.instances}
    tiers = any(instance.stats.tiers.get(way) for instance in there.values() for way in ("stored", "loaded"))
    caption = "router: starting" if view is None else f"router: {view.mode}; {summary_text(view)}"
    table = Table(caption=caption, caption_justify="left", box=None, pad_edge=False)
    for title in (*TITLES, *([TIERS] if tiers else [])):
        table.add_column(title, justify="left" if title in ("instance", "state", TIERS) else "right", no_wrap=True)
    for name in dict.fromkeys((*away, *there)):
        instance = there.get(name)
        cells = [name, away[name], *[""] * 6] if instance is None else _cells(instance, rates)
        moved = "" if instance is None else _tiers_text(instance)
        name_and_state = [Text(cell) for cell in cells[:2]]  # no markup: they are the words of an instance
        table.add_row(*name_and_state, *cells[2:], str(restarts.get(name, 0)), *([moved] if tiers else []))
    return table


def _cells(instance: InstanceView, rates: Rates) -> list[str]:
    stats = instance.stats
    return [
        instance.name,
        stats.mode if instance.state == "alive" else f"{instance.state}: {instance.fault[:30]}",
        str(stats.running),
        str(stats.waiting + stats.preempted),
        f"{stats.blocks_held}+{stats.blocks_cached} of {stats.blocks_total}",
        f"{rates.of(instance.name):.0f}",
        str(stats.preemptions),
        str(stats.worker_losses),
    ]


def _tiers_text(instance: InstanceView) -> str:
    moved = instance.stats.tiers
    return f"{moved.get('stored', 0)} down, {moved.get('loaded', 0)} up" if moved else ""
