"""Messages of all ranks of a child, as those of one."""

from __future__ import annotations

import pytest

from baton.core.rank_messages import CacheRanks, WorkerRanks
from baton.errors import PeerError
from baton.protocol.control import CacheHello, CacheStats, LoadProgress, Pong, WorkerHello
from baton.protocol.moves import MoveResult
from baton.protocol.pool import PoolSized


def test_a_copy_of_all_ranks_counts_once_and_its_bytes_are_added():
    """Each rank counted every copy and every stored block, so two ranks showed twice as many."""
    cache = CacheRanks(2)
    storage = {"hits": 5, "misses": 1, "bytes_read": 100}
    cache.combined(0, CacheStats(storage, {"unix/copied": 3}, {"unix": 50}, {"unix": 7}, {"unix/reading": 1}, 4))
    found = cache.combined(
        1,
        CacheStats({"hits": 4, "misses": 2, "bytes_read": 90}, {"unix/copied": 3, "unix/late": 1}, {"unix": 60}, {"unix": 9}),
    )
    assert found == CacheStats(
        {"hits": 5, "misses": 2, "bytes_read": 190},
        {"unix/copied": 3, "unix/late": 1},
        {"unix": 110},
        {"unix": 9},
        {"unix/reading": 1},
        4,
    )


def test_a_set_of_cache_services_kept_its_memory_if_all_ranks_did():
    for kept in ((True, True), (True, False), (False, True)):
        cache = CacheRanks(2)
        assert cache.combined(0, CacheHello(1, 8, kept[0])) is None
        assert cache.combined(1, CacheHello(2, 8, kept[1])) == CacheHello(1, 8, all(kept))
    cache = CacheRanks(2)
    cache.combined(0, CacheHello(1, 8, True))
    with pytest.raises(PeerError, match="rank 1 has 7 host blocks, and rank 0 8"):
        cache.combined(1, CacheHello(2, 7, True))


def test_answers_to_different_moves_are_not_mixed():
    cache = CacheRanks(2)
    assert cache.combined(0, MoveResult(1, 5)) is cache.combined(0, MoveResult(2, 5)) is None
    assert cache.combined(1, MoveResult(2, 3)) == MoveResult(2, 3)
    assert cache.combined(1, MoveResult(1, 4)) == MoveResult(1, 4)


def test_a_hello_of_an_earlier_epoch_is_none_of_the_set():
    worker, hello = WorkerRanks(2), WorkerHello(4, 8, 16, 100, 64)
    assert worker.combined(0, hello) is None
    with pytest.raises(PeerError, match="rank 1 has another epoch than rank 0: 3 instead of 4"):
        worker.combined(1, WorkerHello(3, 8, 16, 100, 64))


def test_the_nth_pongs_of_all_ranks_are_one():
    worker = WorkerRanks(2)
    assert worker.combined(0, Pong(7)) is worker.combined(0, Pong(8)) is None
    assert [worker.combined(1, Pong(7)), worker.combined(1, Pong(8))] == [Pong(7), Pong(8)]


def test_the_pool_is_made_when_all_ranks_want_one_of_the_same_size():
    for sizes in ((8, 8), (8, 7)):
        worker, (first, second) = WorkerRanks(2), (PoolSized(blocks, b"layout") for blocks in sizes)
        assert worker.combined(0, first) is None
        if first == second:
            assert worker.combined(1, second) == first
        else:
            with pytest.raises(PeerError, match="rank 1 wants a KV pool of 7 blocks, and rank 0 of 8"):
                worker.combined(1, second)


def test_rank_0_reports_the_progress_of_loading():
    """Each rank loads as much: progress of both would jump back and forth."""
    worker, progress = WorkerRanks(2), LoadProgress(3, 9)
    assert worker.combined(0, progress) is progress
    assert worker.combined(1, progress) is None
