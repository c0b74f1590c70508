"""The goals of the CPU, what was measured, and the tables.

A row of results is one try of one case with one engine:

    {"round": 0, "case": "decode", "engine": "baton-int8", "try": 0, "pressure": 0.02, "foreign": 0.01, "decode": 201.3, ...}

Of the tries of a case in a round the least disturbed one counts, chosen by `foreign` and never by its result. Figures are
medians over the undisturbed rounds, or over all rounds where none was undisturbed (marked ~). A ratio is worked out within
each round, in which the engines took turns, and then the median is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import median
from typing import Any

from measuring.engines import ENGINES, Engine
from measuring.figures import Line, NotMeasured, largest_rise, line_through
from measuring.machine import FOREIGN_MAX

Row = Mapping[str, Any]
Facts = Mapping[str, Any]
RISE_MAX = 0.05
"""Costs that rise by less than this from one size to the next are called equal: so much do two measurements differ."""
FIT_MIN = 0.98
SLOPE_MAX = 2.0


class Results:
    def __init__(
        self, rows: Iterable[Row], limits: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None
    ) -> None:
        self.limits = limits or {}
        self.facts = facts or {}
        "Of engines and the model: kv_bytes_a_token, weight_bytes and multiply_adds by engine."
        chosen: dict[tuple[str, str, int], Row] = {}
        for row in rows:
            key = (row["engine"], row["case"], row["round"])
            if key not in chosen or row["foreign"] < chosen[key]["foreign"]:
                chosen[key] = row
        self._rows = chosen
        self.engines = [engine for name, engine in ENGINES.items() if any(key[0] == name for key in chosen)]

    def by_round(self, engine: str, figure: str) -> dict[int, float]:
        """Of the undisturbed rounds, or of all where there is none."""
        had = {number: row for (name, _, number), row in self._rows.items() if name == engine and figure in row}
        quiet = {number: row for number, row in had.items() if row["foreign"] < FOREIGN_MAX}
        return {number: row[figure] for number, row in (quiet or had).items()}

    def disturbed(self, engine: str, figure: str) -> bool:
        had = [row for (name, _, _), row in self._rows.items() if name == engine and figure in row]
        return bool(had) and all(row["foreign"] >= FOREIGN_MAX for row in had)

    def median(self, engine: str, figure: str) -> float | None:
        found = self.by_round(engine, figure)
        return median(found.values()) if found else None

    def ratio(self, ours: str, theirs: str, figure: str) -> float:
        """The median over rounds that both have; over the medians where they have none in common."""
        mine, other = self.by_round(ours, figure), self.by_round(theirs, figure)
        if not mine or not other:
            raise NotMeasured(f"{figure} of {theirs if mine else ours}")
        common = mine.keys() & other.keys()
        if not common:
            return median(mine.values()) / median(other.values())
        return median(mine[number] / other[number] for number in common)

    def best(self, figure: str, engines: Iterable[Engine], *, most: bool = True) -> str:
        found = {each.name: value for each in engines if (value := self.median(each.name, figure)) is not None}
        if not found:
            raise NotMeasured(figure)
        return (max if most else min)(found, key=found.__getitem__)

    def ours(self) -> list[Engine]:
        return [engine for engine in self.engines if engine.ours]

    def peers(self, bits: int | None = None) -> list[Engine]:
        return [engine for engine in self.engines if not engine.ours and bits in (None, engine.bits)]

    def llamacpp(self, bits: int) -> list[Engine]:
        return [engine for engine in self.peers(bits) if engine.family == "llamacpp"]


@dataclass(frozen=True, slots=True)
class Measured:
    value: float
    how: str
    "Which engines it compares."


@dataclass(frozen=True, slots=True)
class Goal:
    words: str
    bound: float
    at_most: bool
    measure: Callable[[Results], Measured]
    form: str = "{:.3g}x"
    "How bound and value are written."

    def met(self, value: float) -> bool:
        return value <= self.bound if self.at_most else value >= self.bound


def same_bits(figure: str, bits: int, *, most: bool = True) -> Callable[[Results], Measured]:
    def measure(found: Results) -> Measured:
        ours = found.best(figure, [each for each in found.ours() if each.bits == bits], most=most)
        theirs = found.best(figure, found.llamacpp(bits), most=most)
        return Measured(found.ratio(ours, theirs, figure), f"{ours} / {theirs}")

    return measure


def best_of_all(figure: str, *, most: bool = True) -> Callable[[Results], Measured]:
    """Our best engine against the best of all peers, each chosen for this figure."""

    def measure(found: Results) -> Measured:
        ours = found.best(figure, found.ours(), most=most)
        theirs = found.best(figure, found.peers(), most=most)
        return Measured(found.ratio(ours, theirs, figure), f"{ours} / {theirs}")

    return measure


def as_served(offline: str) -> Callable[[Results], Measured]:
    def measure(found: Results) -> Measured:
        ours = found.best("http", found.ours())
        served, alone = found.by_round(ours, "http"), found.by_round(ours, offline)
        common = served.keys() & alone.keys()
        if not common:
            raise NotMeasured(f"{offline} of {ours}")
        return Measured(median(served[number] / alone[number] for number in common), ours)

    return measure


def kept(figure: str) -> Callable[[Results], Measured]:
    """The worst of our engines: a promise for all."""

    def measure(found: Results) -> Measured:
        ours = found.best(figure, found.ours(), most=False)
        value = found.median(ours, figure)
        assert value is not None
        return Measured(value, ours)

    return measure


def ready(found: Results) -> Measured:
    ours = found.best("ready_s", [each for each in found.ours() if each.bits < 32] or found.ours(), most=False)
    theirs = found.best("ready_s", [each for each in found.peers() if each.family == "llamacpp"], most=False)
    mine, other = found.median(ours, "ready_s"), found.median(theirs, "ready_s")
    assert mine is not None
    assert other is not None
    return Measured(mine - other, f"{ours} ({mine:.1f} s) - {theirs} ({other:.1f} s)")


def running(found: Results) -> Measured:
    """The largest rise of the cost of a token when more sequences run, over our quantised engines and both contexts."""
    rises = {}
    for engine in found.ours():
        for curves in found.by_round(engine.name, "growth_running").values():
            for length, points in curves.items():  # type: ignore[attr-defined]
                rises[f"{engine.name}, context {length}"] = largest_rise([cost for _, cost in points])
    if not rises:
        raise NotMeasured("growth_running")
    where = max(rises, key=rises.__getitem__)
    return Measured(rises[where], where)


def context_lines(found: Results) -> dict[str, tuple[Line, float]]:
    """Of each of our engines: µs against context, and the slope in multiples of reading the KV bytes at the machine's speed."""
    speed, kv_bytes = found.limits.get("read_100_mib_gb_s_all"), found.facts.get("kv_bytes_a_token", {})
    lines = {}
    for engine in found.ours():
        for points in found.by_round(engine.name, "growth_context").values():
            line = line_through(points)  # type: ignore[arg-type]
            least = kv_bytes[engine.name] / (speed * 1e3) if speed else nan
            lines[engine.name] = (line, line.slope / least)
    if not lines:
        raise NotMeasured("growth_context")
    return lines


