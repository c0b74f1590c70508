"""Chooses the instance or pair for a request. A role is a preference, not an ability: any live instance can serve.

    mixed      gets whole requests
    decode     gets short or mostly cached requests whole; the others after a prefill instance has computed the prompt.
               The last choice for requests that want one token
    prefill    computes prompts for decode; gets requests that want one token whole, and all if no instance decodes

This file decides which instances may get a request; search.py finds the best of them. The same rules, written as a sort over
all instances, are in sim/cluster/naive_placement.py: both must always choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from baton.config import RouterConfig
from baton.core.cluster.choice import Census, Choice, ClusterShortage, Roles
from baton.core.cluster.closed import Closed
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.decoder_choice import DecoderChoice
from baton.core.cluster.membership import Membership
from baton.core.cluster.roster import PEER
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.cluster.search import Search
from baton.core.kv.block_hash import BlockHasher
from baton.core.kv.marks import Mark, marks_of, short_keys
from baton.protocol.ids import BlockKey, Instant
from baton.protocol.instance import CachedKeys

LEARNING: Final = 0.125
"""Weight of one hand-off in the expected time of the next."""
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

    def __init__(self, config: RouterConfig, membership: Membership) -> None:
        self.config = config
        self.membership = membership
        self.roster, self.index = membership.roster, membership.index
        self.search = Search(config, self.roster, self.index)
        self._turn = 0
        self._counts_of: dict[tuple[bool, int, int], Census | None] = {}
        self._counted_at = -1
        self._stayed = 0
        "Number of prompts in a row that were computed at their decode instance because that was cheaper."
        self._hasher: BlockHasher | None = None
        self.handoff_seconds = config.handoff_seconds_start
        "Measured seconds of a hand-off besides the computing."
        self.on_cached: Callable[[Sequence[int]], None] = lambda keys: None
        "Callback for a decode instance that has these blocks from now on."

    @property
    def block_size(self) -> int:
        """Tokens per block. All instances have the same size."""
        return next(iter(self.membership.instances.values())).hello.ready.block_size

    def measured(self, seconds: float) -> None:
        """Learn from a finished hand-off: reserving blocks, and from the last computed block to the adoption."""
        self.handoff_seconds += LEARNING * (seconds - self.handoff_seconds)

    # The choice

    def place(self, routed: RoutedRequest, now: Instant, closed: Closed) -> Choice | ClusterShortage:
        """Choose for one request. Call Roster.refresh before."""
        if not self.membership.any_could(routed.tokens_max, routed.unfit):
            return (
                ClusterShortage.LOST
                if self.membership.lost_could(routed.tokens_max, routed.unfit, now)
                else ClusterShortage.NEVER
            )
        census = self.census(routed, now)
        if census is None:
            return ClusterShortage.NOBODY
        if not census.settled and not census.inhibited:
            return ClusterShortage.AVOIDED
        return DecoderChoice(self, routed, now, closed, census).choice()

    def census(self, routed: RoutedRequest, now: Instant) -> Census | None:
        """Number of instances for the request. Counted anew when an instance becomes usable or unusable; requests of one size
        class share it."""
        if routed.unfit or routed.avoided:
            return self._counted(routed, now)
        if self._counted_at != self.roster.usable_version:
            self._counted_at = self.roster.usable_version
            self._counts_of.clear()
        tokens, tokens_max = routed.tokens, routed.tokens_max
        key = (routed.tokens_left <= 1, self.roster.size_class(tokens_max), self.roster.size_class(tokens + 1))
        if key not in self._counts_of:
            self._counts_of[key] = self._counted(routed, now)
        return self._counts_of[key]

    def _counted(self, routed: RoutedRequest, now: Instant) -> Census | None:
        roles = self.roles(routed)
        if roles is None:
            return None
        settled, inhibited = (self._left(routed, roles.all, routed.tokens_max, each, now) for each in (True, False))
        decodes = self._left(routed, ("decode",), routed.tokens_max, settled > 0, now)
        prefills, other = (self._left(routed, (PEER,), routed.tokens + 1, each, now) for each in (True, False))
        return Census(roles, settled, inhibited, decodes, prefills or other, prefills_settled=prefills > 0)

    def roles(self, routed: RoutedRequest) -> Roles | None:
        """Roles for the request. None: no usable instance could hold it."""
        alone = self._able(routed, ("prefill",), routed.tokens_max)
        decoders = self._able(routed, ("mixed", "decode"), routed.tokens_max)
        if routed.tokens_left <= 1 and alone:
            return Roles((("prefill", "mixed"), ("decode",)), pairs=False)
        if decoders:
            return Roles((("mixed", "decode"),), pairs=self._able(routed, (PEER,), routed.tokens + 1) > 0)
        return Roles((("prefill",),), pairs=False) if alone else None

    def _able(self, routed: RoutedRequest, roles: Sequence[str], tokens: int) -> int:
        """Number of usable instances that could hold `tokens` of the request."""
        roster = self.roster
        able = roster.able(roles, tokens, settled=True) + roster.able(roles, tokens, settled=False)
        return able - sum(self._counts(name, roles, tokens) is not None for name in routed.unfit)

    def _left(self, routed: RoutedRequest, roles: Sequence[str], tokens: int, settled: bool, now: Instant) -> int:
        """Number of able instances that the request does not avoid."""
        left = self.roster.able(roles, tokens, settled=settled)
        for name in routed.exceptions(now):
            if self._counts(name, roles, tokens) is settled:
                left -= 1
        return left

    def _counts(self, name: str, roles: Sequence[str], tokens: int) -> bool | None:
        """Whether the instance is settled, if it counts among the usable ones of these roles. None: it does not count."""
        instance = self.membership.names.get(name)
        if instance is None or instance.place is None or instance.capacity < tokens:
            return None
        counted = instance.hello.role in roles or (PEER in roles and instance.place.prompt_tokens >= 0)
        return instance.place.settled if counted else None

    # Hand-off or not

    def stays(self, instance: ClusterInstance, uncached: int, *, prefill: bool) -> bool:
        """Whether computing the prompt at its decode instance is cheaper than a hand-off. Now and then one is handed over all
        the same, if a `prefill` instance has room: otherwise the cost would never be measured again, and one slow hand-off
        would be the last."""
        policy = self.config.handoff
        if policy != "auto" or uncached < self.config.handoff_tokens_min:
            return policy != "always"
        due = self._stayed + 1 >= self.config.handoff_retry_interval
        return self._is_cheaper(instance, uncached) and not (due and prefill)

    def _is_cheaper(self, instance: ClusterInstance, uncached: int) -> bool:
        return 0 < uncached * instance.beat.token_seconds < self.handoff_seconds

    def depth_to_stay(self, tokens: int, size: int) -> int:
        """Least number of leading cached blocks with which an instance computes the prompt of a hand-off itself."""
        config = self.config
        if config.handoff != "auto":
            return NEVER_DEEP if config.handoff == "always" else 0
        most = max(config.handoff_tokens_min - 1, -int(-self.handoff_seconds // self.roster.fastest) if self._measured else 0)
        return max(0, -(-(tokens - most) // size)) if most >= 1 else NEVER_DEEP

    @property
    def _measured(self) -> bool:
        return self.roster.fastest < float("inf")

    def whole_at(self, routed: RoutedRequest) -> Instant:
        """Time when a hand-off without room may wait at a decode instance instead."""
        since = routed.no_room_since
        return Instant(float("inf") if since is None else since + self.config.handoff_room_seconds)

    def may_wait_whole(self, routed: RoutedRequest, now: Instant) -> bool:
        return now >= self.whole_at(routed)

    def chosen(self, choice: Choice, *, pairs: bool) -> Choice:
        """Record the choice and return it."""
        config = self.config
        self._turn += 1
        for instance in (choice.decoder, choice.prefill):
            if instance is not None:
                instance.chosen = self._turn
                self.roster.touch(instance)
        if pairs and config.handoff == "auto" and choice.decoder.hello.role == "decode":
            if choice.prefill is not None:
                self._stayed = 0
            elif choice.uncached >= config.handoff_tokens_min and self._is_cheaper(choice.decoder, choice.uncached):
                self._stayed += 1
        return choice

    # Cached prefixes

    def remember(self, instance: ClusterInstance, routed: RoutedRequest, tokens: Sequence[int]) -> None:
        """Record the guess that the instance has these tokens of the request, or will have them soon."""
        marks = self.marks(routed)
        if len(tokens) > len(routed.request.prompt):
            keys = list(routed.keys)
            self._extend(keys, routed, tokens)
            marks = marks_of(keys)
        self.index.guess(instance.number, marks)
        if instance.hello.role == "decode":
            self.on_cached([key for _, key in marks])

    def publish(self, instance: ClusterInstance, message: CachedKeys) -> int:
        """Record a report of the instance's cache. Returns how many of its keys exceed its share."""
        added, removed = short_keys(message.added), short_keys(message.removed)
        cut = self.index.publish(instance.number, whole=message.whole, added=added, removed=removed)
        if instance.hello.role == "decode":
            self.on_cached(added)
        return cut

    def marks(self, routed: RoutedRequest) -> list[Mark]:
        """The marked blocks of the prompt."""
        hello = next(iter(self.membership.instances.values())).hello
        hasher = self._hasher
        if hasher is None or (hasher.fingerprint, hasher.block_size) != (hello.ready.identity, hello.ready.block_size):
            hasher = self._hasher = BlockHasher(hello.ready.identity, hello.ready.block_size)
        if routed.hasher is not hasher:
            routed.hasher, routed.keys = hasher, []
            self._extend(routed.keys, routed, routed.request.prompt)
            routed.marks = marks_of(routed.keys)
        return routed.marks

    def _extend(self, keys: list[BlockKey], routed: RoutedRequest, tokens: Sequence[int]) -> None:
        hasher = routed.hasher
        if hasher is not None:
            blocks = min(len(tokens) // hasher.block_size, self.config.prefix_blocks_max)
            hasher.extend(keys, hasher.root(routed.request.salt), tokens, blocks, routed.request.extras)
