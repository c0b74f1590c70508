"""One serving instance as a machine: events in, effects out, one thread, no locks.

A request's way:  Submit -> queue -> admitted into a plan -> RunStep -> StepDone -> Emit ... Ended
                  (waiting.py)      (scheduler.py)                    (absorb.py)

pipeline.py sends plans and receives results. Plans of a lost worker are void: every sequence returns to the queue with its
tokens, and the next worker computes the rest again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, get_args

from baton.config import InstanceConfig
from baton.core.effects import Effect, Mode, Refuse, RestartCache, RestartWorker, RunStep, SendToCache
from baton.core.engine.board import Board
from baton.core.engine.intake import Intake
from baton.core.engine.loading import Loader
from baton.core.engine.pace import StepPace
from baton.core.engine.phase import OPEN
from baton.core.engine.pipeline import StepPipeline
from baton.core.engine.proof import check_board, check_part
from baton.core.engine.recovery import Suspects
from baton.core.engine.scheduler import Scheduler
from baton.core.engine.service_mode import ServiceMode
from baton.core.engine.sleeping import Sleeping
from baton.core.engine.stats import Stats
from baton.core.engine.view import SchedulerView
from baton.core.engine.worker_watch import WorkerState, WorkerWatch
from baton.core.events import (
    Abort,
    BlocksMoved,
    CacheLost,
    CacheReady,
    CallerLeft,
    Event,
    EvictSome,
    ForgetCache,
    HandoffEvent,
    HoldPause,
    LossCause,
    Pause,
    PreemptSome,
    Resume,
    Sleep,
    StepDone,
    StorageAnswered,
    Submit,
    Tick,
    Wake,
    WorkerLost,
    WorkerProgressed,
    WorkerReady,
    WorkerSilent,
    WorkerStopped,
)
from baton.core.handoff.ends import HandoffEnds
from baton.errors import InvariantBroken, ProtocolError
from baton.protocol.control import OrderAnswer
from baton.protocol.ids import Instant
from baton.protocol.output import OTHER_WEIGHTS
from baton.protocol.request import FinishReason

CHECK_BLOCKS: Final = 2048
"""Number of blocks of each tier that one idle check covers: a few milliseconds."""


class Instance:
    __slots__ = (
        "_checked",
        "_effects",
        "_handlers",
        "_handoff",
        "_intake",
        "_loader",
        "_now",
        "_pace",
        "_service",
        "_sleeping",
        "_steps",
        "_suspects",
        "board",
        "config",
        "in_flight",
        "stats",
        "view",
        "worker",
    )

    def __init__(self, config: InstanceConfig) -> None:
        self.config = config
        self.stats = Stats()
        self.board = Board(config, self.stats)
        self._pace = StepPace(config.scheduler)
        self._loader = Loader(self.board, self.board.tiers, self._pace)
        scheduler = Scheduler(config.scheduler, self.board, self._pace, self._loader)
        self._suspects = Suspects()
        self.worker = WorkerWatch(config.scheduler)
        self._steps = StepPipeline(config.scheduler, self.board, scheduler, self._pace, self.worker)
        self.in_flight = self._steps.in_flight
        self.view = SchedulerView(self.board, self.in_flight)
        self._service = ServiceMode(config.scheduler)
        self._sleeping = Sleeping(config.scheduler, self.worker)
        self._intake = Intake(config, self.board, self.worker, self._service)
        self._handoff = HandoffEnds(config, self.board, self._intake)
        self._checked = 0
        "First block of the next check in this round."
        self._now = Instant(0.0)
        self._effects: list[Effect] = []
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            Submit: self._on_submit,
            Abort: self._on_abort,
            StepDone: self._on_step_done,
            WorkerReady: self._on_worker_ready,
            WorkerLost: self._on_worker_lost,
            WorkerProgressed: self._on_worker_progressed,
            WorkerSilent: self._on_worker_silent,
            BlocksMoved: self._on_blocks_moved,
            StorageAnswered: self._on_storage_answered,
            CacheReady: self._on_cache_ready,
            CacheLost: self._on_cache_lost,
            Pause: self._on_pause,
            HoldPause: self._on_hold_pause,
            CallerLeft: self._on_caller_left,
            Resume: self._on_resume,
            Sleep: self._on_sleep,
            WorkerStopped: self._on_worker_stopped,
            Wake: self._on_wake,
            PreemptSome: self._on_preempt_some,
            EvictSome: self._on_evict_some,
            ForgetCache: self._on_forget_cache,
            Tick: self._on_tick,
            **dict.fromkeys(get_args(HandoffEvent), self._on_handoff),
        }

    # The machine

    def handle(self, event: Event, now: Instant) -> list[Effect]:
        """Handle one event, then everything that may follow from it: deadlines, suspects, loads, hand-offs, the next plans, and
        output."""
        self._now = self.board.now = max(self._now, now)  # a clock may go backwards; the instance's time does not
        self._handlers[type(event)](event)
        self._expire()
        if self._suspects.any:
            self._suspects.settle(self.board)
        tiers = self.board.tiers
        if tiers.enabled:
            self._loader.query_storage_for_new(self._now)
        if self.board.awaiting:
            self._handoff.grant(self._now, self._steps.last_step)
        self._pump()
        if tiers.enabled:
            self._move_blocks()
        emit = self.board.out.flush()
        if emit is not None:
            self._effects.append(emit)
            for ended in emit.ended:
                if ended.request in self.board.groups:
                    self.board.forget(ended.request)
        self._handoff.end_event(self._now)
        if self._handoff.outgoing:
            self._effects += self._handoff.outgoing
            self._handoff.outgoing.clear()
        if self.idle and not self.board.slots.taken:
            self._effects += self._service.drained()
        effects, self._effects = self._effects, []
        return effects

    def next_deadline(self) -> Instant | None:
        deadline = self.worker.deadline
        for other in (
            self._service.drain_deadline,
            self._sleeping.deadline,
            self._intake.next_deadline(),
            self._loader.next_deadline(),
            self.board.tiers.next_deadline(),
            self._handoff.next_deadline(),
        ):
            if other is not None and (deadline is None or other < deadline):
                deadline = other
        return deadline

    def check(self) -> None:
        check_board(self.board)
        self._check_machine()

    def check_part(self, blocks: int = CHECK_BLOCKS) -> None:
        """Check the next `blocks` blocks of each tier, and everything that grows with requests. An idle engine calls this, so
        that the first request after it does not wait for the check of a large pool."""
        begin, self._checked = self._checked, self._checked + blocks
        if self._checked >= max(self.config.kv.blocks, self.config.tiers.host_blocks):
            self._checked = 0
        check_part(self.board, begin, begin + blocks)
        self._check_machine()

    def _check_machine(self) -> None:
        self._loader.check()
        self._handoff.check()
        self._suspects.check(self.board)
        self._service.check()
        self._sleeping.check()
        queue = self.config.queue
        if self.board.queued > queue.requests_max or self.board.queued_tokens > queue.tokens_max:
            raise InvariantBroken("more is queued than the queue may hold", invariant=49)
        if len(self.in_flight) > self.config.scheduler.steps_in_flight:
            raise InvariantBroken(f"{len(self.in_flight)} plans in flight", invariant=49)

    # Queries

    @property
    def idle(self) -> bool:
        """Whether no client waits for an answer and no plan is in flight. A prompt kept for another instance counts as work
        until it expires."""
        return not self.board.groups and not self.in_flight and not self.board.kept

    @property
    def fingerprint(self) -> bytes:
        """Root of the keys of cached blocks, which is the last worker's fingerprint."""
        return self.board.hasher.fingerprint

    @property
    def prompt_token_seconds(self) -> float:
        """Measured seconds per prompt token. 0: not known."""
        return self._pace.price or 0.0

    # Requests

    def _on_submit(self, event: Submit) -> None:
        request = event.request
        refused = self._intake.refusal(request)
        if refused is not None:
            self.stats.refused[refused.reason] += 1
            self._effects.append(Refuse(request.id, refused, request.attempt))
            return
        self._intake.end_silently(request.id, request.attempt)  # its caller does not wait for the earlier attempt
        self._intake.begin(self._intake.group_of(request, self._now))

    def _on_abort(self, event: Abort) -> None:
        self._intake.abort(event)

    def _on_handoff(self, event: HandoffEvent) -> None:
        self._handoff.handle(event, self._now, self._steps.last_step)

    # Steps

    def _pump(self) -> None:
        """Plan steps until the worker has enough, or no work is left."""
        while self.worker.state is WorkerState.READY and self._service.mode is not Mode.PAUSED:
            plan = self._steps.plan(self._now)
            if plan is None:
                return
            self._effects.append(RunStep(plan))

    def _on_step_done(self, event: StepDone) -> None:
        try:
            self._steps.take(event.result, self._now)
        except ProtocolError as error:
            self._lose_worker("protocol", str(error))

    # The worker's life

    def _on_worker_ready(self, event: WorkerReady) -> None:
        """Begin to plan for a new worker. Cached blocks stay valid if the pool is the same and its contents were computed in
        the same way."""
        if not self.worker.ready(event.epoch, self._now):
            return
        self._suspects.steps_ahead = event.steps_ahead
        pool = self.board.pool
        if event.fingerprint != self.fingerprint or not pool.is_still(event.pool):
            self._handoff.pool_changed()
            self._loader.pool_changed()
        if event.fingerprint != self.fingerprint:
            self._end_begun()
            self.board.reroot(event.fingerprint)
        elif not pool.is_still(event.pool):
            self.board.cache.clear()
        pool.begin(event.pool)
        self._effects += self._sleeping.ready()

    def _end_begun(self) -> None:
        """End answers that have begun: other weights would continue them differently. Requests without a token begin with the
        new weights."""
        for group in list(self.board.groups.values()):
            if any(sequence.outputs or sequence.phase not in OPEN for sequence in group.sequences):
                self._intake.end_all(group, FinishReason.ERROR, "worker_gone", OTHER_WEIGHTS)

    def _on_sleep(self, event: Sleep) -> None:
        awake = not self._sleeping.asleep
        self._effects += self._sleeping.sleep(event, self._now, paused=self.mode is Mode.PAUSED)
        if awake and self._sleeping.asleep:
            self._distrust_pool()

    def _on_worker_stopped(self, event: WorkerStopped) -> None:
        self._effects += self._sleeping.stopped(self._now)

    def _on_wake(self, event: Wake) -> None:
        self._effects += self._sleeping.wake(event, self._now)

    def _on_worker_lost(self, event: WorkerLost) -> None:
        if event.epoch == self.worker.epoch and self.worker.state is not WorkerState.GONE:
            self._lose_worker(event.cause, event.reason)

    def _on_worker_progressed(self, event: WorkerProgressed) -> None:
        if event.epoch == self.worker.epoch:
            self.worker.progressed(self._now)

    def _on_worker_silent(self, event: WorkerSilent) -> None:
        """Replace a worker that hangs while it has no plan. One with a plan has the deadline of its step."""
        ready = event.epoch == self.worker.epoch and self.worker.state is WorkerState.READY
        if ready and not self.in_flight:
            self._lose_worker("timeout", "no answer in time, and it had no work")

    def _lose_worker(self, cause: LossCause, reason: str) -> None:
        """Return everything on the worker to the queue, with its tokens; plans in flight are void."""
        self.stats.worker_losses += 1
        evidence = cause != "killed" or self.worker.killed(self._now)
        explained = self._suspects.worker_lost(self.board, (issued.plan for issued in self.in_flight), evidence=evidence)
        self._steps.clear()
        if cause == "protocol":
            self._distrust_pool()  # a worker that broke the protocol may have written through a wrong block table
        delay = self.worker.lose(self._now, counts=evidence and not explained)
        if delay is not None:
            self._effects.append(RestartWorker(self.worker.epoch, cause, reason, delay))
            return
        self._effects += self._sleeping.gone()
        for group in list(self.board.groups.values()):
            self._intake.end_all(group, FinishReason.ERROR, "worker_gone", "the worker was lost too often in a row")

    def _distrust_pool(self) -> None:
        """Distrust every block of the pool: copies in progress or complete are void, and so are reservations in it."""
        self.board.pool.lose()
        self.board.tiers.void_device_moves()
        self._handoff.pool_changed()

    # The cache service

    def _move_blocks(self) -> None:
        """Send the moves whose target blocks no plan in flight writes. A lost worker may write until the next one is ready."""
        tiers = self.board.tiers
        if self.worker.state is WorkerState.READY:
            tiers.open_fences(self.in_flight[0].plan.step if self.in_flight else None, self._now)
        tiers.flush(self._now)
        if tiers.outgoing:
            self._effects.extend(SendToCache(message) for message in tiers.outgoing)
            tiers.outgoing.clear()

    def _on_blocks_moved(self, event: BlocksMoved) -> None:
        move = self.board.tiers.complete(event.result, self._now)
        if move is not None and move.kind == "pull":
            self._handoff.pulled(move, self._now)
        elif move is not None:
            self._loader.moved(move)

    def _on_storage_answered(self, event: StorageAnswered) -> None:
        self._loader.answered(event.answer, self._now)

    def _on_cache_ready(self, event: CacheReady) -> None:
        self._end_moves()  # no move of the previous cache service continues
        self.board.tiers.service_ready(kept=event.kept, wants_tokens=event.wants_tokens)

    def _on_cache_lost(self, event: CacheLost) -> None:
        self._end_moves()

    def _end_moves(self) -> None:
        self._loader.service_lost(self._now)
        self._handoff.service_lost(self._now)

    # Pause

    @property
    def mode(self) -> Mode:
        return self._service.mode

    def _on_pause(self, event: Pause) -> None:
        self._effects += self._service.pause(event, self._now)

    def _on_hold_pause(self, event: HoldPause) -> None:
        self._service.hold(event.caller)

    def _on_caller_left(self, event: CallerLeft) -> None:
        """Serve again if the caller has left in the middle of an order, with the weights that there are: a wake that it has
        ordered goes on."""
        if self._service.is_held_by(event.caller):
            if self._sleeping.asleep:
                self._effects += self._sleeping.wake(Wake(None), self._now)
            self._effects += self._service.resume(Resume())

    def _on_resume(self, event: Resume) -> None:
        if self._sleeping.asleep and event.number is not None:
            self._effects.append(OrderAnswer(event.number, "refused", "it is asleep: wake it first"))
        else:
            self._effects += self._service.resume(event)

    # Pressure and time

    def _on_preempt_some(self, event: PreemptSome) -> None:
        for _ in range(min(event.count, len(self.board.running))):
            self.board.preempt(self.board.running[-1])

    def _on_evict_some(self, event: EvictSome) -> None:
        self.board.cache.evict(event.count)

    def _on_forget_cache(self, event: ForgetCache) -> None:
        if event.device:
            self.board.cache.clear_idle()
        if event.host:
            self.board.tiers.forget_host()
        self._effects.append(OrderAnswer(event.number, "done"))

    def _on_tick(self, event: Tick) -> None:
        """Check deadlines. Those of requests expire after every event, those of worker and cache service only here: after a
        pause of the whole process their answers may wait unread behind other messages (runtime/driver.py)."""
        if self.worker.deadline is not None and self.worker.deadline <= self._now:
            self._lose_worker("timeout", self.worker.overdue)
        self._effects += self._sleeping.expire(self._now)
        hang = self.board.tiers.hangs(self._now)
        if hang is not None:
            self._effects.append(RestartCache(hang))
        self._loader.storage_late(self._now)

    def _expire(self) -> None:
        now = self._now
        self._intake.expire(now)
        drain = self._service.drain_deadline
        if drain is not None and drain <= now:
            self._service.drain_deadline = None
            for group in list(self.board.groups.values()):
                self._intake.end_all(group, FinishReason.ABORT)
            self._handoff.drop_kept()
        self._loader.expire(now)
        self._handoff.expire(now)
