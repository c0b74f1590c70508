"""A sequence's life. A request is one prompt; each of its n answers is a sequence, and sequences are what is scheduled.

HELD        a sibling that waits for the leader's prompt    -> WAITING when the leader's first token is in (absorb.py)
WAITING     in line, holds nothing                          -> PREFILL when admission has slot and blocks (scheduler.py)
PREFILL     on the worker, prompt being computed            -> DECODE when its last chunk is planned
DECODE      on the worker, one token a step                 -> CLOSING at its end
PREEMPTING  blocks given up, slot still taken               -> WAITING when the worker has acknowledged the drop
CLOSING     ended for the client, slot still taken          -> DONE when the worker has acknowledged the drop
DONE        nothing is held, nothing follows

`NEXT` is the program: a pair that is not in it cannot happen, and trying it stops the instance.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, BlockKey, Incarnation, Instant, Slot
from baton.protocol.request import GenerateRequest


class Phase(Enum):
    HELD = "held"
    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTING = "preempting"
    CLOSING = "closing"
    DONE = "done"


class Fact(Enum):
    LEADER_READY = "leader_ready"
    ADMITTED = "admitted"
    PROMPT_PLANNED = "prompt_planned"
    PREEMPTED = "preempted"
    ACKNOWLEDGED = "acknowledged"
    ENDED = "ended"
    WORKER_LOST = "worker_lost"


NEXT: Final[dict[tuple[Phase, Fact], Phase]] = {
    (Phase.HELD, Fact.LEADER_READY): Phase.WAITING,
    (Phase.HELD, Fact.ENDED): Phase.DONE,
    (Phase.WAITING, Fact.ADMITTED): Phase.PREFILL,
    (Phase.WAITING, Fact.ENDED): Phase.DONE,
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
OPEN: Final = (Phase.HELD, Phase.WAITING, Phase.PREFILL, Phase.DECODE, Phase.PREEMPTING)
"""Phases in which the client is still owed something."""


class Sequence:
    """Mutable and slotted: one a sequence, touched every step.

    tokens      |----------- prompt -----------|-- outputs received --|
    computed    |------- confirmed by results -------|
    scheduled   |------- planned, results may be in flight --------------|--|
    in_flight                                                         how many samples are not back yet
    """

    __slots__ = (
        "blocks",
        "cached_tokens",
        "capacity",
        "computed",
        "crash_length",
        "crashes",
        "group",
        "in_flight",
        "incarnation",
        "index",
        "keys",
        "min_length",
        "order",
        "phase",
        "preemptions",
        "priority",
        "prompt_tokens",
        "published",
        "queued",
        "request",
        "root",
        "scheduled",
        "slot",
        "stop_ids",
        "stop_position",
        "target",
        "tokens",
    )

    def __init__(self, group: Group, index: int, order: tuple[int, int], root: BlockKey, phase: Phase) -> None:
        request, sampling = group.request, group.request.sampling
        self.group = group
        self.request = request
        self.index = index
        self.order = order
        "Place in line, (priority, arrival): smaller runs first and is preempted last. Kept for life."
        self.priority = order[0]
        self.root = root
        self.phase = phase
        self.tokens: list[int] = list(request.prompt)
        self.prompt_tokens = len(request.prompt)
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.min_length = self.prompt_tokens + sampling.min_tokens
        self.stop_position = self.prompt_tokens + sampling.max_tokens - 1
        "Positions to compute at most. The last token is sampled and never fed back, so it needs no KV."
        self.queued = True
        "Not admitted yet, so it counts against the queue bounds."
        self.keys: list[BlockKey] = []
        self.blocks: list[BlockId] = []
        self.capacity = 0
        "Tokens that the blocks hold."
        self.computed = 0
        self.scheduled = 0
        self.published = 0
        "Leading blocks that were offered to the cache."
        self.target = 0
        "Tokens to prefill, frozen at admission for this incarnation."
        self.in_flight = 0
        self.slot = Slot(-1)
        self.incarnation = Incarnation(0)
        self.cached_tokens = 0
        "Prompt tokens that the first admission did not have to compute."
        self.preemptions = 0
        self.crashes = 0
        "Worker losses in a row while this sequence was being computed, without getting past `crash_length` in between."
        self.crash_length = 0
        "Tokens, those in flight included, when the worker was last lost: the furthest that it can have come."

    def __repr__(self) -> str:
        return (
            f"<{self.request.id}.{self.index} {self.phase.value} {len(self.tokens)} tokens, {self.computed} computed, "
            f"{len(self.blocks)} blocks, slot {self.slot}.{self.incarnation}>"
        )

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def advance(self, fact: Fact) -> None:
        phase = NEXT.get((self.phase, fact))
        if phase is None:
            raise InvariantBroken(f"{self!r}: {fact.value} in {self.phase.value} is not in the table", invariant=24)
        self.phase = phase

    def lose_blocks(self) -> list[BlockId]:
        """The blocks are someone else's now; nothing counts as computed any more. Tokens stay."""
        blocks, self.blocks = self.blocks, []
        self.capacity = self.computed = self.scheduled = self.published = self.target = 0
        return blocks


class Group:
    """A request that is being served: its sequences, and when it must end. Sequence 0 leads: the others wait for the
    prompt that it computes, and find it in the cache."""

    __slots__ = ("deadline", "open", "request", "sequences")

    def __init__(self, request: GenerateRequest, deadline: Instant | None) -> None:
        self.request = request
        self.deadline = deadline
        self.sequences: list[Sequence] = []
        self.open = request.n
        "Sequences that have not ended for the client."
