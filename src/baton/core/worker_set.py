"""A worker set: N processes (ranks) that compute every step together, and act as one worker for the rest of the engine.

results   the result of rank 0 continues at once. The other ranks answer a digest, compared when it arrives, so no step waits
          for them: a difference ends the set.
answers   hello, pong, moves: combined when the last rank has answered. A move counts as the least of its ranks.
ends      the first rank that ends names the cause; the others are killed at once, because a rank that waits for it in a
          collective never returns.

core/rank_messages.py applies it to the messages of a worker and of a cache service, for the engine and for the simulator.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, Generic, TypeVar

from msgspec.structs import asdict, replace

from baton.errors import PeerError
from baton.protocol.control import WorkerHello
from baton.protocol.ids import StepNo
from baton.protocol.moves import MoveResult, StorageAnswer
from baton.protocol.step import StepDigest, StepResult, digest_of

Answer = TypeVar("Answer")

STEPS_UNCOMPARED_MAX: Final = 64
"""Maximum of steps whose digests are incomplete. A collective keeps ranks within a step of each other, so more means that a
rank does not answer."""
OWN: Final = frozenset({"pool", "digest_seconds", "plan"})
"""Fields of a hello that may differ between ranks: each has its own pool and measures its own times."""
HELLO_WORDS: Final = {"identity": "other weights", "blocks": "another number of KV blocks", "layout": "another KV layout"}


class RankEnds:
    """Records the first rank that ended, and returns the ranks to kill for it."""

    __slots__ = ("_ranks", "first")

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.first: int | None = None
        "The rank that ended first. None: all ranks run."

    def ended(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks to kill: all others at the first end, none later."""
        if self.first is not None:
            return ()
        self.first = rank
        return tuple(other for other in range(self._ranks) if other != rank)


class RankAnswers(Generic[Answer]):
    """Collects one answer of each rank for each key."""

    __slots__ = ("_open", "_ranks")

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._open: dict[Hashable, dict[int, Answer]] = {}

    def add(self, key: Hashable, rank: int, answer: Answer) -> list[Answer] | None:
        """Returns the answers in the order of ranks when the last one has arrived. A second answer of a rank raises
        PeerError."""
        answers = self._open.setdefault(key, {})
        if rank in answers:
            raise PeerError(f"rank {rank} has answered twice with a {type(answer).__name__}")
        answers[rank] = answer
        if len(answers) < self._ranks:
            return None
        del self._open[key]
        return [answers[each] for each in range(self._ranks)]

    def __len__(self) -> int:
        """Number of keys that some ranks have not answered."""
        return len(self._open)


class StepDigests:
    """Compares the results of all ranks, step by step. A difference raises PeerError."""

    __slots__ = ("_answers", "_ranks")

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._answers: dict[StepNo, dict[int, bytes]] = {}

    def add_result(self, rank: int, result: StepResult) -> None:
        """Record a result of rank 0."""
        if rank != 0:
            raise PeerError(f"rank {rank} has sent a result, which is rank 0's to send")
        self._add(0, digest_of(result))

    def add_digest(self, rank: int, digest: StepDigest) -> None:
        if rank == 0:
            raise PeerError("rank 0 has sent a digest instead of a result")
        self._add(rank, digest)

    def _add(self, rank: int, digest: StepDigest) -> None:
        step = digest.step
        answers = self._answers.setdefault(step, {})
        if rank in answers:
            raise PeerError(f"rank {rank} has answered step {step} twice")
        answers[rank] = digest.digest
        for other, value in answers.items():
            if value != digest.digest:
                low, high = sorted((rank, other))
                raise PeerError(f"ranks {low} and {high} computed different results of step {step}")
        if len(answers) == self._ranks:
            del self._answers[step]
        elif len(self._answers) > STEPS_UNCOMPARED_MAX:
            oldest = next(iter(self._answers))
            silent = [other for other in range(self._ranks) if other not in self._answers[oldest]]
            raise PeerError(f"rank {silent[0]} has not answered step {oldest}, and the others are {STEPS_UNCOMPARED_MAX} ahead")


def agreed_hello(hellos: Sequence[WorkerHello]) -> WorkerHello:
    """The hello of the set: rank 0's, with the bytes that a block has on all ranks. PeerError names the first rank that differs
    from it, and in what."""
    first = asdict(hellos[0])
    for rank, hello in enumerate(hellos):
        mine = asdict(hello)
        differing = [name for name in first if name not in OWN and mine[name] != first[name]]
        if differing:
            name = next((name for name in HELLO_WORDS if name in differing), differing[0])
            words = HELLO_WORDS.get(name, f"another {name}")
            values = f"{_shown(mine[name])} instead of {_shown(first[name])}"
            raise PeerError(f"rank {rank} has {words} than rank 0: {values}{_parts(hello, hellos[0])}")
    return replace(hellos[0], block_bytes=sum(hello.block_bytes for hello in hellos))


def _parts(hello: WorkerHello, other: WorkerHello) -> str:
    """The inputs of the identity that differ, as far as both name them."""
    mine, its = hello.identity_parts, other.identity_parts
    names = [name for name in mine if name in its and mine[name] != its[name]]
    return f" ({', '.join(names)})" if names else ""


def _shown(value: object) -> str:
    return value.hex()[:16] if isinstance(value, bytes) else str(value)


def least_move(results: Sequence[MoveResult]) -> MoveResult:
    """The set's result of a move: a block has moved when every rank has moved its part. An error of one rank is the move's
    error."""
    failed = next((rank for rank, result in enumerate(results) if result.error is not None), None)
    error = None if failed is None else f"rank {failed}: {results[failed].error}"
    return MoveResult(results[0].id, min(result.moved for result in results), max(result.seconds for result in results), error)


def least_found(answers: Sequence[StorageAnswer]) -> StorageAnswer:
    """The set's answer to a query: a block is found when every rank has found its part."""
    failed = next((rank for rank, answer in enumerate(answers) if answer.error is not None), None)
    error = None if failed is None else f"rank {failed}: {answers[failed].error}"
    return StorageAnswer(answers[0].id, min(answer.found for answer in answers), error)


class SlowestProgress:
    """The progress of the slowest rank, as one number: it advances when every rank has advanced since it last did."""

    __slots__ = ("_before", "value")

    def __init__(self) -> None:
        self._before: tuple[int, ...] = ()
        self.value = 0

    def observe(self, words: tuple[int, ...]) -> int:
        if len(words) == 1:
            return words[0]
        if len(words) != len(self._before):
            self._before = words
        elif all(word != before for word, before in zip(words, self._before, strict=True)):
            self._before, self.value = words, self.value + 1
        return self.value
