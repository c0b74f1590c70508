"""Acceptance of draft tokens during a run, from the server's /metrics: the names are vLLM's, so other servers have them too."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from baton.cli.http_stream import ServerAddress

NAMES: Final = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
SECONDS_MAX: Final = 10.0

Counts = tuple[int, ...]
"""Counters of NAMES: rows with drafts, draft tokens, accepted ones."""


def drafts_of(server: ServerAddress) -> Counts | None:
    """The counters from the server's metrics. None: the server has no such metrics, or does not show them to this client."""
    from baton.cli.http_stream import HttpError, get_text

    async def ask() -> str:
        async with asyncio.timeout(SECONDS_MAX):
            return await get_text(server, "/metrics")

    try:
        return read_counts(asyncio.run(ask()))
    except (HttpError, TimeoutError):
        return None


def read_counts(text: str) -> Counts | None:
    """Sums over all engines of a page of metrics."""
    sums = []
    for name in NAMES:
        found = re.findall(rf"^vllm:spec_decode_{name}(?:_total)?(?:{{[^}}]*}})? (\S+)", text, re.MULTILINE)
        if not found:
            return None
        sums.append(int(sum(map(float, found))))
    return tuple(sums)


def drafts_since(before: Counts | None, after: Counts | None) -> dict[str, Any]:
    """Entries of the summary. Empty if no drafts were verified in between, or the server was restarted."""
    if before is None or after is None:
        return {}
    rows, drafted, accepted = (late - early for early, late in zip(before, after, strict=True))
    if rows <= 0 or drafted <= 0 or accepted < 0:
        return {}
    return {
        "draft_tokens": drafted,
        "accepted_draft_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_length": 1 + accepted / rows,
    }
