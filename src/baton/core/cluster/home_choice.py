"""One request, one look: the instance that answers it, and the one that computes its prompt where it is handed over.

With pairs there are three ways, and the best instance of all of them is taken:

    a mixed instance does all of it                      room, or it may wait there
    a decode instance does all of it                     room, or it may wait there; the prompt is short, or mostly cached
    a decode instance goes on after a prefill instance   room at decode now, and a prefill instance that is not too busy
"""

from __future__ import annotations

from typing import Protocol

from baton.config import RouterConfig
from baton.core.cluster.choice import Census, Choice, Shortage
from baton.core.cluster.closed import Closed
from baton.core.cluster.member import Member
from baton.core.cluster.membership import Membership
from baton.core.cluster.roster import PEER, Roster
from baton.core.cluster.search import Candidate, Prompt, Search, Wish
from baton.core.cluster.trip import Trip
from baton.protocol.ids import BlockKey, Instant


class Rules(Protocol):
    """What a choice depends on beside the request (placement.py)."""

    config: RouterConfig
    membership: Membership
    roster: Roster
    search: Search

    @property
    def block_size(self) -> int: ...
    def keys(self, trip: Trip) -> list[BlockKey]: ...
    def stays(self, member: Member, uncached: int, *, prefill: bool) -> bool: ...
    def depth_to_stay(self, tokens: int, size: int) -> int: ...
    def chosen(self, choice: Choice, *, pairs: bool) -> Choice: ...


