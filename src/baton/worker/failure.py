"""Reasons why a worker cannot continue one sequence. The other sequences of its step are not affected."""

from __future__ import annotations

from dataclasses import dataclass

from baton.protocol.step import RowError


@dataclass(frozen=True, slots=True)
class Failure:
    reason: str
    "Reason of the failure, as text for the client."
    error: RowError = "row_failed"


NOT_FINITE = Failure("NaN or infinity in the logits")
NOTHING_LEFT = Failure(
    "no token is allowed here: bias, bad words, stop ids and the grammar exclude the whole vocabulary", "dead_end"
)


def off_grammar(why: str) -> Failure:
    return Failure(f"the answer cannot go on within its grammar: {why}", "dead_end")
