"""The prefix cache, computed again: which blocks are cached under which content, their holders, and the order of eviction.

Small and slow on purpose. Content is named by the tag of a block's last token, which stands for everything before it. Known
from outside are plans (assigned blocks), absorbed steps (computed, and so cached blocks) and ends (released blocks). If two
sequences compute the same block in one event, the instance is asked which of the two is cached: either may be.

Times are counted in events and plans, so blocks released together are equal here: any of them may be evicted first. Only for
instances without lower tiers: those bring and take blocks that no plan names.
"""

from __future__ import annotations

from baton.core.engine.view import SchedulerView
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId
from baton.sim.scenario import Scenario
from baton.sim.simulated_request import SimulatedRequest

Key = tuple[int, int]
"""Content of a block: (name space, tag)."""
ORDER_CHECK_EVERY = 4
"""Evictions between two checks against all other candidates."""


class Held:
    """The blocks of one sequence on the worker."""

    __slots__ = ("blocks", "client_request", "computed", "incarnation", "index", "last")

    def __init__(
        self, client_request: SimulatedRequest, index: int, incarnation: int, blocks: list[BlockId], computed: int
    ) -> None:
        self.client_request = client_request
        self.index = index
        self.incarnation = incarnation
        self.last = len(client_request.client.prompt) + client_request.client.max_tokens - 1
        "Number of positions that the sequence may compute."
        self.blocks = blocks
        self.computed = computed
        "Leading blocks that are computed, and so cached."


