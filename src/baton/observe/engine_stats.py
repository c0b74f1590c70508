"""A snapshot of an engine's numbers: made by the runtime from the core's Stats, read by metrics and health."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class EngineStats(Struct, kw_only=True):
    """Gauges are of this moment; the others are counters since the engine began, and never fall."""

    mode: Literal["serving", "draining", "paused"] = "serving"
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    "Sequences that lost their blocks and wait for their turn again."
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    "Not referenced by any request; kept for their content."
    blocks_held: int = 0

    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    folded_blocks: int = 0
    stale_rows: int = 0
    stale_results: int = 0
    worker_losses: int = 0
    crash_ends: int = 0
    ended: dict[str, int] = {}
    "By FinishReason."
    refused: dict[str, int] = {}
    "By RefusalReason."
    held_back: dict[str, int] = {}
    "Steps in which the head of the line did not fit, by what was short."
