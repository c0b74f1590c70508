"""The choice for one request: the instance that answers it, and for a hand-off the instance that computes its prompt.

With pairs there are three ways, and the best instance of all of them is chosen:

    a mixed instance does all of it                      room, or it may wait there
    a decode instance does all of it                     room, or it may wait there; the prompt is short, or mostly cached
    a decode instance continues after a prefill instance room at decode now, and a prefill instance that is not too busy

A reservation is sent only where there is room. If no instance has room, an urgent request also goes to a decode instance that
could preempt less urgent requests for it; the instance decides (core/handoff/destination.py).

Another router may fill a decode instance with smaller requests before there is enough for a large one, so a request that found
no room for `handoff_room_seconds` may wait there whole. The instance lets no later request overtake it.
"""

from __future__ import annotations

from typing import Protocol

from baton.config import RouterConfig
from baton.core.cluster.choice import Census, Choice, ClusterShortage
from baton.core.cluster.closed import Closed
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.membership import Membership
from baton.core.cluster.roster import Roster
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.cluster.search import Candidate, Prompt, Search, SearchConditions
from baton.core.kv.marks import Mark
from baton.protocol.ids import Instant


class Rules(Protocol):
    """Inputs of a choice besides the request (placement.py)."""

    config: RouterConfig
    membership: Membership
    roster: Roster
    search: Search

    @property
    def block_size(self) -> int: ...
    def marks(self, routed: RoutedRequest) -> list[Mark]: ...
    def stays(self, instance: ClusterInstance, uncached: int, *, prefill: bool) -> bool: ...
    def depth_to_stay(self, tokens: int, size: int) -> int: ...
    def may_wait_whole(self, routed: RoutedRequest, now: Instant) -> bool: ...
    def chosen(self, choice: Choice, *, pairs: bool) -> Choice: ...