class CacheModel:
    def __init__(self, scenario: Scenario, view: SchedulerView) -> None:
        self.held: dict[int, Held] = {}
        "Sequences on the worker, by slot."
        self._scenario = scenario
        self._view = view
        self._size = scenario.block_size
        self._references = [0] * scenario.blocks
        self._block_of: dict[Key, BlockId] = {}
        self._key_of: dict[BlockId, Key] = {}
        self._parent: dict[BlockId, Key | None] = {}
        self._children: dict[Key, int] = {}
        self._last_used = [0] * scenario.blocks
        self._hits = [0] * scenario.blocks
        self._evictions = 0
        self._in_use = 0
        self.tick = 0
        self.fresh: dict[BlockId, None] = {}
        "Blocks released by the current plan. Whether they were released before or after a block was taken is not visible."

    # Questions

    @property
    def available(self) -> int:
        """Number of blocks without a holder."""
        return self._scenario.blocks - self._in_use

    def is_held(self, block: BlockId) -> bool:
        return self._references[block] > 0

    def references(self, block: BlockId) -> int:
        return self._references[block]

    def key(self, client_request: SimulatedRequest, index: int, place: int) -> Key:
        """Key of the content of the sequence's block number `place`."""
        space = 0 if self._scenario.prefix_caching else client_request.orders[0][1]
        return space, client_request.oracles[index].tag((place + 1) * self._size - 1)

    def hits(self, client_request: SimulatedRequest, index: int) -> list[BlockId]:
        """The cached blocks that the sequence could begin with: all but the one with its last token."""
        known = len(client_request.client.prompt) + len(client_request.delivered[index])
        if client_request.client.prompt_logprobs is not None and index == 0 and known == len(client_request.client.prompt):
            return []
        found: list[BlockId] = []
        for place in range((known - 1) // self._size):
            block = self._block_of.get(self.key(client_request, index, place))
            if block is None:
                break
            found.append(block)
        return found

    # Changes

    def admit(self, slot: int, incarnation: int, place: tuple[SimulatedRequest, int], blocks: list[BlockId], hit: int) -> None:
        client_request, index = place
        expected = self.hits(client_request, index)
        if blocks[:hit] != expected:
            raise InvariantBroken(f"{client_request.name}.{index} hits {hit} blocks, {len(expected)} are cached", invariant=14)
        for block in blocks[:hit]:
            self._hits[block] += 1
            self._hold(block)
        self.take(blocks[hit:])
        self.held[slot] = Held(client_request, index, incarnation, blocks, hit)

    def grow(self, slot: int, block: BlockId) -> None:
        self.take([block])
        self.held[slot].blocks.append(block)

    def take(self, blocks: list[BlockId]) -> None:
        """Take free blocks, or evicted ones in the order of the policy."""
        evicted = [block for block in blocks if block in self._key_of]
        if evicted:
            self.evict(evicted)
        for block in blocks:
            self._hold(block)

    def compute(self, slot: int, tokens: int) -> bool:
        """Record that the first `tokens` are computed: full blocks are cached, or folded onto cached ones. False: not all
        yet."""
        held = self.held[slot]
        for place in range(held.computed, tokens // self._size):
            own, key = held.blocks[place], self.key(held.client_request, held.index, place)
            first = self._block_of.get(key)
            if first is None and self._view.is_cached(own):
                self._insert(own, key, self.key(held.client_request, held.index, place - 1) if place else None)
            elif first is not None and first != own:
                held.blocks[place] = first
                self._hits[first] += 1
                self._hold(first)
                self._drop_holder(own)
            elif first is None:
                return False  # another sequence has the same block, and its copy is cached
            held.computed = place + 1
        return True

    def release(self, slot: int) -> None:
        held = self.held.pop(slot, None)
        for block in held.blocks if held is not None else ():
            self._drop_holder(block)

    def release_all(self) -> None:
        for slot in list(self.held):
            self.release(slot)

    def sync(self, *, everything: bool = False, kept: bool = False, in_order: bool = False) -> None:
        """Adopt evictions that no plan shows. `everything`: no idle block may be left; `kept`: none may be evicted."""
        gone = [block for block in self._key_of if not self._view.is_cached(block)]
        if everything and len(gone) < len(self._key_of):
            raise InvariantBroken("the cache of a pool that is gone is believed", invariant=12)
        if kept and gone:
            raise InvariantBroken("the cache of a pool that was kept is thrown away", invariant=14)
        if in_order:
            self.evict(gone)
            return
        for block in gone:
            self._forget(block)

    def evict(self, blocks: list[BlockId]) -> None:
        """Evict these blocks. 15: no held block is evicted. 20: each is a leaf, and the policy ranks no other candidate
        lower."""
        left = dict.fromkeys(blocks)
        while left:
            leaves = [block for block in left if not self._children.get(self._key_of[block])]
            if not leaves or any(self._references[block] for block in left):
                raise InvariantBroken(f"blocks {list(left)} are evicted, and held or not leaves", invariant=15)
            first = min(leaves, key=self._rank)
            self._evictions += 1
            if self._evictions % ORDER_CHECK_EVERY == 0:
                self._check_order(first)
            self._forget(first)
            del left[first]

    def _check_order(self, evicted: BlockId) -> None:
        rank = self._rank(evicted)
        for block, key in self._key_of.items():
            idle_leaf = not self._references[block] and not self._children.get(key)
            if idle_leaf and block not in self.fresh and self._rank(block) < rank:
                raise InvariantBroken(f"block {evicted} is evicted before block {block}", invariant=20)

    def _rank(self, block: BlockId) -> tuple[int, ...]:
        used = self._last_used[block]
        return (used,) if self._scenario.eviction == "lru" else (self._hits[block], used)

    # Holders

    def _hold(self, block: BlockId) -> None:
        self._references[block] += 1
        self._in_use += self._references[block] == 1

    def _drop_holder(self, block: BlockId) -> None:
        self._references[block] -= 1
        if not self._references[block]:
            self._in_use -= 1
            self._last_used[block] = self.tick
            self.fresh[block] = None

    def _insert(self, block: BlockId, key: Key, parent: Key | None) -> None:
        self._block_of[key], self._key_of[block] = block, key
        self._parent[block] = parent
        self._hits[block] = 0
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1

    def _forget(self, block: BlockId) -> None:
        key, parent = self._key_of.pop(block), self._parent.pop(block)
        del self._block_of[key]
        if parent is not None:
            self._children[parent] -= 1
