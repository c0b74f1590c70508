"""Combines the messages of all ranks of a child into those of one: of the worker, and of the cache service.

The engine (runtime/engine/child_messages.py) and the simulator (sim/worker_set.py, sim/cache_ranks.py) pass it each message of
a rank. One object serves one life of the set, so an answer of an earlier life is never combined with those of the present one.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from baton.core.worker_set import RankAnswers, StepDigests, agreed_hello, least_found, least_move
from baton.errors import PeerError
from baton.protocol.codec import Message
from baton.protocol.control import CacheHello, CacheStats, LoadProgress, Pong, WorkerHello
from baton.protocol.moves import MoveResult, StorageAnswer
from baton.protocol.pool import PoolSized
from baton.protocol.step import StepDigest, StepResult


class WorkerRanks:
    """One life of a worker set."""

    def __init__(self, count: int) -> None:
        self._digests = StepDigests(count)
        self._hellos: RankAnswers[WorkerHello] = RankAnswers(count)
        self._sizes: RankAnswers[PoolSized] = RankAnswers(count)
        self._pongs: RankAnswers[Pong] = RankAnswers(count)
        self._pongs_of = [0] * count
        "Pongs of each rank: all ranks get the same pings, so the same count answers the same ping."

    def combined(self, rank: int, message: Message) -> Message | None:
        """The set's message. None: other ranks have to answer first, or it is of this rank alone."""
        match message:
            case StepResult():
                self._digests.add_result(rank, message)
                return message
            case StepDigest():
                self._digests.add_digest(rank, message)
            case WorkerHello():
                if (hellos := self._hellos.add("hello", rank, message)) is not None:
                    return agreed_hello(hellos)
            case PoolSized():
                if (sizes := self._sizes.add("size", rank, message)) is not None:
                    return _agreed_size(sizes)
            case Pong():
                self._pongs_of[rank] += 1
                if (pongs := self._pongs.add(self._pongs_of[rank], rank, message)) is not None:
                    return pongs[0]
            case LoadProgress() if rank:
                pass  # All ranks load as much, so rank 0 reports for them.
            case _:
                return message
        return None


def _agreed_size(sizes: list[PoolSized]) -> PoolSized:
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise PeerError(f"rank {rank} wants a KV pool of {size.blocks} blocks, and rank 0 of {sizes[0].blocks}")
    return sizes[0]


class CacheRanks:
    """One life of a set of cache services, each with the pool and the objects of its rank."""

    def __init__(self, count: int) -> None:
        self._moves: RankAnswers[MoveResult] = RankAnswers(count)
        self._answers: RankAnswers[StorageAnswer] = RankAnswers(count)
        self._hellos: RankAnswers[CacheHello] = RankAnswers(count)
        self._stats = [CacheStats({})] * count

    def combined(self, rank: int, message: Message) -> Message | None:
        """The set's message. None: other ranks have to answer first."""
        match message:
            case MoveResult(number):
                moves = self._moves.add(number, rank, message)
                return None if moves is None else least_move(moves)
            case StorageAnswer(number):
                answers = self._answers.add(number, rank, message)
                return None if answers is None else least_found(answers)
            case CacheHello():
                hellos = self._hellos.add("hello", rank, message)
                return None if hellos is None else _agreed_cache(hellos)
            case CacheStats():
                self._stats[rank] = message
                return _stats_of(self._stats)
        return message


def _agreed_cache(hellos: list[CacheHello]) -> CacheHello:
    """The hello of rank 0; the host memory is kept if every rank has kept its part, and others read the parts at all of their
    addresses."""
    for rank, hello in enumerate(hellos):
        if hello.host_blocks != hellos[0].host_blocks:
            raise PeerError(f"rank {rank} has {hello.host_blocks} host blocks, and rank 0 {hellos[0].host_blocks}")
    peer = "\n".join(hello.peer for hello in hellos).strip()
    return replace(hellos[0], kept=all(hello.kept for hello in hellos), peer=peer)


def _stats_of(stats: list[CacheStats]) -> CacheStats:
    """The set's stats. Every rank has a part of each block and copy, so these count once: as the rank counts that has most.
    Bytes are added; the time of a copy is the slowest rank's."""

    def joined(name: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for each in stats:
            for key, count in getattr(each, name).items():
                found[key] = found[key] + count if "bytes" in (name + key) else max(found[key], count)
        return dict(found)

    counters = {name: joined(name) for name in ("counters", "pulls", "pull_bytes", "pull_microseconds", "readers")}
    return CacheStats(**counters, loop_lag_microseconds=max(each.loop_lag_microseconds for each in stats))
