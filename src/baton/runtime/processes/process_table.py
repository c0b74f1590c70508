"""The children of supervisor and engine, a row each. child_set.py performs the rows.

    supervisor
      |-- engine    the instance machine               ends: when the front's channel closes
      |     |-- worker    the model                    ends: with the engine
      |     `-- cache     tiers and hand-off           ends: with the engine
      `-- front     HTTP, tokenizer                    ends: drains, then closes the engine's channel
            `-- templates, grammars, large JSON        end: with the front (text/helper.py)

Every child has a control channel to its parent, which sees its end there at once, and may ping it (silence_watch.py). Its row
lists the other sockets. core/startup.py decides which of the engine's children are started, and in what order.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from baton.config import CacheConfig, EngineConfig, ServeConfig, WorkerConfig
from baton.core.child_silence import SILENT_SECONDS_MAX
from baton.protocol.pool import set_incarnation

CONTROL: Final = "control"
"""Name of the socket to the parent process."""
DESCRIPTORS: Final = "descriptors"
"""Name of the socket over which descriptors pass between child and parent (descriptors.py)."""

QUIET_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0", "OPENBLAS_NUM_THREADS": "1"}
"""Environment in which the worker's threads sleep while they wait: on few cores spinning threads take others' time."""

KILL_SECONDS = 10.0
"""Seconds in which an engine ends after its front; a front ends within this time of the end of its draining."""


ParentConfig = TypeVar("ParentConfig")


KILLED_BELOW: Final = 75
"""Exit status (EX_TEMPFAIL) of a process that could not start because a child of it was killed from outside."""


class Restart(Enum):
    """Rule for the end of a child that was ready. A child that was not ready ends the start."""

    NEVER = "never"
    "The end of the child ends its parent."
    IF_KILLED = "if killed"
    "Restart if a signal ended it or its start (KILLED_BELOW), up to a number in a row. Else as NEVER."
    IF_FAILED = "if failed"
    "Restart if a signal or its own error ended it, however often: its siblings work, and wait for it. Else as NEVER."
    ALWAYS = "always"
    "Restart however it ended and however often. Its parent keeps running."
    ORDERED = "ordered"
    "The parent's machine decides when another child is started."


@dataclass(frozen=True, kw_only=True, slots=True)
class ChildRow(Generic[ParentConfig]):
    name: str
    module: str
    "Module that the child runs: python -m module."
    config: Callable[[ParentConfig, int], object]
    "Settings of the child, from its parent's and the number of this life."
    restart: Restart
    ranks: Callable[[ParentConfig], int] = lambda config: 1
    "Number of processes of this row: a set that lives and dies together (child.py)."
    of_rank: Callable[[Any, int], object] = lambda settings, rank: settings
    "Settings of one rank, from those of the set."
    peers: tuple[str, ...] = ()
    """Children of the same parent, from rows above, to which it has a channel. A restarted peer is passed to it as a PeerSocket
    on the descriptor socket."""
    descriptors: bool = False
    "Whether the child has a descriptor socket to its parent."
    environment: Mapping[str, str] = field(default_factory=dict)
    silent_seconds_max: float | None = None
    """Seconds without an answer to a ping after which the child is killed (core/child_silence.py). None: its parent
    watches its work (a worker's steps, a cache service's moves), and either may block for long: neither is pinged."""
    exit_seconds: float = 5.0
    "Seconds after the close of its channel in which it may exit by itself, so that its exit status is known."
    terminated: bool = False
    "Whether it is asked to end by SIGTERM. Else by the end of its control channel."
    end_seconds: Callable[[ParentConfig], float] = lambda config: 0.0
    "Seconds that it may take to end after it was asked; then it is killed."
    hurry_seconds: float = 0.0
    "Seconds that it may take after it was asked a second time."


SUPERVISOR_CHILDREN: tuple[ChildRow[ServeConfig], ...] = (
    ChildRow(
        name="engine",
        module="baton.runtime.engine",
        config=lambda serve, life: serve.engine(),
        restart=Restart.IF_KILLED,
        silent_seconds_max=SILENT_SECONDS_MAX,
        # ends its routers' requests
        end_seconds=lambda serve: KILL_SECONDS + (serve.drain_seconds_max if serve.router else 0.0),
    ),
    ChildRow(
        name="front",
        module="baton.runtime.front",
        config=lambda serve, life: serve,
        restart=Restart.NEVER,
        silent_seconds_max=SILENT_SECONDS_MAX,
        peers=("engine",),
        descriptors=True,
        terminated=True,
        end_seconds=lambda serve: serve.drain_seconds_max + KILL_SECONDS,
        hurry_seconds=6.0,  # ends its requests with an error
    ),
)

ENGINE_CHILDREN: tuple[ChildRow[EngineConfig], ...] = (
    ChildRow(
        name="worker",
        module="baton.runtime.worker",
        config=lambda engine, life: worker_settings(engine.worker, life),
        restart=Restart.ORDERED,
        ranks=lambda engine: engine.worker.ranks,
        of_rank=lambda worker, rank: replace(worker, rank=rank),
        descriptors=True,
        environment=QUIET_WAITING,
        exit_seconds=1.0,  # requests wait for it
    ),
    ChildRow(
        name="cache",
        module="baton.runtime.cache",
        config=lambda engine, life: engine.cache(),
        restart=Restart.ALWAYS,
        ranks=lambda engine: engine.worker.ranks,
        of_rank=lambda cache, rank: cache_of_rank(cache, rank),
        descriptors=True,
        end_seconds=lambda engine: 2.0,  # writes in progress may finish
    ),
)


def worker_settings(worker: WorkerConfig, epoch: int) -> WorkerConfig:
    """Settings of a worker of this epoch. A set of ranks gets a directory of its own, which the first rank creates
    (worker/process.py), and a common incarnation of its pools."""
    if worker.ranks == 1:
        return replace(worker, epoch=epoch)
    pools = set_incarnation(secrets.randbits(57))
    return replace(worker, epoch=epoch, rendezvous=f"{worker.rendezvous}/{epoch}", pool_incarnation=pools)


def cache_of_rank(cache: CacheConfig, rank: int) -> CacheConfig:
    peer = "".join(cache.peer.split("\n")[rank : rank + 1])
    return replace(cache, worker=replace(cache.worker, rank=rank), peer=peer)


def with_modules(rows: tuple[ChildRow[ParentConfig], ...], **modules: str) -> tuple[ChildRow[ParentConfig], ...]:
    """The table with other programs in some rows: tests use faulty ones."""
    return tuple(replace(row, module=modules.get(row.name, row.module)) for row in rows)
