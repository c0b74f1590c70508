"""The node of a plain instance: a cluster of one engine and no router, whose clients speak to it directly.

The node compares every event of its engine with the watch, and gives its answers to a `AnswerReceiver` (clients.py), without
delay and
without a place on the timeline. Nodes that routers speak to are in cluster/.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.core.effects import Effect, ModeChanged, Refuse, RestartWorker, RunStep
from baton.core.events import Event, StepDone, WorkerLost, WorkerProgressed
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.protocol.ids import Instant, WorkerEpoch
from baton.protocol.output import Emit
from baton.protocol.step import StepPlan, StepResult
from baton.sim.clock import Clock
from baton.sim.engine import EngineOwner, SimulatedEngine
from baton.sim.scenario import Scenario
from baton.sim.step_watch import StepWatch
from baton.sim.tiers_watch import KeyContents
from baton.sim.timeline import Timeline
from baton.sim.watch import Watch


class AnswerReceiver(Protocol):
    """The receiver of a node's answers."""

    def answered(self, effects: list[Effect]) -> None:
        """Everything that one event brought, before anything of it is done."""

    def emitted(self, emit: Emit) -> None: ...

    def refused(self, refuse: Refuse) -> None: ...

    def after_event(self) -> None: ...


class Node(EngineOwner):
    def __init__(self, scenario: Scenario, timeline: Timeline, instance: Instance, watch: Watch) -> None:
        self.instance = instance
        self.watch = watch
        self.weights = 0
        "That the model's files are now."
        self.engine = SimulatedEngine(
            "", "mixed", scenario, timeline, Clock(timeline, scenario.seed, 0, skewed=False), instance, self, watch.plans,
            watch, KeyContents(scenario.block_size, watch.all_trips), lambda: self.weights,
        )  # fmt: skip
        self.dispatch, self.kill_worker = self.engine.dispatch, self.engine.kill_worker
        self.tiers, self.cache, self.process = self.engine.tiers, self.engine.cache, self.engine.process
        self._steps = StepWatch(scenario, timeline)
        self._results: dict[int, StepResult] = {}
        "Of this life of the worker, and not absorbed yet."
        self._timeline = timeline
        self._front: AnswerReceiver
        self._looked: Callable[[], None] | None = None
        self._event: Event
        self._plans: list[StepPlan] = []
        "Plans in flight when the present event began."
        self._losses = self._stale = 0
        "Of the instance's figures, when the present event or result came."
        self._idle = False
        "The worker owed nothing when the present event began."
        self._due = False
        "The result at hand is that of the oldest step in flight."
        self.frozen_until: float | None = None
        "The engine process does nothing until then; what is sent to it waits."
        self._broken = self._broken_early = False
        "A broken result overtook an older one, and is found out when its turn comes."

    def connect(self, front: AnswerReceiver, looked: Callable[[], None] | None) -> None:
        """Who gets the answers, and who looks on after each event."""
        self._front, self._looked = front, looked

    @property
    def results(self) -> int:
        return self.engine.results

    def begin(self) -> None:
        self.engine.begin()

    def heal(self) -> None:
        """A gone worker is replaced by hand, and the instance is resumed."""
        if self.instance.worker.state.value == "gone":
            self.watch.reference.replaced()
        self.engine.heal(hung=False)

    def at_rest(self) -> None:
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

    # An event of the engine

    def before(self, event: Event, now: Instant) -> None:
        instance = self.instance
        self._event, self._plans, self._losses = event, instance.view.plans(), instance.stats.worker_losses
        self._idle = not self._plans and instance.worker.state.value == "ready"
        self.watch.reference.before_event(event, now)
        if type(event) is WorkerProgressed and event.epoch == instance.worker.epoch:
            self._steps.progressed()

    def handled(self, event: Event, effects: list[Effect]) -> None:
        for effect in effects:
            if type(effect) is Emit:
                self.watch.progressed(effect)  # before a loss in the same event: a worker is lost after its results are in
        self._look_at_steps(event, any(type(effect) is RunStep for effect in effects))
        self._front.answered(effects)
        if not any(type(effect) is Emit for effect in effects):
            self.watch.take_in()

    def _look_at_steps(self, event: Event, planned: bool) -> None:
        """Which of the plans that were in flight were absorbed, and whether their worker was lost."""
        plans, absorbed = self._plans, list[tuple[int, StepResult]]()
        if self.instance.stats.worker_losses > self._losses:
            self._results.clear()
            cause = event.cause if type(event) is WorkerLost else "protocol" if type(event) is StepDone else "died"
            # Results that had overtaken it are absorbed before a broken one is found: the oldest plan is then another.
            self.watch.worker_lost(plans if type(event) is StepDone else plans[:1], cause)
        elif type(event) is StepDone and plans:
            oldest = self.instance.view.oldest_step or plans[-1].step + 1
            absorbed = [(plan.step, self._results.pop(plan.step)) for plan in plans if plan.step < oldest]
            self.watch.reference.steps_absorbed(len(absorbed))
        self.watch.begin_event(event, absorbed, planned)

    def performs(self, effect: Effect) -> None:
        match effect:
            case Emit():
                self.watch.emitted(effect, self._timeline.now)
                self._front.emitted(effect)
            case RunStep(plan) if self._timeline.traced:
                self._timeline.note("instance", f"plan {plan.step}: {_plan_text(plan)}")
            case Refuse():
                self._timeline.note("client", f"{effect.request} refused: {effect.refused.reason}")
                self._front.refused(effect)
            case RestartWorker():
                self._restarts_worker(effect)
            case ModeChanged(mode):
                self._timeline.note("instance", f"is {mode}")
                self.watch.mode_changed(mode)

    def _restarts_worker(self, effect: RestartWorker) -> None:
        """46: a worker is restarted that owes an answer, has broken the protocol, or is overdue."""
        oldest = self._plans[0].step if self._plans else 0
        if effect.cause == "protocol" and not self._broken:
            raise InvariantBroken(f"a worker that kept to the protocol is restarted: {effect.reason}", invariant=46)
        if effect.cause == "timeout":
            self._steps.given_up()
            if self.engine.network.has_unread(WorkerEpoch(effect.epoch - 1), oldest):
                raise InvariantBroken("a worker is restarted whose answer is here, unread", invariant=46)
        if self._idle and type(self._event) is not WorkerLost:
            raise InvariantBroken("a worker that owes nothing is restarted", invariant=46)
        self.watch.reference.restarted(effect.delay_seconds)
        self.watch.forced()

    def after(self) -> None:
        self._steps.after_event(self.instance.view.oldest_step)
        self.watch.after()
        self._front.after_event()
        if self._looked is not None:
            self._looked()

    # A result

    def receives(self, result: StepResult, *, broken: bool) -> None:
        if self._timeline.traced:
            self._timeline.note("worker", f"result {result.step}: {' '.join(map(str, result.values))}")
        instance, watch = self.instance, self.watch
        self._stale, oldest = instance.stats.stale_results, instance.view.oldest_step
        of_this_life = result.epoch == instance.worker.epoch
        if not of_this_life:
            watch.saw("a result of a dead worker")
        elif oldest is not None and result.step > oldest:
            watch.saw("a result overtook an older one")
        watch.step_absorbed()
        self._due = result.step == oldest
        if of_this_life:
            self._results.setdefault(result.step, result)
            if self._due:
                self._steps.answered()
        self._broken_early |= broken and not self._due
        self._broken = broken or self._broken_early

    def received(self, result: StepResult, *, broken: bool) -> None:
        stats = self.instance.stats
        ignored = stats.stale_results > self._stale
        if broken and self._due and not ignored:
            self.watch.saw("a broken result was found out")
            if stats.worker_losses == self._losses:
                raise InvariantBroken(f"a broken result of step {result.step} is believed", invariant=46)
        if ignored and result.epoch == self.instance.worker.epoch:
            self.watch.saw("a result came twice")

    # Time

    def freeze(self, seconds: float) -> None:
        """The engine process is stopped (SIGSTOP, say) and goes on later. What came meanwhile is read first, then the timer."""
        if self.frozen_until is None:
            self.frozen_until = self._timeline.now + seconds
            self._steps.excuse()
            self.engine.freeze(self.frozen_until)
            self.watch.saw("the engine froze")
            self._timeline.at(self.frozen_until, self._thaw)

    def _thaw(self, _: None) -> None:
        self.frozen_until = None
        self.engine.thaw()

    def defer(self, event: Event) -> bool:
        """An event of the worker process, or of the cache service, comes after the thaw."""
        assert self.frozen_until is not None
        self._timeline.at(self.frozen_until, self._hear, event)
        return True

    def _hear(self, event: Event) -> None:
        self.engine.hear(event)

    def jump(self, seconds: float) -> None:
        """The instance's clock is set, ahead or back."""
        self._steps.excuse()
        self.watch.saw("the clock jumped back" if seconds < 0 else "the clock jumped ahead")
        self.engine.jump(seconds)


def _plan_text(plan: StepPlan) -> str:
    parts = [f"+{new.slot}.{new.incarnation}({new.computed_tokens}/{len(new.tokens)})" for new in plan.new]
    parts += [f"-{slot}.{incarnation}" for slot, incarnation in plan.drops]
    parts += [f"fold {slot}[{place}]={block}" for slot, place, block in plan.deduplicated]
    parts += [f"{slot}:{tokens}" for slot, tokens in zip(plan.run.slots, plan.run.counts, strict=True)]
    return " ".join(parts)
