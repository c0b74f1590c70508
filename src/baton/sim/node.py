"""A node: one real instance, its worker process and pool, and the network between them.

Tells the instance what happens, carries out what it wants, and holds each answer against the watch. The front's side of it is
`Front`: clients.py; nodes of a cluster are in cluster/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.core.effects import Effect, ModeChanged, Refuse, RestartCache, RestartWorker, RunStep, TellCache
from baton.core.events import Event, Resume, StepDone, Tick, WorkerLost, WorkerProgressed
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.protocol.ids import Instant, WorkerEpoch
from baton.protocol.output import Emit
from baton.protocol.step import StepPlan, StepResult
from baton.sim.cache import CacheService
from baton.sim.network import Network
from baton.sim.process import WorkerProcess
from baton.sim.scenario import Scenario
from baton.sim.step_watch import StepWatch
from baton.sim.tiers_watch import KeyContents, TierWatch
from baton.sim.timeline import Timeline
from baton.sim.watch import Watch


class Front(Protocol):
    """Whoever gets a node's answers."""

    def answered(self, effects: list[Effect]) -> None:
        """Everything that one event brought, before anything of it is done."""

    def emitted(self, emit: Emit) -> None: ...

    def refused(self, refuse: Refuse) -> None: ...

    def after_event(self) -> None: ...