def context_fit(found: Results) -> Measured:
    lines = context_lines(found)
    where = min(lines, key=lambda name: lines[name][0].fit)
    return Measured(lines[where][0].fit, where)


def context_slope(found: Results) -> Measured:
    lines = context_lines(found)
    where = max(lines, key=lambda name: lines[name][1])
    return Measured(lines[where][1], f"{where}: {1000 * lines[where][0].slope:.0f} ns a token of context")


GOALS = (
    Goal("one stream, 4-bit weights, against llama.cpp", 1.5, False, same_bits("decode", 4)),
    Goal("one stream, 8-bit weights, against llama.cpp", 1.5, False, same_bits("decode", 8)),
    Goal("32 requests offline, against the best peer", 3.0, False, best_of_all("batch")),
    Goal("prefill of 1,024, against the best peer", 2.5, False, best_of_all("prefill")),
    Goal("HTTP, output, against the best peer", 3.0, False, best_of_all("http")),
    Goal("HTTP, mean TTFT, against the shortest of a peer", 1 / 3, True, best_of_all("http_ttft_ms", most=False)),
    Goal("HTTP, p99 ITL, against the shortest of a peer", 1.0, True, best_of_all("http_itl_p99_ms", most=False)),
    Goal("HTTP against own offline, as many at once", 0.95, False, as_served("batch_as_served"), "{:.0%}"),
    Goal("HTTP against own offline, all at once", 0.95, False, as_served("batch"), "{:.0%}"),
    Goal("beside a busy neighbour, one stream keeps", 0.5, False, kept("neighbour_decode"), "{:.0%}"),
    Goal("beside a busy neighbour, a batch keeps", 0.5, False, kept("neighbour_batch"), "{:.0%}"),
    Goal("start to ready, longer than llama.cpp by", 2.0, True, ready, "{:.1f} s"),
    Goal("memory, 4-bit weights, against llama.cpp", 1.3, True, same_bits("memory_mib", 4, most=False)),
    Goal("memory, 8-bit weights, against llama.cpp", 1.3, True, same_bits("memory_mib", 8, most=False)),
    Goal("cost of a token from 1 to 64 running, largest rise", RISE_MAX, True, running, "{:.1%}"),
    Goal("cost against context: a straight line", FIT_MIN, False, context_fit, "R² {:.3f}"),
    Goal("cost against context: slope over reading the KV", SLOPE_MAX, True, context_slope),
)

