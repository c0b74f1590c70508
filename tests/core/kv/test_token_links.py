"""Links from block to block: what a chain of them says, and where it ends."""

from __future__ import annotations

import pytest

from baton.core.kv.block_hash import BlockHasher
from baton.core.kv.block_pool import BlockPool
from baton.core.kv.eviction import POLICIES
from baton.core.kv.host_tier import HostTier
from baton.core.kv.prefix_cache import PrefixCache
from baton.core.kv.token_links import TokenLinks
from baton.protocol.moves import pack_tokens, unpack_tokens

SIZE = 2
TOKENS = list(range(100, 112))  # six blocks


class Books:
    """A chain on the device, all of it held by one table."""

    def __init__(self, blocks: int = 16) -> None:
        self.cache = PrefixCache(BlockPool(blocks), POLICIES["lru"])
        self.host = HostTier(blocks)
        self.links = TokenLinks(self.cache, self.host, SIZE)
        self.hasher = BlockHasher(b"", SIZE)

    def keys(self, tokens: list[int]) -> list:
        keys: list = []
        self.hasher.extend(keys, self.hasher.root(b""), tokens, len(tokens) // SIZE)
        return keys

    def publish(self, tokens: list[int]) -> list:
        keys = self.keys(tokens)
        hit = self.cache.match(keys, len(keys))
        table = self.cache.acquire(keys[:hit]) + self.cache.take(len(keys) - hit)
        for place in range(hit, len(keys)):
            assert self.cache.publish(keys, table, place)
            self.links.published(keys, place, table[place], tokens)
        self.cache.release(table)
        return keys

    def copy(self, keys: list) -> None:
        """To the host."""
        for key in keys:
            (block,) = self.host.take(1)
            self.links.inserted(block, self.links.on_device(self.cache.block_of(key)))
            self.host.insert(key, block)

    def runs(self, keys: list) -> list:
        return [(chain, list(unpack_tokens(run.tokens()))) for chain, run in self.links.runs(keys)]


@pytest.fixture
def books() -> Books:
    return Books()


def test_tokens_come_back_as_they_were_packed():
    assert unpack_tokens(pack_tokens([0, 7, 2**32 - 1])) == (0, 7, 2**32 - 1)
    assert pack_tokens([1, 256]) == b"\x01\0\0\0\0\x01\0\0"


def test_keys_in_any_order_are_one_run(books):
    keys = books.publish(TOKENS)
    assert books.runs([keys[4], keys[3], keys[5]]) == [(keys[3:], TOKENS)]


def test_a_hole_begins_another_run(books):
    keys = books.publish(TOKENS)
    assert books.runs([keys[0], keys[1], keys[4]]) == [(keys[:2], TOKENS[:4]), ([keys[4]], TOKENS[:10])]


def test_a_branch_begins_another_run(books):
    keys = books.publish(TOKENS)
    other = [*TOKENS[:4], 1, 2, 3, 4]
    branch = books.publish(other)
    assert books.runs([*keys[2:4], *branch[2:]]) == [(keys[2:4], TOKENS[:8]), (branch[2:], other)]


def test_a_chain_is_followed_over_both_tiers(books):
    keys = books.publish(TOKENS)
    books.copy(keys[2:])
    books.cache.evict(3)  # leaves first: the device has the first three
    assert books.cache.block_of(keys[3]) is None
    assert books.runs(keys[4:]) == [(keys[4:], TOKENS)]


def test_behind_a_gap_nothing_has_a_name(books):
    keys = books.publish(TOKENS)
    books.copy(keys[3:])
    books.cache.evict(4)  # the third is nowhere
    assert books.runs(keys[3:]) == []
    assert books.runs(keys[:2]) == [(keys[:2], TOKENS[:4])]


def test_a_block_that_is_used_again_has_the_ids_of_its_new_content():
    books = Books(blocks=6)
    books.publish(TOKENS)
    other = [token + 50 for token in TOKENS]
    keys = books.publish(other)
    assert books.runs(keys) == [(keys, other)]
    assert books.runs(books.keys(TOKENS)) == []


def test_a_host_block_without_a_link_is_asked_of_the_device(books):
    keys = books.publish(TOKENS)
    (block,) = books.host.take(1)
    books.links.inserted(block, None)
    books.host.insert(keys[0], block)
    assert books.runs(keys[:2]) == [(keys[:2], TOKENS[:4])]


def test_what_is_asked_for_can_be_cut(books):
    keys = books.keys(TOKENS)
    run = books.links.chain_of(keys, 2, 6, TOKENS)
    assert unpack_tokens(run.tokens()) == tuple(TOKENS)
    assert unpack_tokens(run.first(1).tokens()) == tuple(TOKENS[:6])
    assert [link.place for link in run.links] == [2, 3, 4, 5]
    assert run.links[0].parent == keys[1]