class HomeChoice:
    __slots__ = (
        "_census",
        "_closed",
        "_more_blocks",
        "_now",
        "_pairs",
        "_placement",
        "_plain",
        "_prefill",
        "_prompt",
        "_settled",
        "_size",
        "_tokens",
        "_tokens_max",
        "_trip",
    )

    def __init__(self, placement: Rules, trip: Trip, now: Instant, closed: Closed, census: Census) -> None:
        self._placement = placement
        self._trip = trip
        self._now = now
        self._closed = closed
        self._census = census
        self._settled = census.settled > 0
        "Instances that are lost again and again are not asked, as others are here."
        self._size = placement.block_size
        self._tokens, self._tokens_max = trip.tokens, trip.tokens_max
        self._plain = not (trip.unfit or trip.avoided or trip.short or trip.preempted)
        self._more_blocks = len(trip.open) - 1
        self._pairs = census.roles.pairs
        keys = placement.keys(trip) if self._pairs or placement.search.by_prefix else []
        self._prompt = Prompt(placement.search, keys, self._tokens, self._size)
        self._prefill: Candidate | None = None
        "The best prefill instance that has room for its prompt."

    def choice(self) -> Choice | Shortage:
        trip, census, pairs = self._trip, self._census, self._pairs
        if pairs:
            self._prefill = self._best_prefill(draws=True)
        preempted = [] if self._plain else self._placement.membership.named(trip.preempted_by(self._now))
        for last in ([], preempted) if preempted else ([],):
            for tier in census.roles.tiers:
                found = self._best_home(tier, last)
                choice = self._option(found.member, found.uncached) if found is not None else None
                if choice is not None:
                    return self._placement.chosen(choice, pairs=pairs)
        if pairs and self._prefill is None and census.decodes:
            return Shortage.PREFILL if census.prefills else Shortage.AVOIDED
        return Shortage.ROOM

    # Homes

    def _best_home(self, roles: tuple[str, ...], last: list[Member]) -> Candidate | None:
        """`last`: where given, only these, which preempted the request a moment ago: all others come first."""
        search, settled = self._placement.search, self._settled
        more = self._more_blocks
        if last:
            return search.among(self._here(last, roles), Wish(self._prompt, self._accepts_last, more))
        urgent = self._placement.roster.may_be_urgent(self._trip.order)
        wish = Wish(self._prompt, self._accepts, more, True, urgent)
        if (drawn := search.draw(roles, wish, settled=settled)) is not None:
            return drawn
        if not self._pairs:
            return search.home(roles, wish, settled=settled)
        found = [search.home(("mixed",), wish, settled=settled)]
        floor = self._placement.depth_to_stay(self._tokens, self._size)
        if floor <= self._prompt.deepest:
            whole = Wish(self._prompt, self._accepts, more, True, urgent, floor)
            found.append(search.home(("decode",), whole, settled=settled))
        if self._prefill is not None:
            found.append(search.home(("decode",), Wish(self._prompt, self._accepts, more), settled=settled))
        if self._placement.membership.with_paths:  # what these may do depends on whom they can read from
            unreadable = list(self._placement.membership.with_paths.values())
            found.append(search.among(self._here(unreadable, ("decode",)), wish))
        return min((each for each in found if each is not None), key=lambda each: each.key, default=None)

    def _here(self, members: list[Member], roles: tuple[str, ...]) -> list[Member]:
        able = [member for member in members if member.hello.role in roles and member.place is not None]
        return [member for member in able if member.place is not None and member.place.settled == self._settled]

    def _accepts(self, member: Member, uncached: int) -> bool:
        return self._accepts_last(member, uncached) and (self._plain or not self._trip.was_preempted(member, self._now))

    def _accepts_last(self, member: Member, uncached: int) -> bool:
        if member.capacity < self._tokens_max or self._closed.is_closed(member):
            return False
        if not self._plain and (self._trip.avoids(member, self._now) or self._trip.is_short(member)):
            return False
        return self._option(member, uncached) is not None

    def _option(self, home: Member, uncached: int) -> Choice | None:
        """What the request would be if this were its home. None: there is no room, at home or at a prefill instance."""
        place = home.place
        if place is None:
            return None
        blocks = -(-(uncached + 1) // self._size) + self._more_blocks
        room = place.blocks >= blocks
        if not room and not place.waits and (place.closes_at is None or place.closes_at <= self._trip.order):
            return None
        if self._pairs and home.hello.role == "decode":
            best, readable = self._prefill, True
            if home.paths:
                best, readable = self._prefill_near(home)
            if readable and not self._placement.stays(home, uncached, prefill=best is not None):
                return Choice(home, best.member, best.uncached, blocks, waits=False) if room and best is not None else None
        return Choice(home, None, uncached, blocks, waits=not room)

    # Prefill instances

    def _best_prefill(self, near: Member | None = None, *, draws: bool = False) -> Candidate | None:
        """`near`: only those that this instance can read from."""
        trip, search, now = self._trip, self._placement.search, self._now
        settled = self._census.prefills_settled
        if not self._census.prefills:
            return None

        def accepts(member: Member, uncached: int) -> bool:
            place = member.place
            if place is None or place.prompt_tokens < uncached or place.settled != settled or member.capacity <= self._tokens:
                return False
            if not self._plain and (trip.avoids(member, now) or trip.is_short(member)):
                return False
            if near is not None and not near.paths.may_read(member.session, now):
                return False
            return not self._closed.is_closed_prefill(member)

        def accepts_first(member: Member, uncached: int) -> bool:
            return accepts(member, uncached) and (self._plain or not trip.was_preempted(member, now))

        wish = Wish(self._prompt, accepts_first, None)
        best = search.draw((PEER,), wish, settled=settled) if draws else None
        best = best or search.prefill(wish, settled=settled)
        if best is None and trip.preempted:
            last = self._placement.membership.named(trip.preempted_by(now))
            best = search.among(last, wish._replace(accept=accepts))
        return best

    def _prefill_near(self, home: Member) -> tuple[Candidate | None, bool]:
        """The best one that it can read from, and whether it can read from any."""
        trip, now, census = self._trip, self._now, self._census
        unreadable = self._placement.membership.of_sessions(home.paths.unreadable(now))
        counted = [m for m in unreadable if m.place is not None and m.place.prompt_tokens >= 0 and m.capacity > self._tokens]
        same = [m for m in counted if m.place is not None and m.place.settled == census.prefills_settled]
        if census.prefills and len([m for m in same if not trip.avoids(m, now)]) == census.prefills:
            return None, False
        return self._best_prefill(home), True
