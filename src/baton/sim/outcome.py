"""Outcome of a run."""

from __future__ import annotations

from msgspec import Struct


class Outcome(Struct):
    seed: int
    events: int
    requests: int
    tokens: int
    virtual_seconds: float
    digest: str
    sometimes: dict[str, int]
    invariant: int | None = None
    "The invariant that failed; 0 for an exception of another kind."
    violation: str = ""
    heap_events: int = 0
    faults: list[str] = []
    "Kinds of faults that happened."
