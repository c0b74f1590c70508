"""The books of the host pool: what is evicted, what is not, and in which order."""

import pytest

from baton.core.kv.host_tier import HostTier
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey


def key(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 32)


def filled(count: int, total: int) -> HostTier:
    host = HostTier(total)
    for number in range(count):
        (block,) = host.take(1)
        host.insert(key(number), block)
    return host


def names(host: HostTier) -> list[int]:
    return [found[0] for found in host.index()]


def test_the_one_used_longest_ago_goes_first():
    host = filled(4, total=4)
    host.touch([key(0)])
    assert len(host.take(2)) == 2
    assert names(host) == [3, 0]
    assert host.evicted == 2


def test_the_end_of_a_chain_goes_before_its_beginning():
    host = filled(4, total=4)
    host.touch([key(0), key(1), key(2), key(3)])
    host.evict(2)
    assert names(host) == [1, 0], "a hole at the beginning makes all behind it useless"


def test_what_is_being_read_stays_and_the_next_one_goes():
    host = filled(3, total=3)
    pinned = host.pin([key(0)])
    host.evict(1)
    assert names(host) == [0, 2]
    host.unpin(pinned)
    host.evict(1)
    assert names(host) == [2]


def test_what_is_being_written_to_storage_is_not_chosen_for_it_again():
    host = filled(3, total=3)
    putting = host.pin([key(0)])
    assert host.oldest_unstored(2) == [key(1), key(2)]
    host.unpin(putting)
    assert host.oldest_unstored(2) == [key(0), key(1)]


def test_no_more_is_handed_out_than_nobody_reads_or_writes():
    host = filled(2, total=3)
    host.pin([key(0)])
    assert len(host.take(3)) == 2
    assert host.take(1) == []
    assert names(host) == [0]


def test_a_second_copy_of_a_block_is_not_kept():
    host = filled(1, total=2)
    (block,) = host.take(1)
    first = host.block_of(key(0))
    host.insert(key(0), block, stored=True)
    assert host.block_of(key(0)) == first
    assert host.free == 1
    host.check({}, {})


def test_a_block_that_is_used_again_is_not_on_storage():
    host = filled(1, total=1)
    block = host.block_of(key(0))
    assert block is not None
    host.mark_stored(block)
    assert host.oldest_unstored(1) == []
    host.take(1)
    host.insert(key(1), block)
    assert not host.is_stored(key(1))
    assert host.oldest_unstored(1) == [key(1)]


def test_a_hole_ends_a_run():
    host = filled(4, total=4)
    host.evict(1)
    assert host.run([key(n) for n in range(4)], 0, 4) == 0
    assert host.run([key(n) for n in range(4)], 1, 4) == 3
    assert host.run([key(n) for n in range(4)], 1, 3) == 2


def test_it_is_not_cleared_under_a_move():
    host = filled(2, total=3)
    pinned = host.pin([key(1)])
    with pytest.raises(InvariantBroken):
        host.clear()
    host.unpin(pinned)
    host.clear()
    assert (len(host), host.free) == (0, 3)
