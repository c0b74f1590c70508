"""Token ids of blocks. Kept only for a storage backend that finds blocks by their token ids.

A key does not reveal its tokens, and a put may follow long after its request has ended. So each block of device and host has a
link: its own ids, and the key of its parent. The ids of a whole prefix are found by following the links to the start:

    put k3, k4        k4 --> k3 --> k2 --> k1 --> k0          ids of k0 ... k4, of which the last two blocks are meant
    where it is       host   host   host   device device

At most one link per block: memory grows with the tiers and not with the traffic. The price is that a chain may have a gap,
where neither tier has a block any more. Blocks behind a gap cannot be named by their ids and are not put.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton.core.kv.host_tier import HostTier
from baton.core.kv.prefix_cache import PrefixCache
from baton.protocol.ids import BlockId, BlockKey, HostBlockId
from baton.protocol.moves import pack_tokens


class ChainLink(NamedTuple):
    place: int
    "Number of blocks before this one in its chain."
    parent: BlockKey
    "Key of the previous block. Unused at place 0."
    ids: bytes
    "The block's own token ids, packed as in messages."


class TokenChain(NamedTuple):
    """Token ids of consecutive keys of one chain."""

    before: bytes
    "Packed ids of all blocks before the first key."
    links: tuple[ChainLink, ...]
    "Links, one per key."

    def first(self, count: int) -> TokenChain:
        return TokenChain(self.before, self.links[:count])

    def tokens(self) -> bytes:
        """Packed ids from the start of the sequence to the end of the last block."""
        return self.before + b"".join(link.ids for link in self.links)


NO_RUN = TokenChain(b"", ())
"""Stands for the token ids if a storage backend does not want them."""


class TokenLinks:
    def __init__(self, cache: PrefixCache, host: HostTier, block_size: int) -> None:
        self._cache = cache
        self._host = host
        self._size = block_size
        # Indexed by block. A link stays when its block is evicted, until another one is published or inserted there; links are
        # looked up through the index of a tier, and by generation, so a stale link is never found.
        self._of_device: list[ChainLink | None] = [None] * cache.pool.total
        self._of_host: list[ChainLink | None] = [None] * host.total

    # Links of blocks

    def published(self, keys: Sequence[BlockKey], place: int, block: BlockId, tokens: Sequence[int]) -> None:
        """Record that a sequence with these tokens has published this block under keys[place]."""
        self._of_device[block] = self._link(keys, place, tokens)

    def on_device(self, block: BlockId) -> ChainLink | None:
        """The link of a block that was published and not reassigned since."""
        return self._of_device[block]

    def inserted(self, block: HostBlockId, link: ChainLink | None) -> None:
        """Record that the host tier has the block. None: its ids are unknown, because it was computed before they were
        wanted."""
        self._of_host[block] = link

    def _link(self, keys: Sequence[BlockKey], place: int, tokens: Sequence[int]) -> ChainLink:
        own = tokens[place * self._size : (place + 1) * self._size]
        return ChainLink(place, keys[place - 1] if place else BlockKey(b""), pack_tokens(own))

    def _of(self, key: BlockKey) -> ChainLink | None:
        link = None
        if (on_host := self._host.block_of(key)) is not None:
            link = self._of_host[on_host]
        if link is None and (on_device := self._cache.block_of(key)) is not None:
            link = self._of_device[on_device]
        return link

    # Chains for messages

    def chain_of(self, keys: Sequence[BlockKey], begin: int, end: int, tokens: Sequence[int]) -> TokenChain:
        """The chain of keys[begin:end] of a sequence with these tokens."""
        before = pack_tokens(tokens[: begin * self._size])
        return TokenChain(before, tuple(self._link(keys, place, tokens) for place in range(begin, end)))

    def runs(self, keys: Sequence[BlockKey]) -> list[tuple[list[BlockKey], TokenChain]]:
        """Split the keys into chains: in each, the parent of a key is before it. Keys behind a gap are left out."""
        known = {key: link for key in keys if (link := self._of(key)) is not None}
        chains: list[list[BlockKey]] = []
        by_last: dict[BlockKey, list[BlockKey]] = {}
        for key, link in sorted(known.items(), key=lambda entry: entry[1].place):
            chain = by_last.pop(link.parent, None) if link.place else None
            if chain is None:
                chain = []
                chains.append(chain)
            chain.append(key)
            by_last[key] = chain
        found: list[tuple[list[BlockKey], TokenChain]] = []
        for chain in chains:
            before = self._before(known[chain[0]])
            if before is not None:
                found.append((chain, TokenChain(before, tuple(known[key] for key in chain))))
        return found

    def _before(self, link: ChainLink) -> bytes | None:
        """Packed ids of all blocks before this one. None: there is a gap."""
        parts: list[bytes] = []
        while link.place:
            parent = self._of(link.parent)
            if parent is None:
                return None
            parts.append(parent.ids)
            link = parent
        return b"".join(reversed(parts))