class Node:
    def __init__(self, scenario: Scenario, timeline: Timeline, instance: Instance, watch: Watch) -> None:
        self.instance = instance
        self.watch = watch
        self.network = Network(scenario, timeline, watch)
        contents = KeyContents(scenario.block_size, watch.all_trips)
        self.tiers = TierWatch(instance.view, watch.plans, contents, wants_tokens=scenario.storage_tokens)
        self.cache = CacheService(scenario, timeline, self.tiers, watch.saw) if scenario.host_blocks else None
        self.process = WorkerProcess(scenario, timeline, watch, self.network, self.cache)
        self.process.on_disk = lambda: self.weights
        self.network.connect(self.process.take, self.receive)
        self.process.connect(self._hear)
        if self.cache is not None:
            self.cache.connect(self._hear)
        self._steps = StepWatch(scenario, timeline)
        self.weights = 0
        "That the model's files are now."
        self.results = 0
        "Results that the instance was handed."
        self._results: dict[int, StepResult] = {}
        "Of this life of the worker, and not absorbed yet."
        self._scenario = scenario
        self._timeline = timeline
        self._front: Front
        self._looked: Callable[[], None] | None = None
        self._clock_offset = 0.0
        self._jumped = False
        "Its clock was set ahead, once at least."
        self._told = 0.0
        "The latest time that the instance knows."
        self._oldest = 0
        "Step of the oldest plan in flight when the present event began."
        self._armed: float | None = None
        self.frozen_until: float | None = None
        "The engine process does nothing until then; what is sent to it waits."
        self._broken = self._broken_early = False
        "A broken result overtook an older one, and is found out when its turn comes."

    def connect(self, front: Front, looked: Callable[[], None] | None) -> None:
        """Who gets the answers, and who looks on after each event."""
        self._front, self._looked = front, looked

    def begin(self) -> None:
        self.network.begin()
        self.process.begin()
        if self.cache is not None:
            self.cache.begin()

    def heal(self) -> None:
        """A gone worker is replaced by hand, and the instance is resumed."""
        self.network.heal()
        self.process.heal()
        if self.cache is not None:
            self.cache.heal()
        if self.instance.worker.state.value == "gone":
            self.watch.reference.replaced()
            self.process.replace(self.instance.worker.epoch)
        self.tell(Resume())

    def at_rest(self) -> None:
        self.network.at_rest()
        self.process.at_rest()
        if self.cache is not None:
            self.cache.at_rest()
            self.cache.note_what_happened(self.instance.view.tier_stats)
        self.full_check()
        self.watch.at_rest()
        if self.instance.mode.value != "paused":
            raise InvariantBroken("drained and not paused", invariant=9)

    def full_check(self) -> None:
        self.instance.check()
        self.instance.check_part(8)
        self.watch.plans.generations()
        if self.cache is not None:
            self.cache.full_check()

    # The instance

    def tell(self, event: Event, at_least: float = 0.0) -> None:
        instance, watch = self.instance, self.watch
        plans, losses = instance.view.plans(), instance.stats.worker_losses
        self._oldest = plans[0].step if plans else 0
        idle = not plans and instance.worker.state.value == "ready"
        told = Instant(max(self._timeline.now + self._clock_offset, at_least))
        watch.reference.before_event(event, told)
        if self.cache is not None:
            self._told = max(self._told, told)
            self.cache.heard(event)
        if type(event) is WorkerProgressed and event.epoch == instance.worker.epoch:
            self._steps.progressed()
        effects = instance.handle(event, told)
        for effect in effects:
            if type(effect) is Emit:
                watch.progressed(effect)  # before a loss in the same event: a worker is lost after its results are in
        self._look_at_steps(event, plans, losses, any(type(effect) is RunStep for effect in effects))
        self._front.answered(effects)
        for effect in effects:  # clients first: a plan must agree with what they have been told
            if type(effect) is Emit:
                watch.emitted(effect, self._timeline.now)
                self._timeline.record(effect)
                self._front.emitted(effect)
        watch.take_in()
        for effect in effects:
            self._perform(effect)
            if idle and type(effect) is RestartWorker and type(event) is not WorkerLost:
                raise InvariantBroken("a worker that owes nothing is restarted", invariant=46)
        self._steps.after_event(instance.view.oldest_step)
        watch.after()
        if self.cache is not None:
            self.tiers.after()
        self._front.after_event()
        self._arm()
        if self._looked is not None:
            self._looked()

    def _look_at_steps(self, event: Event, plans: list[StepPlan], losses: int, planned: bool) -> None:
        """Which of the plans that were in flight were absorbed, and whether their worker was lost."""
        lost = self.instance.stats.worker_losses > losses
        absorbed: list[tuple[int, StepResult]] = []
        if lost:
            self._results.clear()
            cause = event.cause if type(event) is WorkerLost else "protocol" if type(event) is StepDone else "died"
            # Results that had overtaken it are absorbed before a broken one is found: the oldest plan is then another.
            self.watch.worker_lost(plans if type(event) is StepDone else plans[:1], cause)
        elif type(event) is StepDone and plans:
            oldest = self.instance.view.oldest_step or plans[-1].step + 1
            absorbed = [(plan.step, self._results.pop(plan.step)) for plan in plans if plan.step < oldest]
            self.watch.reference.steps_absorbed(len(absorbed))
        self.watch.begin_event(event, absorbed, planned)

    def _perform(self, effect: Effect) -> None:
        if type(effect) is RunStep:
            self._run_step(effect.plan)
            return
        if type(effect) is Emit:
            return
        self._timeline.record(effect)
        match effect:
            case Refuse():
                self._timeline.note("client", f"{effect.request} refused: {effect.refused.reason}")
                self._front.refused(effect)
            case RestartWorker(epoch=epoch, cause=cause, reason=reason):
                if cause == "protocol" and not self._broken:
                    raise InvariantBroken(f"a worker that kept to the protocol is restarted: {reason}", invariant=46)
                if cause == "protocol":
                    self.process.scribble()
                if cause == "timeout":
                    self._steps.given_up()
                if cause == "timeout" and self.network.has_unread(WorkerEpoch(epoch - 1), self._oldest):
                    raise InvariantBroken("a worker is restarted whose answer is here, unread", invariant=46)
                self.watch.reference.restarted(effect.delay_seconds)
                self.watch.forced()
                self.process.restart(effect)
            case TellCache(message) if self.cache is not None:
                self.tiers.told(message, self._told, worker_ready=self.instance.worker.state.value == "ready")
                self.cache.take(message)
            case RestartCache() if self.cache is not None:
                self.cache.restart(excused=self._jumped)
            case ModeChanged(mode):
                self._timeline.note("instance", f"is {mode}")
                self.watch.mode_changed(mode)

    def _run_step(self, plan: StepPlan) -> None:
        self.watch.plans.check(plan)
        self._timeline.record(plan)
        if self._timeline.traced:
            self._timeline.note("instance", f"plan {plan.step}: {_plan_text(plan)}")
        self.network.send_plan(plan)

    # Results

    def receive(self, result: StepResult) -> None:
        self.results += 1
        self._timeline.record(result)
        if self._timeline.traced:
            self._timeline.note("worker", f"result {result.step}: {' '.join(map(str, result.values))}")
        instance, watch = self.instance, self.watch
        stale, losses, oldest = instance.stats.stale_results, instance.stats.worker_losses, instance.view.oldest_step
        of_this_life = result.epoch == instance.worker.epoch
        if not of_this_life:
            watch.saw("a result of a dead worker")
        elif oldest is not None and result.step > oldest:
            watch.saw("a result overtook an older one")
        watch.step_absorbed()
        if of_this_life:
            self._results.setdefault(result.step, result)
        due, broken = result.step == oldest, self.network.is_broken(result)
        if due and of_this_life:
            self._steps.answered()
        self._broken_early |= broken and not due
        self._broken = broken or self._broken_early
        self.tell(StepDone(self.network.unpack(result)))
        ignored = instance.stats.stale_results > stale
        if broken and due and not ignored:
            watch.saw("a broken result was found out")
            if instance.stats.worker_losses == losses:
                raise InvariantBroken(f"a broken result of step {result.step} is believed", invariant=46)
        if ignored and result.epoch == instance.worker.epoch:
            watch.saw("a result came twice")

    # Time

    def freeze(self, seconds: float) -> None:
        """The engine process is stopped (SIGSTOP, say) and goes on later. What came meanwhile is read first, then the timer."""
        if self.frozen_until is None:
            self.frozen_until = self._timeline.now + seconds
            self._steps.excuse()
            self.network.freeze(self.frozen_until)
            self.watch.saw("the engine froze")
            self._timeline.at(self.frozen_until, self._thaw)

    def _thaw(self, _: None) -> None:
        self.frozen_until = None
        self.network.freeze(None)
        self._armed = None
        self._timeline.at(self._timeline.now, self._rearm)

    def _rearm(self, _: None) -> None:
        self._arm()

    def _hear(self, event: Event) -> None:
        """Of the worker process, or of the cache service."""
        if self.frozen_until is not None:
            self._timeline.at(self.frozen_until, self._hear, event)
        else:
            self.tell(event)

    def jump(self, seconds: float) -> None:
        """The instance's clock is set, ahead or back."""
        self._clock_offset += seconds
        self._jumped |= seconds > 0
        self._steps.excuse()
        self.watch.saw("the clock jumped back" if seconds < 0 else "the clock jumped ahead")
        self._armed = None
        self._arm()

    def _arm(self) -> None:
        """One timer is enough: it is re-armed when it fires too early."""
        deadline = self.instance.next_deadline()
        if deadline is None:
            return
        due = max(self._timeline.now, deadline - self._clock_offset)
        if self._armed is None or due < self._armed:
            self._armed = due
            self._timeline.at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        if self._armed != due or self.frozen_until is not None:
            return  # an earlier timer took its place, or it is set again at the thaw
        self._armed = None
        deadline = self.instance.next_deadline()
        if deadline is not None and deadline - self._clock_offset <= self._timeline.now + 1e-9:
            self.tell(Tick(), at_least=deadline)  # rounding must not make the timer spin
            armed = self.instance.next_deadline()
            if armed is not None and armed <= deadline:
                raise InvariantBroken("a deadline that is over is still armed", invariant=35)
        else:
            self._arm()

    def kill_worker(self) -> None:
        """From outside, if there is one."""
        if self.process.epoch == self.instance.worker.epoch and self.instance.worker.state.value == "ready":
            self.process.crash("from outside", "killed")


def _plan_text(plan: StepPlan) -> str:
    parts = [f"+{new.slot}.{new.incarnation}({new.computed_tokens}/{len(new.tokens)})" for new in plan.new]
    parts += [f"-{slot}.{incarnation}" for slot, incarnation in plan.drops]
    parts += [f"fold {slot}[{place}]={block}" for slot, place, block in plan.folded]
    parts += [f"{slot}:{tokens}" for slot, tokens in zip(plan.run.slots, plan.run.counts, strict=True)]
    return " ".join(parts)
