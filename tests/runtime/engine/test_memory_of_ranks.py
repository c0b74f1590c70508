"""What a rank gets from its engine and what it takes from the machine: the memory of its own set, and a pool at its turn."""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.config import WorkerConfig
from baton.errors import ProtocolError
from baton.protocol.control import CollectiveShared
from baton.protocol.ids import PoolIncarnation, WorkerEpoch
from baton.protocol.pool import of_rank, set_incarnation
from baton.runtime.wire.descriptors import send_descriptor
from baton.runtime.worker.process import WorkerPool, shared_by_ranks

BASE = set_incarnation(5)


def config_of(folder: Path) -> WorkerConfig:
    return WorkerConfig(
        rank=1, ranks=2, epoch=3, rendezvous=str(folder / "3"), pool_incarnation=int(BASE), start_seconds_max=5.0
    )


@pytest.mark.parametrize(
    ("message", "ok"),
    [
        (CollectiveShared(WorkerEpoch(3), 2), True),
        (CollectiveShared(WorkerEpoch(2), 2), False),
        (CollectiveShared(WorkerEpoch(3), 3), False),
    ],
    ids=["own", "of the set before", "of another size"],
)
def test_a_rank_takes_the_memory_of_its_own_set(tmp_path: Path, message: CollectiveShared, ok: bool):
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        fd = os.memfd_create("ranks")
        send_descriptor(ours, message, fd)
        os.close(fd)
        if ok:
            os.close(shared_by_ranks(config_of(tmp_path), theirs))
            assert (tmp_path / "3").is_dir(), "the first rank makes the place where they meet"
        else:
            with pytest.raises(ProtocolError, match="not the memory that 2 ranks share"):
                shared_by_ranks(config_of(tmp_path), theirs)
        assert len(os.listdir("/proc/self/fd")) == before, "no descriptor is kept"


def test_rank_0_removes_the_directories_of_earlier_sets(tmp_path: Path):
    """They stayed: one for every loss, sleep and load of weights."""
    config = replace(config_of(tmp_path), rank=0)
    (tmp_path / "memory.lock").touch()
    for epoch in (1, 2):
        (tmp_path / str(epoch)).mkdir()
        (tmp_path / str(epoch) / "ranks").touch()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fd = os.memfd_create("ranks")
        send_descriptor(ours, CollectiveShared(WorkerEpoch(3), 2), fd)
        os.close(fd)
        os.close(shared_by_ranks(config, theirs))
    assert {path.name for path in tmp_path.iterdir()} == {"3", "memory.lock"}


def test_a_rank_reserves_its_pool_while_no_other_does(tmp_path: Path):
    """Both would find the room that only one of them has."""
    config = config_of(tmp_path)
    os.makedirs(config.rendezvous)
    made: list[PoolIncarnation] = []

    def create_pool(layout: Any, blocks: int, incarnation: PoolIncarnation) -> None:
        with (Path(config.rendezvous) / "memory.lock").open("w") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        made.append(incarnation)

    nothing: Any = None
    pool = WorkerPool(config, nothing, nothing)
    pool._create(SimpleNamespace(create_pool=create_pool), nothing, 8)  # type: ignore[arg-type]
    assert made == [of_rank(BASE, 1)]
