"""Which instance gets a request, or which pair. A role is a preference, not an ability: whoever lives can serve.

    mixed      takes whole requests
    decode     takes what is short, or mostly cached there, whole; the rest after a prefill instance has computed it
    prefill    computes prompts for decode; takes requests whole of which one token is wanted, and all where nobody decodes

Instances that can take a request are candidates; a policy is a sort key over them. Chance is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple

from baton.config import PlacementPolicy, RouterConfig
from baton.core.cluster.membership import Member, Membership
from baton.core.cluster.trip import Trip
from baton.core.kv.block_hash import BlockHasher
from baton.protocol.ids import BlockKey, Instant, RequestId

if TYPE_CHECKING:
    from random import Random

HELD_SHARE: Final = 16
"""So many tokens whose KV is held weigh as much as one that is to be computed: they make a step longer, not by much."""
LEARNING: Final = 0.125
"""How much one hand-off counts in what the next is expected to take."""
TRY_AGAIN: Final = 32
"""After so many prompts that were cheaper to compute where they are decoded one is handed over all the same: what is never
done is never measured again, and a hand-off that was slow once would have been the last."""
OVERDRAWN_MAX: Final = 8
"""Requests that wait at one instance for room, whatever their priorities are."""


class Choice(NamedTuple):
    home: Member
    prefill: Member | None
    "None: home does all of it."
    uncached: int
    "Tokens to compute, by prefill or by home."
    blocks: int
    "That home needs to begin."
    waits: bool
    "There is no room yet."


class Shortage(Enum):
    """Why a request is placed nowhere."""

    NOBODY = "nobody"
    "No instance works."
    NEVER = "never"
    "None of those that are here could ever hold it."
    AVOIDED = "avoided"
    "Those that could have it are not to be tried again at once."
    PREFILL = "prefill"
    "All prefill instances have enough to do."
    ROOM = "room"
    "Nobody has room."


class Candidate(NamedTuple):
    member: Member
    uncached: int
    "Tokens that it would have to compute."
    preempted: bool = False
    "It had to give the request up a moment ago, for want of blocks: all others come before it, whatever the policy."

    @property
    def load(self) -> int:
        return self.member.waiting_tokens + self.member.held_tokens // HELD_SHARE

    @property
    def turn(self) -> tuple[int, int]:
        """Who was chosen longest ago."""
        return self.member.chosen, self.member.number


SortKey = Callable[[Candidate], tuple[int, ...]]

KEYS: Final[dict[PlacementPolicy, SortKey]] = {
    "prefix": lambda candidate: (candidate.load + candidate.uncached, *candidate.turn),
    "load": lambda candidate: (candidate.load, *candidate.turn),
    "two_choices": lambda candidate: (candidate.load, *candidate.turn),
    "round_robin": lambda candidate: candidate.turn,
}


class Placement:
    __slots__ = ("_config", "_hasher", "_key", "_membership", "_not_worth", "_rng", "_trips", "_turn", "handoff_seconds")

    def __init__(self, config: RouterConfig, membership: Membership, trips: Mapping[RequestId, Trip], rng: Random) -> None:
        """`trips`: all that are open."""
        self._config = config
        self._membership = membership
        self._trips = trips
        self._rng = rng
        self._key = KEYS[config.policy]
        self._turn = 0
        self._not_worth = 0
        self._hasher: BlockHasher | None = None
        self.handoff_seconds = config.handoff_seconds_start
        "What a hand-off costs beside the computing, as measured."

    def measured(self, seconds: float) -> None:
        """A hand-off is over: asking for room, and from the last computed block to the adoption."""
        self.handoff_seconds += LEARNING * (seconds - self.handoff_seconds)

    def place(self, trip: Trip, now: Instant) -> Choice | Shortage:
        members = self._membership.members.values()
        if members and not any(self.could(member, trip) for member in members):
            return Shortage.NEVER
        usable = self._membership.usable(now)
        homes, prefills = self._roles(trip, usable)
        if not homes:
            return Shortage.NOBODY
        homes = _settled([member for member in homes if not trip.avoids(member, now)], now)
        if not homes:
            return Shortage.AVOIDED
        pairs = bool(prefills)
        prefills = _settled([member for member in prefills if not trip.avoids(member, now)], now)
        keys = self.keys(trip) if pairs or self._config.policy == "prefix" else []
        prefill, short = self._prefill_for(trip, prefills, keys, now), Shortage.ROOM
        for candidate in self._ordered([self._candidate(member, trip, keys, now) for member in homes]):
            home = candidate.member
            blocks = -(-(candidate.uncached + 1) // home.hello.ready.block_size) + len(trip.open) - 1
            room = _has_room(home, blocks)
            if trip.is_short(home):
                continue
            near, best = prefills, prefill
            if home.paths:  # there are some that it cannot read from
                near = [member for member in prefills if home.paths.may_read(member.session, now)]
                best = self._prefill_for(trip, near, keys, now)
            unread = bool(prefills) and not near
            if not pairs or home.hello.role != "decode" or unread or self.stays(candidate):
                if room or self._may_wait(home, trip):
                    return self._chosen(Choice(home, None, candidate.uncached, blocks, not room))
            elif best is None:
                short = Shortage.PREFILL if near else Shortage.AVOIDED
            elif room:
                return self._chosen(Choice(home, best.member, best.uncached, blocks, waits=False))
        return short

    def remember(self, member: Member, trip: Trip, tokens: Sequence[int]) -> None:
        """It has these tokens of the request by now."""
        keys = self.keys(trip)
        if len(tokens) > len(trip.request.prompt):
            keys = list(keys)
            self._extend(keys, trip, tokens)
        member.memory.add(keys)

    def keys(self, trip: Trip) -> list[BlockKey]:
        """Of the prompt's full blocks."""
        hello = next(iter(self._membership.members.values())).hello
        hasher = self._hasher
        if hasher is None or (hasher.fingerprint, hasher.block_size) != (hello.ready.identity, hello.ready.block_size):
            hasher = self._hasher = BlockHasher(hello.ready.identity, hello.ready.block_size)
        if trip.hasher is not hasher:
            trip.hasher, trip.keys = hasher, []
            self._extend(trip.keys, trip, trip.request.prompt)
        return trip.keys

    def _extend(self, keys: list[BlockKey], trip: Trip, tokens: Sequence[int]) -> None:
        hasher = trip.hasher
        if hasher is not None:
            blocks = min(len(tokens) // hasher.block_size, self._config.prefix_blocks_max)
            hasher.extend(keys, hasher.root(trip.request.salt), tokens, blocks, trip.request.extras)

    # Who could have it

    @staticmethod
    def could(member: Member, trip: Trip) -> bool:
        return member.name not in trip.unfit and member.can_hold(trip.tokens_max)

    def _roles(self, trip: Trip, usable: list[Member]) -> tuple[list[Member], list[Member]]:
        """Whom to choose a home from, and whom a prefill instance. Where one kind is missing, the other does all."""
        prefills = [member for member in usable if member.hello.role == "prefill"]
        alone = [member for member in prefills if self.could(member, trip)]
        homes = [member for member in usable if member.hello.role != "prefill" and self.could(member, trip)]
        if trip.tokens_left <= 1 and alone:
            return [*alone, *(member for member in homes if member.hello.role == "mixed")], []
        if not homes:
            return alone, []
        return homes, [member for member in prefills if self._could_prefill(member, trip)]

    @staticmethod
    def _could_prefill(member: Member, trip: Trip) -> bool:
        """It holds the prompt and one token, and others can read from it."""
        return bool(member.hello.peers) and member.name not in trip.unfit and member.can_hold(trip.tokens + 1)

    def _candidate(self, member: Member, trip: Trip, keys: Sequence[BlockKey], now: Instant) -> Candidate:
        cached = member.memory.leading(keys) * member.hello.ready.block_size
        return Candidate(member, max(1, trip.tokens - cached), trip.was_preempted(member, now))

    def _ordered(self, candidates: list[Candidate]) -> list[Candidate]:
        """Best first. With two choices, the better of two comes first: of those that are no last choice, if there are any."""
        ordered = sorted(candidates, key=lambda candidate: (candidate.preempted, *self._key(candidate)))
        if self._config.policy == "two_choices":
            first = sum(not candidate.preempted for candidate in ordered) or len(ordered)
            if first > 2:
                drawn = self._rng.sample(range(first), 2)
                ordered.insert(0, ordered.pop(min(drawn)))
        return ordered

    def _prefill_for(self, trip: Trip, prefills: list[Member], keys: Sequence[BlockKey], now: Instant) -> Candidate | None:
        limit = 1 + self._config.waiting_prompts_max  # one is computed
        free = [member for member in prefills if member.prompts < limit and not trip.is_short(member)]
        return self._ordered([self._candidate(member, trip, keys, now) for member in free])[0] if free else None

    def stays(self, candidate: Candidate) -> bool:
        """Is it cheaper to compute the prompt where it is decoded than to hand it over?"""
        policy = self._config.handoff
        if policy != "auto" or candidate.uncached < self._config.handoff_tokens_min:
            return policy != "always"
        seconds = candidate.uncached * candidate.member.beat.token_seconds
        if not 0 < seconds < self.handoff_seconds:
            return False
        self._not_worth += 1
        return self._not_worth % TRY_AGAIN != 0

    # Room

    def _may_wait(self, member: Member, trip: Trip) -> bool:
        """May one more wait there? Those that are less urgent are no reason against it."""
        found = [self._trips[request] for request in member.overdrawn if request in self._trips]
        waiting = [other for other in found if other.home is member and other.told == other.mark and other.open]
        member.overdrawn = {other.id: None for other in waiting}
        ahead = sum(other.order <= trip.order for other in waiting)
        return ahead < self._config.waiting_prompts_max and len(waiting) < OVERDRAWN_MAX

    def _chosen(self, choice: Choice) -> Choice:
        self._turn += 1
        choice.home.chosen = self._turn
        if choice.prefill is not None:
            choice.prefill.chosen = self._turn
        return choice


def _has_room(member: Member, blocks: int) -> bool:
    """One that has nothing else can always begin."""
    if not member.sequences and member.beat.blocks_available >= member.hello.ready.blocks:
        return True
    return member.slots_free > 0 and member.blocks_available >= blocks


def _settled(members: list[Member], now: Instant) -> list[Member]:
    """Those that are not lost again and again, if there are any."""
    return [member for member in members if member.inhibited_until <= now] or members
