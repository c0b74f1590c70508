"""The phases of a sequence, as a table.

HELD        waits for the leader's prompt, or for its turn  -> WAITING when the leader's first token is in (absorb.py),
            as a suspect                                       or the suspects before it are cleared (recovery.py)
WAITING     in the queue, holds nothing                     -> PREFILL when admission has slot and blocks (scheduler.py)
LOADING     out of the queue while a lower tier is asked or -> WAITING when that has ended, with any result (loading.py)
            brings its KV; may hold blocks, has no slot
PREFILL     on the worker, prompt being computed            -> DECODE when its last chunk is planned
DECODE      on the worker, one token per step               -> CLOSING at its end
PREEMPTING  blocks given up, slot still taken               -> WAITING when the worker has acknowledged the drop
CLOSING     ended for the client, slot still taken          -> DONE when the worker has acknowledged the drop
DONE        nothing is held, nothing follows

`NEXT` is the program: a pair that is not in it cannot happen, and trying it stops the instance.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Phase(Enum):
    HELD = "held"
    WAITING = "waiting"
    LOADING = "loading"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTING = "preempting"
    CLOSING = "closing"
    DONE = "done"


class Fact(Enum):
    RELEASED = "released"
    SUSPECTED = "suspected"
    LOAD_BEGUN = "load_begun"
    LOAD_OVER = "load_over"
    ADMITTED = "admitted"
    PROMPT_PLANNED = "prompt_planned"
    PREEMPTED = "preempted"
    ACKNOWLEDGED = "acknowledged"
    ENDED = "ended"
    WORKER_LOST = "worker_lost"


NEXT: Final[dict[tuple[Phase, Fact], Phase]] = {
    (Phase.HELD, Fact.RELEASED): Phase.WAITING,
    (Phase.HELD, Fact.ENDED): Phase.DONE,
    (Phase.WAITING, Fact.ADMITTED): Phase.PREFILL,
    (Phase.WAITING, Fact.SUSPECTED): Phase.HELD,
    (Phase.WAITING, Fact.ENDED): Phase.DONE,
    (Phase.WAITING, Fact.LOAD_BEGUN): Phase.LOADING,
    (Phase.LOADING, Fact.LOAD_OVER): Phase.WAITING,
    (Phase.LOADING, Fact.ENDED): Phase.DONE,
    (Phase.PREFILL, Fact.PROMPT_PLANNED): Phase.DECODE,
    (Phase.PREFILL, Fact.PREEMPTED): Phase.PREEMPTING,
    (Phase.PREFILL, Fact.ENDED): Phase.CLOSING,
    (Phase.PREFILL, Fact.WORKER_LOST): Phase.WAITING,
    (Phase.DECODE, Fact.PREEMPTED): Phase.PREEMPTING,
    (Phase.DECODE, Fact.ENDED): Phase.CLOSING,
    (Phase.DECODE, Fact.WORKER_LOST): Phase.WAITING,
    (Phase.PREEMPTING, Fact.ACKNOWLEDGED): Phase.WAITING,
    (Phase.PREEMPTING, Fact.ENDED): Phase.CLOSING,
    (Phase.PREEMPTING, Fact.WORKER_LOST): Phase.WAITING,
    (Phase.CLOSING, Fact.ACKNOWLEDGED): Phase.DONE,
    (Phase.CLOSING, Fact.WORKER_LOST): Phase.DONE,
}

ON_WORKER: Final = (Phase.PREFILL, Phase.DECODE)
OPEN: Final = (Phase.HELD, Phase.WAITING, Phase.LOADING, Phase.PREFILL, Phase.DECODE, Phase.PREEMPTING)
"""Phases in which the client still waits for an end."""
AWAY: Final = (Phase.PREEMPTING, Phase.WAITING, Phase.LOADING)
"""Phases in which a preempted sequence does not run, and may run later."""