class DecoderChoice:
    __slots__ = (
        "_census",
        "_closed",
        "_more_blocks",
        "_now",
        "_pairs",
        "_placement",
        "_plain",
        "_preempts",
        "_prefill",
        "_prompt",
        "_routed",
        "_settled",
        "_size",
        "_tokens",
        "_tokens_max",
        "_waits_whole",
    )

    def __init__(self, placement: Rules, routed: RoutedRequest, now: Instant, closed: Closed, census: Census) -> None:
        self._placement = placement
        self._routed = routed
        self._now = now
        self._closed = closed
        self._census = census
        self._settled = census.settled > 0
        "Whether only settled instances are considered: some are present."
        self._size = placement.block_size
        self._tokens, self._tokens_max = routed.tokens, routed.tokens_max
        self._plain = not (routed.unfit or routed.avoided or routed.short or routed.preempted)
        self._more_blocks = len(routed.open) - 1
        self._pairs = census.roles.pairs
        marks = placement.marks(routed) if self._pairs or placement.search.by_prefix else []
        self._prompt = Prompt(placement.search, marks, self._tokens, self._size)
        self._preempts = False
        "Reservations may go to instances that could preempt less urgent requests. Only if no instance has room."
        self._waits_whole = False
        "Whether the request may wait at a pair without room. Used only if no other choice is left."
        self._prefill: Candidate | None = None
        "The best prefill instance with room for the prompt."

    def choice(self) -> Choice | ClusterShortage:
        routed, census, pairs = self._routed, self._census, self._pairs
        if pairs:
            self._prefill = self._best_prefill()
        choice = self._first_of(census.roles.tiers)
        if choice is None and self._prefill is not None and self._placement.roster.may_preempt(routed.order):
            self._preempts = True
            choice = self._first_of((("decode",),))
            self._preempts = False
        if choice is None and self._prefill is not None and self._placement.may_wait_whole(routed, self._now):
            self._waits_whole = True
            choice = self._first_of((("decode",),))
        if choice is not None:
            return self._placement.chosen(choice, pairs=pairs)
        if pairs and self._prefill is None and census.decodes:
            return ClusterShortage.PREFILL if census.prefills else ClusterShortage.AVOIDED
        return ClusterShortage.ROOM

    def _first_of(self, tiers: tuple[tuple[str, ...], ...]) -> Choice | None:
        """The choice of the first group of roles that has one."""
        preempted = [] if self._plain else self._placement.membership.named(self._routed.preempted_by(self._now))
        for last in ([], preempted) if preempted else ([],):
            for tier in tiers:
                found = self._best_decoder(tier, last)
                choice = self._option(found.instance, found.uncached) if found is not None else None
                if choice is not None:
                    return choice
        return None

    # Decode instances

    def _best_decoder(self, roles: tuple[str, ...], last: list[ClusterInstance]) -> Candidate | None:
        """The best decode instance. `last`: only these instances, which preempted the request recently, if given: all others
        come first."""
        search, settled = self._placement.search, self._settled
        more = self._more_blocks
        if last:
            return search.among(self._here(last, roles), SearchConditions(self._prompt, self._accepts_last, more))
        urgent = self._placement.roster.may_be_urgent(self._routed.order)
        wish = SearchConditions(self._prompt, self._accepts, more, True, urgent or self._preempts)
        if not self._pairs or self._waits_whole or self._preempts:
            return search.decoder(roles, wish, settled=settled)
        found = [search.decoder(("mixed",), wish, settled=settled)]
        floor = self._placement.depth_to_stay(self._tokens, self._size)
        if floor <= self._prompt.deepest:
            whole = SearchConditions(self._prompt, self._accepts, more, True, urgent, floor)
            found.append(search.decoder(("decode",), whole, settled=settled))
        if self._prefill is not None:
            found.append(search.decoder(("decode",), SearchConditions(self._prompt, self._accepts, more), settled=settled))
        if self._placement.membership.with_paths:  # The choice of these instances depends on the peers that they can read from.
            unreadable = list(self._placement.membership.with_paths.values())
            found.append(search.among(self._here(unreadable, ("decode",)), wish))
        return min((each for each in found if each is not None), key=lambda each: each.key, default=None)

    def _here(self, instances: list[ClusterInstance], roles: tuple[str, ...]) -> list[ClusterInstance]:
        able = [instance for instance in instances if instance.hello.role in roles and instance.place is not None]
        return [instance for instance in able if instance.place is not None and instance.place.settled == self._settled]

    def _accepts(self, instance: ClusterInstance, uncached: int) -> bool:
        return self._accepts_last(instance, uncached) and (self._plain or not self._routed.was_preempted(instance, self._now))

    def _accepts_last(self, instance: ClusterInstance, uncached: int) -> bool:
        if instance.capacity < self._tokens_max or self._closed.is_closed(instance):
            return False
        if not self._plain and (self._routed.avoids(instance, self._now) or self._routed.is_short(instance)):
            return False
        return self._option(instance, uncached) is not None

    def _option(self, decoder: ClusterInstance, uncached: int) -> Choice | None:
        """The choice with this decode instance. None: there is no room, at the decode instance or at a prefill instance."""
        place = decoder.place
        if place is None:
            return None
        blocks = -(-(uncached + 1) // self._size) + self._more_blocks
        room = place.blocks >= blocks
        if not room and not place.waits and (place.closes_at is None or place.closes_at <= self._routed.order):
            return None
        if self._pairs and decoder.hello.role == "decode":
            best, readable = self._prefill, True
            if decoder.paths:
                best, readable = self._prefill_near(decoder)
            if readable and not self._placement.stays(decoder, uncached, prefill=best is not None):
                if best is not None and (room or self._may_preempt_at(decoder, blocks)):
                    return Choice(decoder, best.instance, best.uncached, blocks, waits=not room)
                if room or not self._waits_whole or not decoder.is_shared:
                    return None
        return Choice(decoder, None, uncached, blocks, waits=not room)

    def _may_preempt_at(self, decoder: ClusterInstance, blocks: int) -> bool:
        return self._preempts and decoder.could_preempt(self._routed.order[0], blocks)

    # Prefill instances

    def _best_prefill(self, near: ClusterInstance | None = None) -> Candidate | None:
        """The best prefill instance with room. `near`: only instances that this one can read from."""
        routed, search, now = self._routed, self._placement.search, self._now
        settled = self._census.prefills_settled
        if not self._census.prefills:
            return None

        def accepts(instance: ClusterInstance, uncached: int) -> bool:
            place = instance.place
            if place is None or place.prompt_tokens < uncached or place.settled != settled or instance.capacity <= self._tokens:
                return False
            if not self._plain and (routed.avoids(instance, now) or routed.is_short(instance)):
                return False
            if near is not None and not near.paths.may_read(instance.session, now):
                return False
            return not self._closed.is_closed_prefill(instance)

        def accepts_first(instance: ClusterInstance, uncached: int) -> bool:
            return accepts(instance, uncached) and (self._plain or not routed.was_preempted(instance, now))

        wish = SearchConditions(self._prompt, accepts_first, None)
        best = search.prefill(wish, settled=settled)
        if best is None and routed.preempted:
            last = self._placement.membership.named(routed.preempted_by(now))
            best = search.among(last, wish._replace(accept=accepts))
        return best

    def _prefill_near(self, decoder: ClusterInstance) -> tuple[Candidate | None, bool]:
        """The best prefill instance that the decoder can read from, and whether it can read from any."""
        routed, now, census = self._routed, self._now, self._census
        unreadable = self._placement.membership.of_sessions(decoder.paths.unreadable(now))
        counted = [m for m in unreadable if m.place is not None and m.place.prompt_tokens >= 0 and m.capacity > self._tokens]
        same = [m for m in counted if m.place is not None and m.place.settled == census.prefills_settled]
        if census.prefills and len([m for m in same if not routed.avoids(m, now)]) == census.prefills:
            return None, False
        return self._best_prefill(decoder), True
