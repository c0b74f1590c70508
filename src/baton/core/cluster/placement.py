"""Which instance gets a request, or which pair. A role is a preference, not an ability: whoever lives can serve.

    mixed      takes whole requests
    decode     takes what is short, or mostly cached there, whole; the rest after a prefill instance has computed it.
               The last choice for requests of which one token is wanted
    prefill    computes prompts for decode; takes requests whole of which one token is wanted, and all where nobody decodes

This file says who may have a request; search.py finds the best of them. Chance is an argument. The same rules, written as a
sort over all instances, are in sim/cluster/naive_placement.py: both must always choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from baton.config import RouterConfig
from baton.core.cluster.choice import Census, Choice, Roles, Shortage
from baton.core.cluster.closed import Closed
from baton.core.cluster.home_choice import HomeChoice
from baton.core.cluster.member import Member
from baton.core.cluster.membership import Membership
from baton.core.cluster.roster import PEER
from baton.core.cluster.search import Search
from baton.core.cluster.trip import Trip
from baton.core.kv.block_hash import BlockHasher
from baton.protocol.ids import BlockKey, Instant

if TYPE_CHECKING:
    from random import Random

LEARNING: Final = 0.125
"""How much one hand-off counts in what the next is expected to take."""
NEVER_DEEP: Final = 2**31


class Placement:
    __slots__ = (
        "_counted_at",
        "_counts_of",
        "_hasher",
        "_stayed",
        "_turn",
        "config",
        "handoff_seconds",
        "index",
        "membership",
        "on_cached",
        "roster",
        "search",
    )

    def __init__(self, config: RouterConfig, membership: Membership, rng: Random) -> None:
        self.config = config
        self.membership = membership
        self.roster, self.index = membership.roster, membership.index
        self.search = Search(config, self.roster, self.index, rng)
        self._turn = 0
        self._counts_of: dict[tuple[bool, int, int], Census | None] = {}
        self._counted_at = -1
        self._stayed = 0
        "Prompts in a row that were computed where they are decoded because that was cheaper."
        self._hasher: BlockHasher | None = None
        self.handoff_seconds = config.handoff_seconds_start
        "What a hand-off costs beside the computing, as measured."
        self.on_cached: Callable[[Sequence[BlockKey]], None] = lambda keys: None
        "A decode instance has these blocks from now on."

    @property
    def block_size(self) -> int:
        """All instances agree on it."""
        return next(iter(self.membership.members.values())).hello.ready.block_size

    def measured(self, seconds: float) -> None:
        """A hand-off is over: asking for room, and from the last computed block to the adoption."""
        self.handoff_seconds += LEARNING * (seconds - self.handoff_seconds)

    # The choice

    def place(self, trip: Trip, now: Instant, closed: Closed) -> Choice | Shortage:
        """After Roster.refresh."""
        if not self.membership.any_could(trip.tokens_max, trip.unfit):
            return Shortage.LOST if self.membership.lost_could(trip.tokens_max, trip.unfit, now) else Shortage.NEVER
        census = self.census(trip, now)
        if census is None:
            return Shortage.NOBODY
        if not census.settled and not census.inhibited:
            return Shortage.AVOIDED
        return HomeChoice(self, trip, now, closed, census).choice()

    def census(self, trip: Trip, now: Instant) -> Census | None:
        """Counted anew when an instance has become usable or unusable; requests of like size have the same."""
        if trip.unfit or trip.avoided:
            return self._counted(trip, now)
        if self._counted_at != self.roster.usable_version:
            self._counted_at = self.roster.usable_version
            self._counts_of.clear()
        tokens, tokens_max = trip.tokens, trip.tokens_max
        key = (trip.tokens_left <= 1, self.roster.size_class(tokens_max), self.roster.size_class(tokens + 1))
        if key not in self._counts_of:
            self._counts_of[key] = self._counted(trip, now)
        return self._counts_of[key]

    def _counted(self, trip: Trip, now: Instant) -> Census | None:
        roles = self.roles(trip)
        if roles is None:
            return None
        settled, inhibited = (self._left(trip, roles.all, trip.tokens_max, each, now) for each in (True, False))
        decodes = self._left(trip, ("decode",), trip.tokens_max, settled > 0, now)
        prefills, other = (self._left(trip, (PEER,), trip.tokens + 1, each, now) for each in (True, False))
        return Census(roles, settled, inhibited, decodes, prefills or other, prefills_settled=prefills > 0)

    def roles(self, trip: Trip) -> Roles | None:
        """None: no instance that works could hold it."""
        alone = self._able(trip, ("prefill",), trip.tokens_max)
        homes = self._able(trip, ("mixed", "decode"), trip.tokens_max)
        if trip.tokens_left <= 1 and alone:
            return Roles((("prefill", "mixed"), ("decode",)), pairs=False)
        if homes:
            return Roles((("mixed", "decode"),), pairs=self._able(trip, (PEER,), trip.tokens + 1) > 0)
        return Roles((("prefill",),), pairs=False) if alone else None

    def _able(self, trip: Trip, roles: Sequence[str], tokens: int) -> int:
        """How many usable instances could hold so many tokens of it."""
        roster = self.roster
        able = roster.able(roles, tokens, settled=True) + roster.able(roles, tokens, settled=False)
        return able - sum(self._counts(name, roles, tokens) is not None for name in trip.unfit)

    def _left(self, trip: Trip, roles: Sequence[str], tokens: int, settled: bool, now: Instant) -> int:
        """Of those, how many it does not avoid."""
        left = self.roster.able(roles, tokens, settled=settled)
        for name in trip.exceptions(now):
            if self._counts(name, roles, tokens) is settled:
                left -= 1
        return left

    def _counts(self, name: str, roles: Sequence[str], tokens: int) -> bool | None:
        """Is this one counted among the usable instances of these roles, and is it settled? None: it is not counted."""
        member = self.membership.names.get(name)
        if member is None or member.place is None or member.capacity < tokens:
            return None
        counted = member.hello.role in roles or (PEER in roles and member.place.prompt_tokens >= 0)
        return member.place.settled if counted else None

    # Hand over or stay

    def stays(self, member: Member, uncached: int, *, prefill: bool) -> bool:
        """Is it cheaper to compute the prompt where it is decoded than to hand it over? Now and then one is handed over all the
        same, where a `prefill` instance has room: what is never done is never measured again, and a hand-off that was slow
        once would have been the last."""
        policy = self.config.handoff
        if policy != "auto" or uncached < self.config.handoff_tokens_min:
            return policy != "always"
        due = self._stayed + 1 >= self.config.handoff_retry_interval
        return self._is_cheaper(member, uncached) and not (due and prefill)

    def _is_cheaper(self, member: Member, uncached: int) -> bool:
        return 0 < uncached * member.beat.token_seconds < self.handoff_seconds

    def depth_to_stay(self, tokens: int, size: int) -> int:
        """An instance that has fewer of the first blocks than so many does not compute the prompt of a hand-off itself."""
        config = self.config
        if config.handoff != "auto":
            return NEVER_DEEP if config.handoff == "always" else 0
        most = max(config.handoff_tokens_min - 1, -int(-self.handoff_seconds // self.roster.fastest) if self._measured else 0)
        return max(0, -(-(tokens - most) // size)) if most >= 1 else NEVER_DEEP

    @property
    def _measured(self) -> bool:
        return self.roster.fastest < float("inf")

    def chosen(self, choice: Choice, *, pairs: bool) -> Choice:
        """Takes note of it."""
        config = self.config
        self._turn += 1
        for member in (choice.home, choice.prefill):
            if member is not None:
                member.chosen = self._turn
                self.roster.touch(member)
        if pairs and config.handoff == "auto" and choice.home.hello.role == "decode":
            if choice.prefill is not None:
                self._stayed = 0
            elif choice.uncached >= config.handoff_tokens_min and self._is_cheaper(choice.home, choice.uncached):
                self._stayed += 1
        return choice

    # What is cached where

    def remember(self, member: Member, trip: Trip, tokens: Sequence[int]) -> None:
        """It has these tokens of the request by now."""
        keys = self.keys(trip)
        if len(tokens) > len(trip.request.prompt):
            keys = list(keys)
            self._extend(keys, trip, tokens)
        self.index.add(member.number, keys)
        if member.hello.role == "decode":
            self.on_cached(keys)

    def keys(self, trip: Trip) -> list[BlockKey]:
        """Of the prompt's full blocks."""
        hello = next(iter(self.membership.members.values())).hello
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
            blocks = min(len(tokens) // hasher.block_size, self.config.prefix_blocks_max)
            hasher.extend(keys, hasher.root(trip.request.salt), tokens, blocks, trip.request.extras)
