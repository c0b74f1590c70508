"""Settings of single ranks, from those of their set."""

from __future__ import annotations

from baton.config import EngineConfig, WorkerConfig
from baton.runtime.processes.process_table import ENGINE_CHILDREN

ROWS = {row.name: row for row in ENGINE_CHILDREN}


def engine_of(ranks: int) -> EngineConfig:
    peer = "\n".join(f"unix:/{rank} tcp:10.0.0.1:{8200 + rank}" for rank in range(ranks))
    return EngineConfig(worker=WorkerConfig(ranks=ranks, device_index=1, rendezvous="/run/set"), peer=peer)


def test_each_rank_has_a_gpu_and_addresses_of_its_own_and_its_cache_service_the_same():
    """By the number of its rank a service cuts the model and names what it stores."""
    engine = engine_of(2)
    workers, caches = ([ROWS[name].of_rank(ROWS[name].config(engine, 3), rank) for rank in range(2)] for name in ROWS)
    assert [worker.rank for worker in workers] == [cache.worker.rank for cache in caches] == [0, 1]
    assert [worker.gpu_index for worker in workers] == [cache.worker.gpu_index for cache in caches] == [2, 3]
    assert [cache.peer for cache in caches] == ["unix:/0 tcp:10.0.0.1:8200", "unix:/1 tcp:10.0.0.1:8201"]
    assert [ROWS[name].ranks(engine) for name in ROWS] == [2, 2]


def test_a_set_meets_in_a_directory_of_its_epoch_and_its_pools_are_of_one_set():
    engine = engine_of(2)
    first, second = (ROWS["worker"].config(engine, life) for life in (1, 2))
    assert (first.rendezvous, second.rendezvous) == ("/run/set/1", "/run/set/2")
    assert (first.epoch, second.epoch) == (1, 2)
    assert 0 != first.pool_incarnation != second.pool_incarnation != 0
    alone = ROWS["worker"].config(engine_of(1), 2)
    assert (alone.epoch, alone.pool_incarnation) == (2, 0)
