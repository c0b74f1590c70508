"""Traces of a run: as text in columns, and as a file for Perfetto."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import wrap

import msgspec

from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence as Answer
from baton.protocol.ids import RequestId
from baton.protocol.step import StepPlan
from baton.sim.simulated_request import SimulatedRequest
from baton.sim.world import Outcome, PlainWorld, Tracer


class Tee:
    """Several tracers as one."""

    def __init__(self, tracers: Sequence[Tracer]) -> None:
        self._tracers = tracers

    def note(self, now: float, actor: str, text: str) -> None:
        for tracer in self._tracers:
            tracer.note(now, actor, text)

    def after(self, now: float, world: PlainWorld) -> None:
        for tracer in self._tracers:
            tracer.after(now, world)


def sequences_of(world: PlainWorld, client_request: SimulatedRequest) -> list[Answer]:
    """The request's sequences: the watch learns them after the event that brought the request, the instance has them during
    it."""
    if client_request.sequences:
        return client_request.sequences
    present = world.watch.requests[client_request.client.id] is client_request
    return world.machine.view.sequences(RequestId(client_request.client.id)) if present else []


def is_over(client_request: SimulatedRequest) -> bool:
    """Whether the request is answered and its sequences hold nothing."""
    if client_request.refused is not None:
        return True
    return (
        client_request.submitted
        and None not in client_request.ended
        and all(answer.phase is Phase.DONE for answer in client_request.sequences)
    )


class OpenRequests:
    """The requests that can still change, so that the cost of an event does not grow with the length of the run."""

    def __init__(self) -> None:
        self._live: list[SimulatedRequest] = []
        self._seen = 0

    def live(self, world: PlainWorld) -> Iterator[SimulatedRequest]:
        """Submitted requests; an ended request is shown one last time."""
        client_requests = world.watch.all_requests
        live = (
            self._live + client_requests[self._seen :] if len(client_requests) > self._seen else self._live
        )  # new requests are last
        self._seen = len(client_requests)
        for client_request in live:
            if client_request.submitted:
                yield client_request
        self._live = [client_request for client_request in live if not is_over(client_request)]


class LineTrace:
    """Text trace with a line per note: time, actor, text. For a cluster, which has more actors than a line has columns."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def note(self, now: float, actor: str, text: str) -> None:
        self._write(f"{now:{TIME_WIDTH}.6f} | {actor:10} | {text}")

    def after(self, now: float, world: PlainWorld) -> None:
        """Never called: the world of a cluster is no `PlainWorld`."""


# Columns

TIME_WIDTH = 11
WIDTHS = {"client": 30, "instance": 38, "worker": 26, "cache": 22, "world": 16}


class ColumnTrace:
    """time | client | instance | worker | cache | world, in 158 columns. Changes of phase appear in the instance's column."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        """`write` gets each line as it comes; without it they are collected in `lines`."""
        self.lines: list[str] = []
        self._write = write or self.lines.append
        self._phases: dict[Answer, Phase] = {}
        self._live_requests = OpenRequests()
        self._row("time", {actor: actor for actor in WIDTHS})
        self._write("-|-".join(["-" * TIME_WIDTH, *("-" * width for width in WIDTHS.values())]))

    def note(self, now: float, actor: str, text: str) -> None:
        """Write the text; a long text continues below, without a time."""
        time = f"{now:{TIME_WIDTH}.6f}"
        for part in wrap(text, WIDTHS[actor]) or [""]:
            self._row(time, {actor: part})
            time = ""

    def after(self, now: float, world: PlainWorld) -> None:
        changes: list[str] = []
        for client_request in self._live_requests.live(world):
            for answer in sequences_of(world, client_request):
                before = self._phases.get(answer)
                if before is not answer.phase:
                    self._phases[answer] = answer.phase
                    came = "is" if before is None else f"{before.value} ->"
                    changes.append(f"{client_request.name}.{answer.index} {came} {answer.phase.value}")
        if changes:
            self.note(now, "instance", ", ".join(changes))

    def _row(self, time: str, cells: dict[str, str]) -> None:
        columns = [time.rjust(TIME_WIDTH), *(cells.get(actor, "").ljust(width) for actor, width in WIDTHS.items())]
        self._write(" | ".join(columns).rstrip())


# Perfetto

Track = tuple[int, int]
"""Track: (pid, tid). Perfetto groups tracks by 'process'. A tid is used once in all of them, as on a real machine."""

_INSTANCE, _REQUESTS = 1, 2
_MODE: Track = (_INSTANCE, 11)
_WORKER: Track = (_INSTANCE, 12)
_STEPS: Track = (_INSTANCE, 13)
_WORLD: Track = (_INSTANCE, 14)
_FIRST_SEQUENCE = 101


class _Row:
    """A sequence's track, and the part of it that is drawn."""

    __slots__ = ("ended", "tokens", "track")

    def __init__(self, track: Track) -> None:
        self.track = track
        self.tokens = 0
        self.ended = False


