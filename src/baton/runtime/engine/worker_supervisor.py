"""The engine's worker in all of its lives: sends plans, watches its health, restarts it, puts it to sleep and wakes it.

RestartWorker   every process releases the pool that the worker created, then another worker is started
StopWorker      the same, and none follows until the instance wakes
Wake, weights   the next worker loads others; if it cannot, the one after it loads the old ones (WeightReload)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

from baton.config import EngineConfig
from baton.core.effects import RestartWorker, RunStep, StopWorker
from baton.core.engine.idle_probe import PROBE, PROBE_SECONDS, IdleProbe
from baton.core.engine.worker_watch import WorkerState
from baton.core.events import LossCause, Wake, WorkerLost, WorkerProgressed, WorkerReady, WorkerSilent, WorkerStopped
from baton.protocol.control import (
    STEP_TOKEN_BUCKETS,
    STEP_TOKEN_SUM,
    InstanceReady,
    ModelChanged,
    OrderAnswer,
    Ping,
    Pong,
    WorkerHello,
)
from baton.protocol.ids import WorkerEpoch
from baton.runtime.engine.callers import Callers
from baton.runtime.engine.instance_loop import InstanceLoop
from baton.runtime.engine.pool_registry import PoolRegistry
from baton.runtime.engine.reporting import Reporting
from baton.runtime.engine.worker_health import WorkerHealth
from baton.runtime.processes.child import Child, Loss
from baton.runtime.processes.child_set import ChildSet

logger = logging.getLogger("baton.engine")

WORKER = "worker"
_LAST: Final = len(STEP_TOKEN_BUCKETS)
_NAMES: Final = (*map(str, STEP_TOKEN_BUCKETS), "+Inf")


class WorkerSupervisor:
    def __init__(
        self,
        model: str,
        children: ChildSet[EngineConfig],
        pool: PoolRegistry,
        machine: InstanceLoop,
        callers: Callers,
        reporting: Reporting,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.model = model
        "Path of the weights that the next worker loads."
        self.health = WorkerHealth()
        self.step_tokens = StepTokens()
        self._children = children
        self._pool = pool
        self._machine = machine
        self._callers = callers
        self._reporting = reporting
        self._spawn = spawn
        self._probe = IdleProbe()
        self._probe_timer: asyncio.TimerHandle | None = None
        self._reload: WeightReload | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def child(self) -> Child | None:
        return self._children.get(WORKER)

    # Start, loss and stop

    def on_hello(self, worker: Child, hello: WorkerHello) -> None:
        """Handle the hello of a worker other than the first."""
        instance, served, reload = self._machine.instance, self._reporting.ready, self._reload
        if reload is not None and served is not None and reload.does_not_fit(hello, served):
            worker.kill()  # the new worker's end is handled like any other, and another one is started
            return
        changed = hello.identity != (None if instance is None else instance.fingerprint) and reload is None
        if changed:
            logger.warning("the model's files have changed: the next worker computes with others, and the cache begins anew")
        self._reporting.on_next_worker(hello)
        self._machine.dispatch(WorkerReady(WorkerEpoch(worker.life), hello.pool, hello.identity, hello.steps_ahead))
        if changed:
            self._reporting.files_changed(ModelChanged(self.model, hello.identity, hello.identity_parts))

    def on_lost(self, worker: Child, loss: Loss) -> None:
        self.health.detach()
        self._machine.dispatch(WorkerLost(WorkerEpoch(worker.life), loss.text, loss.cause))

    def restart(self, effect: RestartWorker) -> None:
        """Start another worker after the delay of the effect. The old one is dead before that, and its pool is released."""
        reason = effect.reason
        if (hanging := self.child) is not None and len(hanging.ranks) > 1 and not hanging.has_reached("ready"):
            reason = f"{reason}: waited for {hanging.awaited('ready')}"
        if self._reload is not None and not self._reload.worker_starts(reason, effect.cause):
            self.model = self._reload.old
        logger.warning("starting another worker (%s)", reason)
        self._probe = IdleProbe()
        self._callers.answer_pings("the worker was lost and is being started again")

        async def wanted() -> bool:
            await self._pool.release(WORKER)
            await asyncio.sleep(effect.delay_seconds)
            instance = self._machine.instance
            # otherwise the new worker is already lost again
            return instance is not None and instance.worker.epoch == effect.epoch

        self._children.replace(WORKER, int(effect.epoch), wanted)

    def stop(self, effect: StopWorker) -> None:
        async def stop(worker: Child | None) -> None:
            await self._pool.release(WORKER)  # importers unmap first
            if worker is not None:
                await self._children.stop(worker)
            self.health.detach()
            self._callers.answer_pings("")
            self._machine.dispatch(WorkerStopped())

        self._spawn(stop(self.child))

    # Messages to the worker

    def run_step(self, effect: RunStep) -> None:
        if (worker := self.child) is not None:
            self.step_tokens.observe(effect.plan.tokens)
            worker.control.send(effect.plan)

    def ping(self, number: int) -> None:
        """Answer a caller's ping. Progress proves that a busy worker is alive; only an idle one is pinged."""
        instance, worker = self._machine.instance, self.child
        if instance is None:
            return
        fault = self.fault()
        if worker is not None and not fault and not (instance.in_flight and self.health.known):
            worker.control.send(Ping(number))
        else:
            self._callers.answer(Pong(number, fault))

    def on_pong(self, pong: Pong) -> None:
        if pong.number == PROBE:
            self._probe.answered(self._loop.time())
        else:
            self._callers.answer(pong)

    def observe(self) -> None:
        """Check the worker's progress while plans are in flight."""
        if self._machine.instance is not None:
            self.health.observe(self._machine.instance, self._loop.time())
            if self._machine.instance.in_flight and self.health.progressed():
                progressed = WorkerProgressed(self._machine.instance.worker.epoch)
                self._loop.call_soon(self._machine.dispatch_from_loop, progressed)  # this may be called within an event

    def watch_idle(self) -> None:
        """From the start of the instance on: ping an idle worker once per second, and report one that hangs."""
        self._probe_timer = self._loop.call_later(PROBE_SECONDS, self._machine.run_from_loop, self.watch_idle)
        instance = self._machine.instance
        if instance is not None:
            self.fault()
            if self._probe.silent_seconds(self._loop.time()) > instance.config.scheduler.step_seconds_max:
                self._probe = IdleProbe()
                self._machine.dispatch(WorkerSilent(instance.worker.epoch))

    def close(self) -> None:
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self.health.detach()

    def fault(self) -> str:
        """The worker's fault, for heartbeats and pings. Empty: none."""
        instance, worker, now = self._machine.instance, self.child, self._loop.time()
        assert instance is not None
        fault = self.health.fault(instance, now)
        if not fault and worker is not None:
            idle = instance.worker.state is WorkerState.READY and not instance.in_flight
            fault = self._probe.observe(now, idle=idle, ask=lambda: worker.control.send(Ping(PROBE)))
        return fault

    # Other weights

    def wake(self, number: int, model: str) -> None:
        """Start the worker again. `model`: load these weights. Empty: the present ones."""
        if model and (instance := self._machine.instance) is not None:
            if self._reload is not None or instance.worker.state is not WorkerState.ASLEEP:
                self._callers.answer(OrderAnswer(number, "refused", "weights are loaded where it is asleep, one set at a time"))
                return
            self._reload = WeightReload(number, self.model, model)
            self.model = model
        self._machine.dispatch(Wake(number))

    def answer_order(self, answer: OrderAnswer) -> None:
        """Send on the instance's answer. Only this class knows whether the weights were loaded."""
        reload = self._reload
        if reload is not None and answer.number == reload.number:
            self._reload = None
            if reload.failure:
                answer = OrderAnswer(answer.number, "refused", reload.failure)
            elif answer.outcome == "done" and self._machine.instance is not None:
                ready = self._reporting.ready
                parts = {} if ready is None else ready.identity_parts
                changed = ModelChanged(reload.new, self._machine.instance.fingerprint, parts)
                self._reporting.weights_changed(changed, self._callers.caller_of_order(answer.number))
        self._callers.answer(answer)


