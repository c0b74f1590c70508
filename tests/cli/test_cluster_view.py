"""What `baton up` prints: lines for events, a table in a terminal, and log lines of children above it."""

from __future__ import annotations

import asyncio
import io
import os

import pytest
from msgspec.structs import replace
from rich.console import Console

from baton.cli import cluster_table
from baton.cli.cluster_table import LineReader, LiveReporter, Rates, stderr_in_a_pipe, table_of
from baton.cli.cluster_view import PlainReporter
from baton.protocol.control import InstanceReady, InstanceStats, LoadProgress
from baton.protocol.instance import ClusterView, InstanceView

READY = InstanceReady(64, 16, 8, 300, 512)
PREFILL = InstanceView("prefill-0", "prefill", "alive", stats=InstanceStats(blocks_total=64, blocks_held=3, blocks_cached=2))
DECODE = InstanceView("decode-0", "decode", "alive", stats=InstanceStats(running=4, waiting=1, preempted=2, preemptions=7))
COUNTERS = {"handoffs": 5, "replays": 1, "instances_lost": 2, "refused_queue_full": 3}
VIEW = ClusterView("r", "serving", 1, 6, (PREFILL, DECODE), COUNTERS, 0.012)


def plain(**settings) -> PlainReporter:
    return PlainReporter("up", lambda ready, seconds: f"serves {ready.blocks} blocks", drain_seconds=30, **settings)


def test_a_line_for_each_event(capsys):
    reporter = plain()
    reporter.on_progress("prefill-0", LoadProgress(1, 9))
    reporter.on_progress("prefill-0", LoadProgress(2, 9))
    reporter.on_instance_ready("prefill-0")
    reporter.on_view(VIEW)
    reporter.on_ready(READY)
    suspect = replace(DECODE, state="suspect", fault="nothing received for 1.2 s")
    reporter.on_view(replace(VIEW, instances=(PREFILL, suspect)))
    reporter.on_view(VIEW)
    reporter.on_lost("decode-0", "the decode-0 process was killed by SIGKILL")
    reporter.on_view(replace(VIEW, instances=(PREFILL,)))
    reporter.on_view(VIEW)
    reporter.on_stopping()
    reporter.lines.close()
    said = capsys.readouterr()
    assert said.out == "serves 64 blocks\n"
    assert said.err.splitlines() == [
        "baton up: prefill-0 loads the model",
        "baton up: prefill-0 is ready",
        "baton up: decode-0 gets no new requests: nothing received for 1.2 s",
        "baton up: decode-0 is well again",
        "baton up: the decode-0 process was killed by SIGKILL: starting another; its requests go on elsewhere",
        "baton up: decode-0 has left the cluster",
        "baton up: decode-0 has joined the cluster",
        "baton up: draining: running requests have 30 s to finish; Ctrl-C again ends them now",
    ]


def test_quiet_is_quiet(capsys):
    reporter = plain(quiet=True)
    reporter.on_ready(READY)
    reporter.on_lost("decode-0", "gone")
    reporter.on_stopping()
    assert capsys.readouterr() == ("", "")


def drawn(view: ClusterView | None, away: dict[str, str], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table_of(view, away, Rates(), {"decode-0": 3}))
    return console.file.getvalue()


def test_the_table_has_a_row_for_each_instance_joined_or_not():
    text = drawn(VIEW, {"prefill-0": "starting", "prefill-1": "loading 40%", "decode-0": "starting"})
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "3+2 of 64" in rows["prefill-0"]
    assert "loading 40%" in rows["prefill-1"]
    assert rows["decode-0"].split() == ["decode-0", "serving", "4", "3", "0+0", "of", "0", "0", "7", "0", "3"]
    told = " ".join(text.split())
    for words in ("6 requests open, 1 queued", "5 hand-offs (12 ms)", "1 replays", "7 preemptions", "2 instances lost"):
        assert words in told
    assert "tiers" not in text


def test_what_went_to_lower_tiers_is_shown_if_something_did():
    stats = InstanceStats(tiers={"stored": 8, "loaded": 1})
    assert "8 down, 1 up" in drawn(replace(VIEW, instances=(replace(DECODE, stats=stats),)), {}, width=110)


def test_the_table_before_there_is_a_router():
    assert "router: starting" in drawn(None, {"decode-0": "starting"})


def test_rates_are_tokens_per_second(monkeypatch: pytest.MonkeyPatch):
    now = 10.0
    monkeypatch.setattr(cluster_table, "monotonic", lambda: now)
    rates = Rates()

    def told(tokens: int) -> ClusterView:
        return replace(VIEW, instances=(replace(DECODE, stats=InstanceStats(output_tokens=tokens)),))

    rates.take(told(100))
    now = 12.0
    rates.take(told(150))
    assert rates.of("decode-0") == 25.0
    now = 13.0
    rates.take(told(150))
    assert rates.of("decode-0") == 25.0, "numbers come once a second"
    now = 15.0
    rates.take(told(150))
    assert rates.of("decode-0") == 0.0


def test_lines_are_whole_however_they_come():
    reading, writing = os.pipe()
    lines: list[str] = []
    reader = LineReader(reading, lines.append)
    try:
        for piece in (b"one\ntw", b"o\n", b"three"):
            os.write(writing, piece)
            reader.read()
        reader.read()  # nothing is there: nobody waits
        assert lines == ["one", "two"]
    finally:
        os.close(reading)
        os.close(writing)


def test_an_instance_whose_fault_looks_like_markup_does_not_end_the_table():
    for fault in ("no model at [/tmp/x]", "[red]hot"):
        view = ClusterView("r", "serving", instances=(InstanceView("m[/0]", "mixed", "suspect", fault),))
        drawn = io.StringIO()
        Console(width=120, file=drawn).print(table_of(view, {}, Rates(), {}))
        assert "m[/0]" in drawn.getvalue()
        assert f"suspect: {fault}" in drawn.getvalue()


def test_what_children_write_is_printed_above_the_table(capfd):
    """On the terminal that stderr was, which it is again afterwards."""

    async def main() -> None:
        reporter = LiveReporter("up", lambda ready, seconds: "serves", drain_seconds=30, names=["prefill-0", "decode-0"])
        with reporter.drawing():
            os.write(2, b"a line of a child\n")
            await asyncio.sleep(0.01)
            reporter.on_progress("decode-0", LoadProgress(1, 2))
            reporter.on_view(VIEW)
            reporter.on_ready(READY)
            os.write(2, b"last words\n")

    asyncio.run(main())
    os.write(2, b"again\n")
    seen = capfd.readouterr().err
    assert [words for words in ("a line of a child", "serves", "last words", "again") if words not in seen] == []
    assert "prefill-0" in seen


def test_stderr_is_given_back_after_an_error():
    before = os.fstat(2).st_ino

    def fail() -> None:
        with stderr_in_a_pipe():
            assert os.fstat(2).st_ino != before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert os.fstat(2).st_ino == before
