"""The worker process: executes plans in order, one step after the other, and dies, hangs or is slow as the scenario demands.

The computation is in worker.py. The process has one life after the other, each with an epoch; queued plans die with their life.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.effects import RestartWorker
from baton.core.events import LossCause, WorkerLost, WorkerProgressed, WorkerReady
from baton.protocol.control import WorkerHello
from baton.protocol.ids import PoolIncarnation, WorkerEpoch
from baton.protocol.step import StepPlan
from baton.sim.cache import CacheService
from baton.sim.network import Network
from baton.sim.noise import noise
from baton.sim.onlooker import Onlooker
from baton.sim.scenario import VOCAB, Scenario, StepFault, StepFaultKind
from baton.sim.tags import TAG_BYTES, identity_of
from baton.sim.timeline import Timeline
from baton.sim.worker import SimWorker, WorkerDied
from baton.sim.worker_set import SimulatedRanks

PROGRESS_SHARE = 0.4
"""Interval between signs of progress in a long step, as a share of `step_seconds_max`."""
POOLS_FREED = 100
"""Number of pool incarnations skipped by a sleep: more than a worker has lives in a run."""
LASTING: tuple[StepFaultKind, ...] = ("late", "repeat", "ghost", "rank_late")
"""Faults that may strike every step from one on."""
NO_EPOCH = WorkerEpoch(-1)
"""Epoch of a dead or hanging process."""


class WorkerProcess:
    def __init__(
        self,
        scenario: Scenario,
        timeline: Timeline,
        watch: Onlooker,
        network: Network,
        cache: CacheService | None,
        first_pool: int = 0,
        label: str = "worker",
    ) -> None:
        """`first_pool`: pool incarnations start after it, unique among all processes. `label`: the name in a trace."""
        self._label = label
        self.epoch = WorkerEpoch(1)
        self.worker = SimWorker(scenario.blocks, scenario.block_size, watch.client_of, scenario.seed, scenario.draft_truth)
        self._first_pool = first_pool
        self._scenario = scenario
        self._timeline = timeline
        self._watch = watch
        self._network = network
        self._cache = cache
        self._dispatch: Callable[[WorkerReady | WorkerLost | WorkerProgressed], None]
        self._busy_until = 0.0
        self._steps_begun = 0
        self._faults: dict[int, list[StepFault]] = {}
        for fault in scenario.steps:
            self._faults.setdefault(fault.step, []).append(fault)
        self._lasting = [fault for fault in scenario.steps if fault.every and fault.kind in LASTING]
        self._restarts_to_fail = 0
        self._restarts_to_hang = 0
        self._lives_to_loop = 0
        self._last_step = 0
        "The step executed last; at the begin of a life, the last step sent to its predecessor."
        self._life_steps = 0
        self._oom: tuple[int, float] | None = None
        "Steps of at least this many tokens run out of memory, until this time."
        self._healed = False
        self.on_disk: Callable[[], int] = lambda: 0
        "The weights that the next life loads."
        self.frozen_until = self._plods_until = 0.0
        self._ranks: SimulatedRanks | None = None
        if scenario.ranks > 1:
            self._ranks = SimulatedRanks(scenario.ranks, timeline, watch, lambda: self.epoch, self._break_up, self._ready)

    @property
    def broke_protocol(self) -> bool:
        """Whether ranks have contradicted each other."""
        return self._ranks is not None and self._ranks.differed

    def connect(self, instance: Callable[[WorkerReady | WorkerLost | WorkerProgressed], None]) -> None:
        """Set the receiver of readiness, progress and loss."""
        self._dispatch = instance

    def begin(self) -> None:
        self._timeline.at(0.0, self._worker_ready, self.epoch)

    def heal(self) -> None:
        self._healed = True
        now = self._timeline.now
        left = max(self.frozen_until, self._plods_until) - now
        if left > 0:  # it continues now
            self.frozen_until = self._plods_until = now
            self._busy_until = max(now, self._busy_until - left)
            for time, plan in self._timeline.withdraw(self._step):
                self._timeline.at(max(now, time - left), self._step, plan)

    def at_rest(self) -> None:
        """Slots were checked with every plan."""
        if self._ranks is not None:
            self._ranks.at_rest()

    # Lives

    def _worker_ready(self, epoch: WorkerEpoch) -> None:
        self._start(epoch, at_once=epoch == 1)

    def _start(self, epoch: WorkerEpoch, *, at_once: bool) -> None:
        """Report that the process has loaded. `at_once`: all of its ranks report at the same time."""
        if epoch != self.epoch:
            return
        if self._restarts_to_fail and epoch > 1 and not self._healed:
            self._restarts_to_fail -= 1
            self._timeline.note(self._label, f"epoch {epoch} does not start")
            self._watch.saw("a restart failed")
            if self._ranks is not None:
                self._ranks.end(0)
            self._dispatch(WorkerLost(epoch, "did not start"))
            return
        if self._ranks is not None:
            self._ranks.start(epoch, self._hello, at_once=at_once)
        else:
            self._ready(self._hello())

    def _hello(self) -> WorkerHello:
        """The hello of a rank that has loaded the weights on disk now."""
        scenario, self.worker.weights = self._scenario, self.on_disk()
        pool = PoolIncarnation(self._first_pool + (1 if scenario.pool_kept else int(self.epoch)))
        identity, block_bytes = identity_of(self.worker.weights), TAG_BYTES * scenario.block_size
        return WorkerHello(
            self.epoch, scenario.blocks, scenario.block_size, VOCAB, 0, identity, pool, block_bytes=block_bytes, layout=b"tags"
        )

    def _ready(self, hello: WorkerHello) -> None:
        self._timeline.note(self._label, f"ready, epoch {hello.epoch}, weights {self.worker.weights}")
        if self._cache is not None:
            self._cache.attach(hello.pool, self.worker.pool)
        self._dispatch(WorkerReady(hello.epoch, hello.pool, hello.identity, hello.steps_ahead))

    def scribble(self) -> None:
        """Overwrite the pool: a worker that broke the protocol may have written anywhere."""
        self.worker.scribble()

    def restart(self, order: RestartWorker) -> None:
        """Kill the present process, whatever it does, and start the next."""
        self._timeline.note(self._label, f"killed ({order.reason}); starting epoch {order.epoch}")
        self.worker.die(self._scenario.pool_kept)
        self._kill_ranks()
        self._begin_life(order.epoch)
        self._busy_until = self._timeline.now
        if self._restarts_to_hang and not self._healed:
            self._restarts_to_hang -= 1
            self._watch.saw("a restart never spoke")
            return
        ready = self._timeline.now + order.delay_seconds + self._scenario.restart_seconds
        self._timeline.at(ready, self._worker_ready, order.epoch)

    def replace(self, epoch: WorkerEpoch) -> None:
        """Start another process, as an operator does."""
        self._watch.saw("a gone worker was replaced")
        self.worker.die(self._scenario.pool_kept)
        self._kill_ranks()  # the engine that ended it has ended, and its children with it
        self._begin_life(epoch)
        self._start(epoch, at_once=True)

    def _begin_life(self, epoch: WorkerEpoch) -> None:
        self.epoch = epoch
        if self._ranks is not None:
            self._ranks.begin()
        self.frozen_until = self._plods_until = 0.0
        self._last_step, self._life_steps = self._network.last_step, 0

    def stop(self) -> None:
        """The instance sleeps: its pool is freed, so the next worker has another one."""
        self._timeline.note(self._label, "stops, as its instance sleeps")
        self._kill_ranks()
        self.worker.die(False)
        self.epoch = NO_EPOCH
        self._first_pool += POOLS_FREED

    def _kill_ranks(self) -> None:
        if self._ranks is not None:
            self._ranks.kill()

    def _break_up(self, why: str) -> None:
        """End the set, as the engine does: ranks contradict each other."""
        self.crash(f"as {why}", "protocol")

    def crash(self, when: str, cause: LossCause = "died", rank: int = 0) -> None:
        self._timeline.note(self._label, f"dies {when}")
        self._watch.worker_dies()
        if self._ranks is not None:
            self._ranks.end(rank)
        self.worker.die(self._scenario.pool_kept)
        dead, self.epoch = self.epoch, NO_EPOCH  # no queued step is executed
        self._network.flush(dead)
        self._dispatch(WorkerLost(dead, f"died {when}", cause))

    def vanish(self) -> None:
        """Die with the whole instance: no event is sent, and no queued plan is executed."""
        self.epoch = NO_EPOCH
        self._kill_ranks()

    def hang(self) -> None:
        """Stop without a message. Of several ranks one stops, and the others answer pings."""
        if self._ranks is not None:
            self._ranks.hang(self.epoch % self._scenario.ranks)
        self.epoch = NO_EPOCH

    def answers_ping(self, epoch: WorkerEpoch) -> bool:
        """Whether the ping that was sent in that life is answered."""
        return epoch == self.epoch != NO_EPOCH if self._ranks is None else self._ranks.answers_ping(epoch)

    def fail_restarts(self, times: int) -> None:
        self._restarts_to_fail += times

    def hang_restart(self) -> None:
        self._restarts_to_hang += 1

    def change_hello(self, change: int) -> None:
        """Let one rank of the next life send another hello than the others."""
        if self._ranks is not None:
            self._ranks.change_hello(change)

    def loop(self, lives: int) -> None:
        """Let the next `lives` lives end in their second step."""
        self._lives_to_loop += lives

    def freeze(self, seconds: float) -> None:
        """Stop for `seconds` (SIGSTOP): every queued step ends later by as much."""
        if self.epoch != NO_EPOCH:
            now = self._timeline.now
            self.frozen_until = max(self.frozen_until, now + seconds)
            self._busy_until = max(self._busy_until, now) + seconds
            for time, plan in self._timeline.withdraw(self._step):
                self._timeline.at(time + seconds, self._step, plan)

    @property
    def computes(self) -> bool:
        """Whether the worker is in a step: a real one would advance its progress counter."""
        return self.epoch != NO_EPOCH and self.frozen_until <= self._timeline.now < self._busy_until

    # Steps

    def take(self, plan: StepPlan) -> None:
        """Queue a plan behind those before it."""
        scenario = self._scenario
        seconds = scenario.step_seconds + scenario.token_seconds * plan.tokens
        seconds *= 1.0 + scenario.noise * noise(scenario.seed, plan.step)
        self._busy_until = max(self._timeline.now, self._busy_until) + seconds
        self._timeline.at(self._busy_until, self._step, plan)

    def _step(self, plan: StepPlan) -> None:
        """Execute the plan at the end of its step and send the result, unless a fault strikes."""
        if plan.epoch != self.epoch:
            return  # the process that had this plan is dead
        if plan.step != self._last_step + 1:
            self.crash("of a lost plan")
            return
        faults = self._faults_of_step()
        for kind in faults:
            self._watch.happened(kind)
        if "hang" in faults or "rank_hangs" in faults:
            hung = "the worker hung" if "hang" in faults else "a rank hung"
            self._watch.saw(hung)
            if self._ranks is not None and (fault := faults.get("rank_hangs")) is not None:
                self._ranks.hang(fault.step % self._scenario.ranks)
            self.epoch = NO_EPOCH  # the process does and sends nothing more
        elif (slow := faults.get("slow") or faults.get("plod")) is not None:
            self._steps_begun -= 1  # the same step comes again, later
            self._faults[self._steps_begun + 1] = [fault for fault in faults.values() if fault is not slow]
            self._hold_back(plan, slow.seconds)
            if slow.kind == "plod":
                self._watch.saw("a step took longer than it may, with progress")
                self._plods_until = self._timeline.now + slow.seconds
                self._plod(self.epoch)
        elif "crash_before" in faults:
            self.crash("before a step")
        elif (fault := faults.get("rank_dies")) is not None:
            self._watch.saw("a rank died")
            self.crash("with one of its ranks", rank=fault.step % self._scenario.ranks)
        else:
            self._execute(plan, faults)

    def _plod(self, epoch: WorkerEpoch) -> None:
        if epoch == self.epoch and self._timeline.now < self._plods_until:
            self._dispatch(WorkerProgressed(epoch))
            self._timeline.at(self._timeline.now + PROGRESS_SHARE * self._scenario.step_seconds_max, self._plod, epoch)

    def _faults_of_step(self) -> dict[str, StepFault]:
        self._steps_begun += 1
        if self._healed:
            return {}
        once = self._faults.pop(self._steps_begun, ())
        if not once and not self._lasting:
            return {}
        lasting = (fault for fault in self._lasting if fault.step <= self._steps_begun)
        return {fault.kind: fault for fault in (*lasting, *once)}

    def _execute(self, plan: StepPlan, faults: dict[str, StepFault]) -> None:
        self._last_step = plan.step
        self._life_steps += 1
        if self._lives_to_loop and self._life_steps == 2 and not self._healed:
            self._lives_to_loop -= 1
            self._watch.saw("the worker died in its second step")
            self.crash("in its second step")
            return
        if self._is_short_of_memory(plan, faults.get("oom")):
            self._watch.saw("the device was out of memory")
            self.crash("out of memory")
            return
        try:
            result = self.worker.execute(plan, die_after=len(plan.run.slots) // 2 if "crash_amid" in faults else None)
        except WorkerDied as died:
            self._watch.poisoned(died.client)
            if died.client is not None:
                self._watch.happened("poison")
            self.crash("amid a step", "killed" if died.client is not None and self._scenario.poison_unseen else "died")
            return
        if "crash_after" in faults:
            self.crash("after a step")
            return
        self._network.send_result(result, faults)
        if self._ranks is not None and plan.epoch == self.epoch:  # a broken result may have ended it
            if "rank_late" in faults:
                self._watch.saw("a rank answered late")
            self._ranks.answer(result, faults)

    def _is_short_of_memory(self, plan: StepPlan, fault: StepFault | None) -> bool:
        now = self._timeline.now
        if fault is not None and plan.tokens:
            self._oom = plan.tokens, now + fault.seconds
        return self._oom is not None and plan.tokens >= self._oom[0] and now <= self._oom[1] and not self._healed

    def _hold_back(self, plan: StepPlan, seconds: float) -> None:
        """Delay this step, and with it every step queued behind it."""
        now = self._timeline.now
        self._busy_until = max(self._busy_until, now) + seconds
        queued = self._timeline.withdraw(self._step)
        self._timeline.at(now + seconds, self._step, plan)
        for time, later in queued:
            self._timeline.at(time + seconds, self._step, later)
