"""Latency and throughput figures from recorded times.

TTFT   sent -> first piece of text          TPOT   (last - first piece) / (tokens - 1), one number per request
ITL    gap between consecutive pieces      E2E    sent -> end of the stream
goodput  requests per second that met every bound of the SLO; failed requests meet none
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.cli.say import Failed

SLO_NAMES = ("ttft", "tpot", "itl", "e2e")


@dataclass(slots=True)
class Record:
    """Times and result of one request. Times are seconds after the start of the run."""

    sent: float
    asked_tokens: int
    pieces: list[float] = field(default_factory=list)
    "Arrival time of each piece of text."
    ended: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    "Reason why the answer is incomplete; empty: it is complete."

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def short(self) -> bool:
        """Whether the answer is complete, but with fewer tokens than requested: the server stopped by itself."""
        return self.ok and self.output_tokens < self.asked_tokens

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.sent

    @property
    def tpot(self) -> float | None:
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        return [late - early for early, late in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def e2e(self) -> float:
        return self.ended - self.sent


def percentile(values: Sequence[float], share: float) -> float:
    """Percentile of the values by linear interpolation, as numpy's default."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread_ms(values: Iterable[float]) -> dict[str, float]:
    found = [1000.0 * value for value in values]
    if not found:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}
    shares = {name: round(percentile(found, share), 3) for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}
    return {"mean": round(statistics.fmean(found), 3), **shares, "max": round(max(found), 3)}


# Goodput


def read_slo(text: str) -> dict[str, float]:
    """Bounds in seconds from `ttft:500,itl:50ms,e2e:10s`; plain numbers are milliseconds."""
    bounds = {}
    for part in text.split(","):
        name, colon, bound = (piece.strip() for piece in part.partition(":"))
        unit = 1.0 if bound.endswith("s") and not bound.endswith("ms") else 0.001
        try:
            seconds = float(bound.removesuffix("ms").removesuffix("s")) * unit
        except ValueError:
            seconds = -1.0
        if name not in SLO_NAMES or not colon or seconds <= 0:
            raise Failed(f"--slo {text}: write names of {', '.join(SLO_NAMES)} with a time, like ttft:500ms,itl:50ms")
        bounds[name] = seconds
    return bounds


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Whether the request met every bound. ITL counts by its 99th percentile: one outlier in a long answer is allowed."""
    if not record.ok or not record.pieces:
        return False
    gaps = record.gaps
    had = {
        "ttft": record.ttft,
        "tpot": record.tpot or 0.0,
        "itl": percentile(gaps, 0.99) if gaps else 0.0,
        "e2e": record.e2e,
    }
    return all(had[name] <= bound for name, bound in slo.items())


# Summary


def summarize(records: Sequence[Record], seconds: float, slo: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Compute the figures of a run, as --json prints them and the tables show them."""
    done = [record for record in records if record.ok and record.pieces]
    inputs, outputs = sum(record.input_tokens for record in done), sum(record.output_tokens for record in done)
    summary: dict[str, Any] = {
        "requests": len(records),
        "completed": len(done),
        "failed": len(records) - len(done),
        "short": sum(record.short for record in done),
        "seconds": round(seconds, 4),
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cached_tokens": sum(record.cached_tokens for record in done),
        "requests_per_second": round(len(done) / seconds, 4),
        "output_tokens_per_second": round(outputs / seconds, 3),
        "total_tokens_per_second": round((inputs + outputs) / seconds, 3),
        "ttft_ms": spread_ms(record.ttft for record in done),
        "tpot_ms": spread_ms(value for record in done if (value := record.tpot) is not None),
        "itl_ms": spread_ms(gap for record in done for gap in record.gaps),
        "e2e_ms": spread_ms(record.e2e for record in done),
        "errors": sorted({record.error for record in records if record.error})[:5],
    }
    if slo:
        met = sum(meets(record, slo) for record in records)
        summary["slo_ms"] = {name: round(1000 * bound, 3) for name, bound in slo.items()}
        summary["slo_met"] = met
        summary["goodput_requests_per_second"] = round(met / seconds, 4)
    return summary