class PerfettoTrace:
    """Tracks: the instance's mode, the worker's life, its steps, the faults; then one per sequence, with a slice per phase.

    All times are whole microseconds of virtual time, rounded before durations are taken: what touches in the run touches in
    the picture, and nothing overlaps.
    """

    def __init__(self) -> None:
        self._events: list[dict[str, object]] = []
        self._open: dict[Track, tuple[str, int]] = {}
        self._rows: dict[str, list[_Row]] = {}
        self._live_requests = OpenRequests()
        self._plans: dict[int, tuple[StepPlan, int]] = {}
        "Plans in flight, and when each was handed over."
        self._steps_end = 0
        self._counters: dict[str, dict[str, int]] = {}
        self._now = 0
        self._name_process(_INSTANCE, "instance")
        self._name_process(_REQUESTS, "requests")
        for track, name in ((_MODE, "mode"), (_WORKER, "worker"), (_STEPS, "steps"), (_WORLD, "world")):
            self._name_track(track, name)

    # Tracer

    def note(self, now: float, actor: str, text: str) -> None:
        """Draw faults and the worker's notes. Other facts are read from the world as data."""
        self._now = _micros(now)
        if actor == "world":
            self._instant(_WORLD, text)
        elif actor == "worker" and not text.startswith("result "):
            self._instant(_WORKER, text)

    def after(self, now: float, world: PlainWorld) -> None:
        self._now = _micros(now)
        instance = world.machine
        self._switch(_MODE, instance.mode.value)
        self._switch(_WORKER, f"epoch {instance.worker.epoch}: {instance.worker.state.value}")
        self._record_steps(world)
        for client_request in self._live_requests.live(world):
            self._record_request(world, client_request)
        load = instance.view.load()
        self._count("blocks", {"free": load.blocks_free, "cached": load.blocks_idle, "held": load.blocks_held})
        self._count("sequences", {"running": load.running, "waiting": load.waiting})

    # The file

    def encode(self, outcome: Outcome | None = None) -> bytes:
        """The trace as JSON. Open slices end now; a violation appears on the world's track, where the run stopped."""
        if outcome is not None:
            self._now = max(self._now, _micros(outcome.virtual_seconds))
            if outcome.invariant is not None:
                self._instant(_WORLD, f"violation: {outcome.violation}", scope="g")
        for track in list(self._open):
            self._switch(track, None)
        for step in list(self._plans):
            self._end_step(step, "unfinished")
        other = {} if outcome is None else {"seed": outcome.seed, "digest": outcome.digest}
        return msgspec.json.encode({"displayTimeUnit": "ms", "otherData": other, "traceEvents": self._events})

    def save(self, path: Path, outcome: Outcome | None = None) -> None:
        path.write_bytes(self.encode(outcome))

    # The worker's steps

    def _record_steps(self, world: PlainWorld) -> None:
        """Draw the steps. A plan that has left the pipeline was absorbed, or its worker is dead: then a newer epoch has
        begun."""
        in_flight = {plan.step: plan for plan in world.machine.view.plans()}
        for step in [step for step in self._plans if step not in in_flight]:
            lost = self._plans[step][0].epoch != world.machine.worker.epoch
            self._end_step(step, "lost" if lost else "absorbed")
        for step, plan in in_flight.items():
            self._plans.setdefault(step, (plan, self._now))

    def _end_step(self, step: int, outcome: str) -> None:
        """Draw a step. The worker does one at a time: it began when it was sent, or at the end of the one before."""
        plan, handed_over = self._plans.pop(step)
        begin, self._steps_end = max(handed_over, self._steps_end), self._now
        about = {
            "outcome": outcome,
            "epoch": plan.epoch,
            "tokens": plan.tokens,
            "sequences": len(plan.run.slots),
            "new": len(plan.new),
            "drops": len(plan.drops),
        }
        name = f"step {step}" if outcome == "absorbed" else f"step {step} ({outcome})"
        self._slice(_STEPS, name, begin, about)

    # Requests

    def _record_request(self, world: PlainWorld, client_request: SimulatedRequest) -> None:
        rows = self._rows_of(client_request)
        for answer in sequences_of(world, client_request):
            self._switch(rows[answer.index].track, None if answer.phase is Phase.DONE else answer.phase.value)
        for row, delivered, ended in zip(rows, client_request.delivered, client_request.ended, strict=True):
            for token in delivered[row.tokens :]:
                self._instant(row.track, f"token {token}")
            row.tokens = len(delivered)
            end = ended or client_request.refused
            if end is not None and not row.ended:
                row.ended = True
                self._instant(row.track, f"refused: {end}" if client_request.refused else f"ends: {end}")

    def _rows_of(self, client_request: SimulatedRequest) -> list[_Row]:
        """The tracks of a request, numbered in the order of submission."""
        name = client_request.name
        if name not in self._rows:
            first = _FIRST_SEQUENCE + sum(len(rows) for rows in self._rows.values())
            self._rows[name] = [_Row((_REQUESTS, first + index)) for index in range(client_request.client.n)]
            for index, row in enumerate(self._rows[name]):
                self._name_track(row.track, f"{name}.{index}")
        return self._rows[name]

    # Events

    def _switch(self, track: Track, name: str | None) -> None:
        """Begin a slice of this state on the track, and end the one before. None: only end it."""
        before = self._open.get(track)
        if (before and before[0]) == name:
            return
        if before is not None:
            del self._open[track]
            self._slice(track, before[0], before[1])
        if name is not None:
            self._open[track] = (name, self._now)

    def _slice(self, track: Track, name: str, begin: int, about: dict[str, object] | None = None) -> None:
        self._add("X", track, name, ts=begin, dur=self._now - begin, args=about or {})

    def _instant(self, track: Track, name: str, scope: str = "t") -> None:
        self._add("i", track, name, ts=self._now, s=scope)

    def _count(self, name: str, values: dict[str, int]) -> None:
        if self._counters.get(name) != values:
            self._counters[name] = values
            self._add("C", (_INSTANCE, None), name, ts=self._now, args=values)

    def _name_process(self, pid: int, name: str) -> None:
        self._add("M", (pid, None), "process_name", args={"name": name})
        self._add("M", (pid, None), "process_sort_index", args={"sort_index": pid})

    def _name_track(self, track: Track, name: str) -> None:
        self._add("M", track, "thread_name", args={"name": name})
        self._add("M", track, "thread_sort_index", args={"sort_index": track[1]})

    def _add(self, ph: str, track: tuple[int, int | None], name: str, **rest: object) -> None:
        """Add an event to the trace. Counters and names of processes have no tid."""
        pid, tid = track
        self._events.append({"ph": ph, "pid": pid, **({} if tid is None else {"tid": tid}), "name": name, **rest})


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
