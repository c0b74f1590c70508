"""The ranks of a simulated cache service: each answers for its part, at a time of its own (core/rank_messages.py combines).

cache.py copies for all ranks. What it reports is the answer of one of them; the others have moved, or found, everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from baton.core.rank_messages import CacheRanks
from baton.errors import InvariantBroken
from baton.protocol.control import CacheHello
from baton.protocol.ids import PoolIncarnation
from baton.protocol.moves import MoveResult, StorageAnswer
from baton.sim.noise import noise
from baton.sim.rest import check_ranks_rest

Answer = MoveResult | StorageAnswer
ANSWER_SECONDS: Final = 0.001
"Longest time between two answers of a set, which is less than any limit of the instance."


class SimulatedCacheRanks:
    def __init__(self, ranks: int, seed: int, later: Callable[[float, Callable[[], None]], None]) -> None:
        """`later`: calls a function after some seconds, unless the service has died by then."""
        self._ranks = ranks
        self._seed = seed
        self._later = later
        self._messages = CacheRanks(ranks)
        self._arrived: dict[int, dict[int, Answer]] = {}
        "Answers of ranks by the move or query that the others have not answered."

    def begin(self, host_blocks: int, life: int, *, kept: bool) -> bool:
        """Begin another life. `kept`: the host memory of all ranks was kept, else that of one was lost. Returns whether the
        set's was."""
        self._messages, self._arrived = CacheRanks(self._ranks), {}
        combined = None
        for rank in range(self._ranks):
            mine = kept or rank != life % self._ranks
            combined = self._messages.combined(rank, CacheHello(PoolIncarnation(1 + rank), host_blocks, mine))
            if (combined is not None) != (rank == self._ranks - 1):
                raise InvariantBroken(f"after {rank + 1} hellos of {self._ranks} ranks: {combined}", invariant=75)
        assert isinstance(combined, CacheHello)
        return combined.kept

    def at_rest(self) -> None:
        """9: what all ranks have answered is forgotten."""
        check_ranks_rest(self._messages, self._ranks, len(self._arrived))

    def answer(self, answer: Answer, blocks: int, then: Callable[[Answer], None]) -> None:
        """Record the answers: one rank's is this one, the others have moved or found all `blocks`. `then` gets the answer of
        the set."""
        if isinstance(answer, MoveResult):
            whole: Answer = replace(answer, moved=blocks, error=None)
        else:
            whole = replace(answer, found=blocks, error=None)
        for rank in range(self._ranks):
            mine = answer if rank == answer.id % self._ranks else whole
            draw = noise(self._seed, answer.id * 8 + rank)
            if isinstance(mine, MoveResult) and mine is whole:
                mine = replace(mine, seconds=mine.seconds * draw)
            self._later(ANSWER_SECONDS * draw, lambda rank=rank, mine=mine: self._arrive(rank, mine, then))  # type: ignore[misc]

    def _arrive(self, rank: int, mine: Answer, then: Callable[[Answer], None]) -> None:
        """75: the set answers with its last rank: the least that any rank moved or found, and an error if one has failed."""
        arrived = self._arrived.setdefault(mine.id, {})
        arrived[rank] = mine
        combined = self._messages.combined(rank, mine)
        if (combined is not None) != (len(arrived) == self._ranks):
            raise InvariantBroken(f"{mine.id} is answered: {combined}, and ranks {[*arrived]} have answered", invariant=75)
        if combined is None:
            return
        del self._arrived[mine.id]
        assert isinstance(combined, MoveResult | StorageAnswer)
        least = min(_blocks(each) for each in arrived.values())
        failed = any(each.error is not None for each in arrived.values())
        if (combined.id, _blocks(combined), combined.error is not None) != (mine.id, least, failed):
            raise InvariantBroken(f"ranks have answered {arrived}, and the set {combined}", invariant=75)
        then(combined)


def _blocks(answer: Answer) -> int:
    return answer.moved if isinstance(answer, MoveResult) else answer.found
