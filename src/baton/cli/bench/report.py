"""A run as one HTML file: figures, and plots as inline SVG. The page fetches nothing, so it can be mailed or archived."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from baton.cli.bench.measures import Record

WIDTH, HEIGHT, LEFT, BELOW = 640, 240, 56, 34

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1340px; margin: 2rem auto; padding: 0 1rem; color: #1c1c1e; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1rem; margin: 0 0 .3rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; }} td, th {{ padding: .2rem .9rem .2rem 0; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }} tr + tr {{ border-top: 1px solid #ddd; }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1.5rem; }} svg {{ max-width: 100%; height: auto; }}
pre {{ white-space: pre-wrap; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #1c1c1e; color: #eee; }} tr + tr {{ border-color: #444; }} }}
</style></head><body>
<h1>{title}</h1>
<pre>{command}</pre>
{tables}
<div class="plots">{plots}</div>
</body></html>
"""


def page(title: str, command: str, summary: dict[str, Any], records: Sequence[Record]) -> str:
    done = [record for record in records if record.ok and record.pieces]
    plots = [
        plot("Time to first token: share of requests", "ms", "%", [(shares([1000 * r.ttft for r in done]), "#2563eb")]),
        plot("Gap between pieces: share of gaps", "ms", "%", [(shares([1000 * g for r in done for g in r.gaps]), "#d97706")]),
        plot("Pieces of text a second", "s", "", [(rate(done), "#059669")]),
        timeline(done),
    ]
    return PAGE.format(title=html.escape(title), command=html.escape(command), tables=_tables(summary), plots="\n".join(plots))


def _tables(summary: dict[str, Any]) -> str:
    plain = {name: value for name, value in summary.items() if isinstance(value, int | float)}
    spreads = {name: value for name, value in summary.items() if isinstance(value, dict) and "p99" in value}
    rows = "".join(
        f"<tr><td>{html.escape(name.replace('_', ' '))}</td><td>{value:,}</td></tr>" for name, value in plain.items()
    )
    columns = list(next(iter(spreads.values()), {}))
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join(
        f"<tr><td>{html.escape(name.removesuffix('_ms').upper())} (ms)</td>"
        + "".join(f"<td>{spread[column]:,.1f}</td>" for column in columns)
        + "</tr>"
        for name, spread in spreads.items()
    )
    return f"<table>{rows}</table><table><tr><th></th>{head}</tr>{body}</table>"


# Points


def shares(values: list[float], points: int = 200) -> list[tuple[float, float]]:
    """Cumulative shares in per cent by value; without the last percent, so that one straggler does not flatten the rest."""
    ordered = sorted(values)
    kept = ordered[: max(1, round(0.99 * len(ordered)))] if ordered else []
    step = max(1, len(kept) // points)
    return [(kept[place], 100.0 * (place + 1) / len(ordered)) for place in range(0, len(kept), step)]


def rate(records: Sequence[Record], bins: int = 60) -> list[tuple[float, float]]:
    moments = [moment for record in records for moment in record.pieces]
    if not moments:
        return []
    width = max(max(moments) / bins, 1e-3)
    counts = [0] * (bins + 1)
    for moment in moments:
        counts[min(bins, int(moment / width))] += 1
    return [((place + 0.5) * width, count / width) for place, count in enumerate(counts[:bins])]


# Drawing


def _frame(title: str, inner: str, right: float, top: float, x_unit: str, y_unit: str, height: int = HEIGHT) -> str:
    marks = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = LEFT + share * (WIDTH - LEFT - 8), height - BELOW - share * (height - BELOW - 8)
        marks.append(f'<text x="{x:.0f}" y="{height - 14}" text-anchor="middle">{right * share:,.4g}</text>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">{top * share:,.4g}</text>')
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884" />')
    marks.append(f'<text x="{WIDTH - 8}" y="{height - 2}" text-anchor="end">{x_unit}</text>')
    marks.append(f'<text x="{LEFT}" y="8" text-anchor="start">{y_unit}</text>')
    return (
        f'<div><h2>{html.escape(title)}</h2><svg width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-size="11" fill="currentColor">{"".join(marks)}{inner}</svg></div>'
    )


def plot(title: str, x_unit: str, y_unit: str, lines: Sequence[tuple[list[tuple[float, float]], str]]) -> str:
    points = [point for line, _ in lines for point in line]
    right, top = max((x for x, _ in points), default=1.0) or 1.0, max((y for _, y in points), default=1.0) or 1.0
    drawn = []
    for line, colour in lines:
        path = " ".join(
            f"{LEFT + x / right * (WIDTH - LEFT - 8):.1f},{HEIGHT - BELOW - y / top * (HEIGHT - BELOW - 8):.1f}"
            for x, y in line
        )
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" />')
    return _frame(title, "".join(drawn), right, top, x_unit, y_unit)


def timeline(records: Sequence[Record], rows: int = 200) -> str:
    """Plot with a line per request: grey until its first token, then green until its end."""
    shown = sorted(records, key=lambda record: record.sent)[:rows]
    right = max((record.ended for record in shown), default=1.0) or 1.0
    height = max(HEIGHT, 3 * len(shown) + BELOW + 8)
    step = (height - BELOW - 8) / max(1, len(shown))

    def at(moment: float) -> float:
        return LEFT + moment / right * (WIDTH - LEFT - 8)

    bars = []
    for place, record in enumerate(shown):
        y, thick = 8 + place * step, max(1.0, 0.7 * step)
        for begin, end, colour in ((record.sent, record.pieces[0], "#9ca3af"), (record.pieces[0], record.ended, "#059669")):
            x, wide = at(begin), max(0.5, at(end) - at(begin))
            bars.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{thick:.1f}" fill="{colour}" />')
    return _frame("Requests: waiting, answered", "".join(bars), right, float(len(shown)), "s", "", height)
