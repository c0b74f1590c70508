"""One session of one instance, as its router sees it: its hello, its last heartbeat, and the changes since.

Room is the last heartbeat's, less what was sent since, plus what ended since. It is an estimate that the next heartbeat
corrects; the instance alone admits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from baton.core.cluster.events import Session
from baton.core.cluster.paths import Paths
from baton.core.cluster.placed_blocks import PlacedBlocks
from baton.protocol.ids import Instant, RequestId
from baton.protocol.instance import Heartbeat, InstanceHello

HELD_SHARE: Final = 16
"""Tokens of held KV that weigh as much as one token to compute: they lengthen a step only a little."""
ALWAYS_ROOM: Final = 2**62
"""Blocks that count as free on an idle instance: it can always begin a request."""

Order = tuple[int, float, int]
"""Queue order of a request: priority, arrival of the first attempt, a counter."""

Entry = tuple[int, int, int, "ClusterInstance"]
"""Sort key of an instance: load, turn of the last choice, number; smaller is better. The number is unique, so instances are
never compared."""


class Place(NamedTuple):
    """Place of an instance in the roster, and the values by which it is sorted."""

    settled: bool
    waits: bool
    "Whether a request of any priority may wait there without room."
    entry: Entry
    blocks: int
    "Free blocks (ClusterInstance.blocks_free)."
    closes_at: Order | None
    "Queue order before which requests may wait there, if not `waits`. None: no request may."
    prompt_tokens: int
    "Size of the largest prompt that a prefill instance may be sent to compute for others. -1: none."
    least_urgent: int | None
    "The least urgent priority of which it holds blocks, by its last heartbeat. None: it holds none."


class ClusterInstance:
    __slots__ = (
        "assigned",
        "beat",
        "bit",
        "blocks_since",
        "capacity",
        "chosen",
        "digests_due",
        "held_until",
        "hello",
        "inhibited_until",
        "joined_at",
        "mode",
        "number",
        "over_capacity",
        "over_share",
        "paths",
        "place",
        "placed",
        "prompt_tokens",
        "prompts",
        "received_at",
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
        self.bit = 0
        "Bit of the instance in sets of instances. Owned by core/cluster/prefix_index.py."
        self.received_at = self.joined_at = now
        self.beat = Heartbeat(blocks_available=hello.ready.blocks, slots_free=hello.ready.slots)
        self.mode = "serving"
        self.capacity = capacity_of(hello)
        "Tokens of the longest request that fits into the empty instance."
        self.chosen = 0
        "Turn of the last choice, as a counter: for the order among equals."
        self.held_until = now
        "Time before which the instance gets no new work: it has just refused a request because it accepts none."
        self.inhibited_until = now
        self.assigned: dict[RequestId, None] = {}
        "Requests that the instance has, whole or in part, in the order of their arrival."
        self.paths = Paths()
        "Peers that the instance failed to read from."
        self.prompts = 0
        "Number of hand-offs whose prompt the instance computes, or will compute."
        self.prompt_tokens = 0
        "Uncached tokens of those prompts."
        self.sequences = 0
        "Sequences that it answers."
        self.placed = PlacedBlocks()
        "Blocks of the requests that it answers, by priority."
        self.over_capacity: dict[RequestId, Order] = {}
        "Requests that were sent although there was no room; they wait at the instance and have no token yet."
        self.digests_due = now
        "Time when all its messages of keys so far are due (reports.py)."
        self.over_share = False
        "Whether the instance has published more keys than the router keeps of one instance."
        self.short_for = False
        "Whether the instance has refused a request for lack of room since its last heartbeat."
        self.blocks_since = self.slots_since = self.tokens_since = 0
        "Changes since the last heartbeat."
        self.stalled_since: Instant | None = None
        "Time of the first heartbeat of the present stall of its worker."
        self.place: Place | None = None
        "Place in the roster, which owns it (core/cluster/roster.py). None: the instance gets no new requests now."

    def __repr__(self) -> str:
        return f"<{self.hello.role} {self.hello.name}/{self.session} {len(self.assigned)} requests>"

    @property
    def name(self) -> str:
        return self.hello.name

    # Capacity

    @property
    def blocks_available(self) -> int:
        return min(self.beat.blocks_available + self.blocks_since, self.hello.ready.blocks)

    @property
    def slots_free(self) -> int:
        """Free slots, also by the router's own count, which is exact if it is the only router."""
        slots = self.hello.ready.slots
        return min(self.beat.slots_free + self.slots_since, slots - self.sequences)

    @property
    def is_shared(self) -> bool:
        """Whether requests of other routers run on the instance. They may take room before our requests get it."""
        return self.hello.ready.slots - self.beat.slots_free - self.slots_since > self.sequences

    @property
    def blocks_free(self) -> int:
        """Blocks that a request may take there at once. An idle instance can always begin."""
        if not self.sequences and self.beat.blocks_available >= self.hello.ready.blocks:
            return ALWAYS_ROOM
        return max(0, self.blocks_available) if self.slots_free > 0 else 0

    def could_preempt(self, priority: int, blocks: int) -> bool:
        """Would the instance have this many blocks if it preempted all less urgent requests? They are those of the last
        heartbeat, which has the other routers' too, or those that this router has placed, if these have more."""
        reported = sum([held for other, held in self.beat.held if other > priority])
        held = max(reported, self.placed.less_urgent(priority))
        return held > 0 and held + max(0, self.blocks_available) >= blocks

    @property
    def waiting_tokens(self) -> int:
        """Tokens that the instance computes before a request that is sent now."""
        return max(0, self.beat.waiting_tokens + self.tokens_since)

    @property
    def load(self) -> int:
        """Load in tokens: those waiting to be computed, and a share of those held."""
        ready = self.hello.ready
        held = (ready.blocks - max(0, self.blocks_available)) * ready.block_size
        return self.waiting_tokens + held // HELD_SHARE

    def on_beat(self, beat: Heartbeat) -> None:
        self.beat = beat
        self.blocks_since = self.slots_since = self.tokens_since = 0

    def can_hold(self, tokens: int) -> bool:
        """Whether this many tokens fit into the empty instance."""
        return tokens <= self.capacity

    def is_suspect(self, now: Instant, seconds: float) -> bool:
        return now >= self.received_at + seconds or bool(self.beat.fault)  # rounded as Roster rounds the time of the next check


def capacity_of(hello: InstanceHello) -> int:
    """Tokens of the longest request that fits. Its last token is never stored, so it needs no block."""
    ready = hello.ready
    tokens = ready.blocks * ready.block_size + 1
    return min(tokens, ready.context_tokens) if ready.context_tokens > 0 else tokens