class WeightReload:
    """One order to load other weights, until it is answered. If the next worker cannot load them, the one after it loads the
    old ones."""

    def __init__(self, number: int, old: str, new: str) -> None:
        self.number = number
        self.old = old
        self.new = new
        self.failure = ""
        "Reason for which the old weights are loaded again."
        self._starts = 0

    def worker_starts(self, reason: str, cause: LossCause) -> bool:
        """Choose the weights of a starting worker. False: the worker with the new weights was lost, so this one gets the old
        ones. A first kill from outside is no evidence against them; a second one may be an unreported memory kill by the
        kernel."""
        self._starts += 1
        tries = 2 if cause == "killed" else 1
        if self._starts > tries and not self.failure:
            # a rank's error begins with its number
            self.failure = reason if f"{self.new}:" in reason else f"{self.new}: {reason}"
        return not self.failure

    def does_not_fit(self, hello: WorkerHello, served: InstanceReady) -> bool:
        """The reason why the new weights do not fit: the front has one tokenizer, and has promised a context."""
        if self.failure:
            return False
        if hello.vocab_size != served.vocab_size:
            self.failure = (
                f"{self.new}: its vocabulary has {hello.vocab_size} tokens, the one that is served {served.vocab_size}"
            )
        elif hello.context_tokens < served.context_tokens:
            self.failure = f"{self.new}: its context is {hello.context_tokens} tokens, and {served.context_tokens} are served"
        elif (hello.generates, hello.labels) != (served.generates, served.labels):
            self.failure = f"{self.new}: the model is of another kind than the served model, or has other classes"
        return bool(self.failure)


class StepTokens:
    """Histogram of the tokens that steps compute; observe/metrics.py shows it."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * (_LAST + 1)
        "Counts by bucket; the last bucket has larger values."
        self._sum = 0

    def observe(self, tokens: int) -> None:
        """Count a step. The buckets are powers of two, so the length of the number in bits is its bucket."""
        bucket = (tokens - 1).bit_length() if tokens > 1 else 0
        self._counts[bucket if bucket < _LAST else _LAST] += 1
        self._sum += tokens

    def table(self) -> dict[str, int]:
        """The histogram for InstanceStats.step_tokens."""
        return {**dict(zip(_NAMES, self._counts, strict=True)), STEP_TOKEN_SUM: self._sum}