FIGURES = (
    ("decode", "one stream, tok/s", 1),
    ("prefill", "prefill, tok/s", 1),
    ("batch", "offline, output tok/s", 1),
    ("batch_decode", "offline, steps of decoding only, tok/s", 1),
    ("batch_as_served", "offline, as many at once as clients, tok/s", 1),
    ("http", "HTTP, output tok/s", 1),
    ("http_ttft_ms", "HTTP, mean TTFT, ms", 0),
    ("http_itl_ms", "HTTP, mean ITL, ms", 1),
    ("http_itl_p99_ms", "HTTP, p99 ITL, ms", 0),
    ("ready_s", "start to ready, s", 1),
    ("memory_mib", "memory, MiB", 0),
    ("neighbour_decode", "share kept beside a neighbour, one stream", 2),
    ("neighbour_batch", "share kept beside a neighbour, offline", 2),
)


# Tables


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *lines)])


def goals_table(found: Results) -> str:
    lines = []
    for goal in GOALS:
        bound = f"{'<=' if goal.at_most else '>='} {goal.form.format(goal.bound)}"
        try:
            had = goal.measure(found)
        except NotMeasured as why:
            lines.append([goal.words, bound, "-", "not measured", str(why)])
            continue
        lines.append([goal.words, bound, goal.form.format(had.value), "met" if goal.met(had.value) else "**missed**", had.how])
    return markdown(["goal", "bound", "measured", "", "of"], lines)


def figures_table(found: Results) -> str:
    lines = []
    for figure, words, digits in FIGURES:
        values = [found.median(engine.name, figure) for engine in found.engines]
        if any(value is not None for value in values):
            marks = ["~" if found.disturbed(engine.name, figure) else "" for engine in found.engines]
            shown = ["-" if v is None else f"{m}{v:,.{digits}f}" for v, m in zip(values, marks, strict=True)]
            lines.append([words, *shown])
    return markdown(["", *(engine.name for engine in found.engines)], lines)


def limits_table(found: Results) -> str:
    """How near our engines come to what the machine can do at best."""
    reads = [("of reads, 100 MiB", "read_100_mib_gb_s_all"), ("of reads, 1 GiB", "read_1024_mib_gb_s_all")]
    sums = [("of float32", "float32_gflop_s_all"), ("of int8 dot", "int8_gop_s_all"), ("of int8 AMX", "amx_int8_gop_s_all")]
    lines = []
    for engine in found.engines:
        facts = found.facts.get("model", {}).get(engine.name)
        if not facts:
            continue
        for figure, unit, amount, limits in (
            ("decode", "GB/s", facts["weight_bytes"] / 1e9, reads),
            ("prefill", "GOP/s", 2 * facts["layer_weights"] / 1e9, sums),
            ("batch_decode", "GOP/s", 2 * facts["weights"] / 1e9, sums),
        ):
            rate = found.median(engine.name, figure)
            if rate is not None:
                used = rate * amount
                shares = [f"{100 * used / found.limits[key]:.0f} % {words}" for words, key in limits if found.limits.get(key)]
                lines.append([engine.name, figure, f"{used:,.0f} {unit}", ", ".join(shares)])
    return markdown(["engine", "case", "uses", "that is"], lines)


def growth_tables(found: Results) -> str:
    parts = []
    for engine in found.engines:
        for curves in found.by_round(engine.name, "growth_running").values():
            for length, points in curves.items():  # type: ignore[attr-defined]
                cells = [f"{cost:,.0f}" for _, cost in points]
                parts.append(([f"{engine.name}, context {length}", *cells], [str(n) for n, _ in points]))
    tables = [markdown(["µs a token, sequences running", *parts[0][1]], [cells for cells, _ in parts])] if parts else []
    lines, head = [], list[str]()
    for engine in found.engines:
        for points in found.by_round(engine.name, "growth_context").values():
            head = [f"{x:,.0f}" for x, _ in points]  # type: ignore[attr-defined]
            line = line_through(points)  # type: ignore[arg-type]
            costs = [f"{y:,.0f}" for _, y in points]  # type: ignore[attr-defined]
            lines.append([engine.name, *costs, f"{1000 * line.slope:.0f} ns a token, R² {line.fit:.3f}"])
    if lines:
        tables.append(markdown(["µs a token, context", *head, "line"], lines))
    return "\n\n".join(tables)
