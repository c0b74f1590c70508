"""The ranks of a simulated worker: who lives, whether hellos and results agree, and whether it progresses.

core/worker_set.py decides, and core/rank_messages.py combines the messages of the ranks, as in the engine. worker.py computes
for all ranks. A rank dies, hangs, answers late or never, answers another digest or says another hello, as the scenario's faults
demand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import asdict, replace

from baton.core.rank_messages import WorkerRanks
from baton.core.worker_set import RankEnds, SlowestProgress
from baton.errors import InvariantBroken, PeerError
from baton.protocol.control import Pong, WorkerHello
from baton.protocol.ids import StepNo, WorkerEpoch
from baton.protocol.pool import of_rank
from baton.protocol.step import StepResult, digest_of
from baton.sim.noise import noise
from baton.sim.onlooker import Onlooker
from baton.sim.rest import check_ranks_rest
from baton.sim.scenario import StepFault
from baton.sim.timeline import Timeline

HELLO_SECONDS: Final = 0.05
"Longest time between two hellos of a set."
SILENT_STEPS_MAX: Final = 64
"""Steps in which a rank may be behind with its digests. Named here again, so that the check does not depend on the core."""
SHARED: Final = ("epoch", "blocks", "block_size", "vocab_size", "identity", "layout")
"""Fields that the hellos of all ranks have in common. Named here again, so that the check does not depend on the core."""
NO_RANK: Final = -1
CHANGES: Final[tuple[Callable[[WorkerHello], WorkerHello], ...]] = (
    lambda hello: replace(hello, blocks=hello.blocks + 1),
    lambda hello: replace(hello, layout=b"other"),
    lambda hello: replace(hello, identity=b"other"),
    lambda hello: replace(hello, epoch=WorkerEpoch(hello.epoch - 1)),
)
"Changes of a hello that contradict the other ranks: other sizes, another layout, other weights, or the epoch before."


class SimulatedRanks:
    def __init__(
        self,
        ranks: int,
        timeline: Timeline,
        watch: Onlooker,
        epoch: Callable[[], WorkerEpoch],
        broken: Callable[[str], None],
        ready: Callable[[WorkerHello], None],
    ) -> None:
        """`epoch`: of the present life. `broken`: called when ranks contradict each other, so the set ends. `ready`: with the
        hello of the set."""
        self._ranks = ranks
        self._timeline = timeline
        self._watch = watch
        self._epoch = epoch
        self._broken = broken
        self._ready = ready
        self._odd_hellos: list[int] = []
        "Changes of hellos of the next lives."
        self.differed = False
        "Whether ranks of some life have contradicted each other."
        self._alive: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Begin another life. 71: no rank of the one before is left."""
        self._none_left()
        self._alive = list(range(self._ranks))
        self._life, self._hung = self._epoch(), NO_RANK
        self._ends, self._messages = RankEnds(self._ranks), WorkerRanks(self._ranks)
        self._hellos: dict[int, WorkerHello] = {}
        self._arrived: dict[StepNo, int] = {}
        "Number of ranks that have answered a step, where others have not."
        self._progress, self._words = SlowestProgress(), [0] * self._ranks
        self._progress.observe(tuple(self._words))

    def kill(self) -> None:
        """Kill every rank, by order of the engine."""
        self._alive = []

    def end(self, first: int) -> None:
        """End the set: a rank has died by itself, and the engine notices. 71: the loss is reported when no rank is left."""
        if self._alive:
            self._alive.remove(first)
            for other in self._ends.ended(first):
                self._alive.remove(other)
            if self._ends.first != first:
                raise InvariantBroken(f"rank {first} ended first, and rank {self._ends.first} is named", invariant=71)
        self._none_left()

    def at_rest(self) -> None:
        """9: what all ranks have answered is forgotten. A set that has ended is replaced, with all of its answers."""
        if len(self._alive) == self._ranks:
            check_ranks_rest(self._messages, self._ranks, len(self._arrived))

    def _none_left(self) -> None:
        if self._alive:
            raise InvariantBroken(f"ranks {self._alive} outlive their set", invariant=71)

    def change_hello(self, change: int) -> None:
        """Let a rank of the next life contradict the others in its hello."""
        self._odd_hellos.append(change % len(CHANGES))

    def start(self, epoch: WorkerEpoch, hello: Callable[[], WorkerHello], *, at_once: bool) -> None:
        """Start a new life: each rank sends its hello when it has loaded. `hello`: of a rank that has loaded now."""
        change = self._odd_hellos.pop() if self._odd_hellos and not at_once else None
        for rank in range(self._ranks):
            changes = CHANGES[change] if change is not None and rank == epoch % self._ranks else _unchanged
            entry = epoch, rank, hello, changes
            if at_once:
                self._on_hello(entry)
            else:
                self._timeline.at(self._timeline.now + HELLO_SECONDS * noise(epoch, rank), self._on_hello, entry)

    def _on_hello(
        self, entry: tuple[WorkerEpoch, int, Callable[[], WorkerHello], Callable[[WorkerHello], WorkerHello]]
    ) -> None:
        """Receive a rank's hello. 75: the set is ready with the last one, and only if all agree."""
        epoch, rank, hello, changes = entry
        if epoch != self._epoch() or rank not in self._alive:
            return
        mine = changes(hello())
        self._hellos[rank] = mine = replace(mine, pool=of_rank(mine.pool, rank))
        differs = len({tuple(asdict(each)[name] for name in SHARED) for each in self._hellos.values()}) > 1
        try:
            combined = self._messages.combined(rank, mine)
        except PeerError as error:
            if not differs:
                raise InvariantBroken(f"ranks that say the same hello are said to differ: {error}", invariant=75) from None
            self.differed = True
            self._watch.saw("ranks differed")
            self._watch.saw("a rank said another hello")
            self._broken(str(error))
            return
        if (combined is not None) != (len(self._hellos) == self._ranks):
            late, ready = set(range(self._ranks)) - set(self._hellos), combined is not None
            raise InvariantBroken(f"ready: {ready}, and these ranks have said no hello: {late or 'none'}", invariant=75)
        if isinstance(combined, WorkerHello):
            self._check_hello(combined, differs=differs)
            self._ready(combined)

    def _check_hello(self, combined: WorkerHello, *, differs: bool) -> None:
        if differs:
            raise InvariantBroken("the hellos of the ranks differ, and the set is ready", invariant=75)
        if combined.block_bytes != sum(hello.block_bytes for hello in self._hellos.values()):
            raise InvariantBroken(f"a block has {combined.block_bytes} bytes on all ranks together", invariant=75)

    def hang(self, hung: int) -> None:
        """Let one rank hang; the others wait in their next exchange. 73: that is no progress of the set."""
        self._hung, before = hung, self._progress.value
        for rank in range(self._ranks):
            self._words[rank] += rank != hung
            if self._progress.observe(tuple(self._words)) != before:
                raise InvariantBroken(f"rank {hung} hangs, and the set makes progress", invariant=73)

    def answers_ping(self, epoch: WorkerEpoch) -> bool:
        """Whether a ping of that life is answered. All ranks answer it but one that hangs, and the set with the last one."""
        if epoch != self._life or not self._alive:
            return False
        pongs = [self._messages.combined(rank, Pong(epoch)) for rank in range(self._ranks) if rank != self._hung]
        return any(pong is not None for pong in pongs)

    def _advance(self) -> None:
        """Advance the ranks by a step, one after the other. 73: the set progresses when the last one has."""
        before = self._progress.value
        for rank in range(self._ranks):
            self._words[rank] += 1
            advanced, last = self._progress.observe(tuple(self._words)) != before, rank == self._ranks - 1
            if advanced != last:
                raise InvariantBroken(f"{rank + 1} of {self._ranks} ranks advance: {advanced}", invariant=73)

    def answer(self, result: StepResult, faults: dict[str, StepFault]) -> None:
        """Deliver the result of rank 0; the digests of the others come now or later, or one of them does not."""
        self._advance()
        self._add(0, result, differs=False)
        for rank in range(1, self._ranks):
            late, differs = faults.get("rank_late"), faults.get("rank_differs")
            if late is not None and late.every and rank == 1 + late.step % (self._ranks - 1):
                continue
            mine = result
            if differs is not None and rank == 1 + differs.step % (self._ranks - 1):
                mine = replace(result, values=(*result.values, 0))
            at = self._timeline.now + (late.seconds if late is not None else 0.0)
            self._timeline.at(at, self._arrive, (self._epoch(), rank, mine, mine is not result))

    def _arrive(self, entry: tuple[WorkerEpoch, int, StepResult, bool]) -> None:
        epoch, rank, result, differs = entry
        if epoch == self._epoch():
            self._add(rank, result, differs=differs)

    def _add(self, rank: int, result: StepResult, *, differs: bool) -> None:
        """Compare a rank's digest. 72: ranks that differ end the set, or one that is silent for many steps, and no others do.
        75: the result of rank 0 is that of the set, at once, and no digest is."""
        self._arrived[result.step] = self._arrived.get(result.step, 0) + 1
        silent = len(self._arrived) > SILENT_STEPS_MAX
        message = digest_of(result) if rank else result
        try:
            combined = self._messages.combined(rank, message)
        except PeerError as error:
            if not differs and not silent:
                raise InvariantBroken(f"ranks that agree are said to differ: {error}", invariant=72) from None
            if silent:
                self._watch.saw("a rank was silent for many steps")
            self.differed = True
            self._watch.saw("ranks differed")
            self._broken(str(error))
            return
        if differs:
            raise InvariantBroken(f"step {result.step}: rank {rank} differs, and the set goes on", invariant=72)
        if silent:
            raise InvariantBroken(f"ranks have not answered {len(self._arrived)} steps, and the set goes on", invariant=72)
        if combined is not (None if rank else message):
            raise InvariantBroken(f"rank {rank} has answered step {result.step}, and the set {combined}", invariant=75)
        if self._arrived[result.step] == self._ranks:
            del self._arrived[result.step]


def _unchanged(hello: WorkerHello) -> WorkerHello:
    return hello
