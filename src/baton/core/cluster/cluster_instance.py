"""One session of one instance, as its router sees it: what it announced, its last heartbeat, and what it was sent since.

Room is what the last heartbeat reported, less what was sent since, plus what ended since. It is an estimate that the next
heartbeat corrects; the instance alone admits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from baton.core.cluster.events import Session
from baton.core.cluster.paths import Paths
from baton.protocol.ids import Instant, RequestId
from baton.protocol.instance import Heartbeat, InstanceHello

HELD_SHARE: Final = 16
"""So many tokens whose KV is held weigh as much as one that is to be computed: they make a step longer, not by much."""
ALWAYS_ROOM: Final = 2**62
"""Blocks that an idle instance counts as free: one that has nothing else can always begin."""

Order = tuple[int, float, int]
"""Of a request in the queue: priority, when the first attempt arrived, a counter."""

Entry = tuple[int, int, int, "ClusterInstance"]
"""Load, when it was chosen last, number: smaller is better. The number is unique, so instances are never compared."""


class Place(NamedTuple):
    """Where a instance is sorted in, and by what."""

    settled: bool
    waits: bool
    "A request may wait there although there is no room, whatever its priority is."
    entry: Entry
    blocks: int
    "Instance.blocks_free"
    closes_at: Order | None
    "Where not `waits`: only requests that are more urgent may wait there. None: none may."
    prompt_tokens: int
    "A prefill instance: size of a prompt that it may be sent to compute for others. -1: none."


class ClusterInstance:
    __slots__ = (
        "assigned",
        "beat",
        "blocks_since",
        "capacity",
        "chosen",
        "heard_at",
        "held_until",
        "hello",
        "inhibited_until",
        "joined_at",
        "mode",
        "number",
        "over_capacity",
        "paths",
        "place",
        "prompt_tokens",
        "prompts",
        "sequences",
        "session",
        "short_for",
        "slots_since",
        "stalled_since",
        "tokens_since",
    )

    def __init__(self, session: Session, hello: InstanceHello, number: int, now: Instant) -> None:
        self.session = session
        self.hello = hello
        self.number = number
        self.heard_at = self.joined_at = now
        self.beat = Heartbeat(blocks_available=hello.ready.blocks, slots_free=hello.ready.slots)
        self.mode = "serving"
        self.capacity = capacity_of(hello)
        "Tokens of the longest request that it could hold, with nothing else there."
        self.chosen = 0
        "When it was chosen last, as a counter: round robin, and who goes first among equals."
        self.held_until = now
        "Gets no new work before: it has just said that it takes none."
        self.inhibited_until = now
        self.assigned: dict[RequestId, None] = {}
        "Requests that it has, whole or a part, in the order in which they came."
        self.paths = Paths()
        "Whom it cannot read from."
        self.prompts = 0
        "Hand-offs whose prompt it computes, or will."
        self.prompt_tokens = 0
        "Uncached tokens of those prompts."
        self.sequences = 0
        "Sequences that it answers."
        self.over_capacity: dict[RequestId, Order] = {}
        "Those that were sent although there was no room; they wait there, and have no token yet."
        self.short_for = False
        "It has refused a request for want of room since its last heartbeat."
        self.blocks_since = self.slots_since = self.tokens_since = 0
        "What changed since the last beat."
        self.stalled_since: Instant | None = None
        "Since when its beats say that its worker stands still."
        self.place: Place | None = None
        "Where the roster has it. None: it gets no new requests now. Kept by core/cluster/roster.py."

    def __repr__(self) -> str:
        return f"<{self.hello.role} {self.hello.name}/{self.session} {len(self.assigned)} legs>"

    @property
    def name(self) -> str:
        return self.hello.name

    # Credits

    @property
    def blocks_available(self) -> int:
        return min(self.beat.blocks_available + self.blocks_since, self.hello.ready.blocks)

    @property
    def slots_free(self) -> int:
        """Also by our own count, which is exact where we are the only router."""
        slots = self.hello.ready.slots
        return min(self.beat.slots_free + self.slots_since, slots - self.sequences)

    @property
    def blocks_free(self) -> int:
        """Blocks that a request may need to begin there at once. An idle instance can always begin."""
        if not self.sequences and self.beat.blocks_available >= self.hello.ready.blocks:
            return ALWAYS_ROOM
        return max(0, self.blocks_available) if self.slots_free > 0 else 0

    @property
    def waiting_tokens(self) -> int:
        """To be computed there, before what is sent next."""
        return max(0, self.beat.waiting_tokens + self.tokens_since)

    @property
    def load(self) -> int:
        """In tokens that are to be computed before the next request: those that wait, and a share of those that are held."""
        ready = self.hello.ready
        held = (ready.blocks - max(0, self.blocks_available)) * ready.block_size
        return self.waiting_tokens + held // HELD_SHARE

    def on_beat(self, beat: Heartbeat) -> None:
        self.beat = beat
        self.blocks_since = self.slots_since = self.tokens_since = 0

    def can_hold(self, tokens: int) -> bool:
        """Could it ever, with nothing else there?"""
        return tokens <= self.capacity

    def is_suspect(self, now: Instant, seconds: float) -> bool:
        return now - self.heard_at >= seconds or bool(self.beat.fault)


def capacity_of(hello: InstanceHello) -> int:
    """The last token of a request is never stored, so it needs no block."""
    ready = hello.ready
    tokens = ready.blocks * ready.block_size + 1
    return min(tokens, ready.context_tokens) if ready.context_tokens > 0 else tokens
