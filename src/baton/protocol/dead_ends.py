"""Why a worker cannot go on with a sequence, where the request itself leaves no way on: a 400 of the front, and nobody's fault.

A worker writes one of these into a RowFailure, with more words behind it; the front reads how the words begin.
"""

from __future__ import annotations

from typing import Final

NOTHING_LEFT: Final = "no token is allowed here: bias, bad words, stop ids and the grammar exclude the whole vocabulary"
OFF_GRAMMAR: Final = "the answer cannot go on within its grammar"


def is_dead_end(detail: str) -> bool:
    return detail.startswith((NOTHING_LEFT, OFF_GRAMMAR))
