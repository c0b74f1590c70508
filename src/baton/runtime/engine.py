"""The engine process: the instance machine on a real loop, between its callers (the front, routers) and its worker.

    callers --requests, aborts, pings--> ENGINE --plans--> worker
            <--tokens, ends, numbers---         <-results-

It starts its children as its row of core/startup.py says, and another worker when that one is lost; the machine decides,
this file acts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from msgspec.structs import replace as replace_fields

from baton.config import EngineConfig, PoolAccess, TierConfig, TiersConfig
from baton.core.effects import Effect, ModeChanged, Refuse, RestartCache, RestartWorker, RunStep, StopWorker, TellCache
from baton.core.engine.instance import Instance
from baton.core.engine.worker_watch import WorkerState
from baton.core.events import (
    BlocksMoved,
    CacheLost,
    CacheReady,
    Event,
    Pause,
    Resume,
    StepDone,
    StorageAnswered,
    Tick,
    Wake,
    WorkerLost,
    WorkerReady,
    WorkerStopped,
)
from baton.core.startup import StartupPlan, plan_startup
from baton.errors import EngineError, InvariantBroken, PeerError
from baton.observe.logs import configure
from baton.protocol.codec import Message
from baton.protocol.control import (
    CacheHello,
    CacheStats,
    InstanceReady,
    InstanceStats,
    LoadProgress,
    ModelChanged,
    ModeReport,
    OrderAnswer,
    Ping,
    Pong,
    ProgressShared,
    StartFailed,
    WorkerHello,
)
from baton.protocol.handoff import Adopted, AskRelease, Expecting, Offer, Released
from baton.protocol.ids import RequestId, WorkerEpoch
from baton.protocol.moves import MoveResult, StorageAnswer
from baton.protocol.node import Beat, NodeHello
from baton.protocol.output import Emit
from baton.protocol.pool import HostPoolReady, PoolAttached, PoolDetached, PoolReady, PoolSized
from baton.protocol.step import StepResult
from baton.runtime.callers import Callers
from baton.runtime.channel import Channel
from baton.runtime.child import Child, Loss
from baton.runtime.child_set import ChildSet
from baton.runtime.children import begin_child, freeze_gc_heap
from baton.runtime.driver import Driver
from baton.runtime.leaving import Leaving
from baton.runtime.pool_holder import PoolHolder
from baton.runtime.private_folder import PrivateFolder, peer_folder
from baton.runtime.process_table import CONTROL, ENGINE_CHILDREN, Restart
from baton.runtime.router_links import RouterLinks
from baton.runtime.secret import read_secret
from baton.runtime.snapshot import beat_of, snapshot
from baton.runtime.startup import Startup
from baton.runtime.weight_reload import WeightReload
from baton.runtime.worker_health import PROBE, IdleProbe, WorkerHealth

logger = logging.getLogger("baton.engine")

STATS_SECONDS = 0.2
"""While there is work the front's numbers are at most this old; when there is none they are told at once."""

CHECK_SECONDS = 10.0
"""An idle engine checks its books at most this often."""

FAULT_EVENTS = (WorkerReady, WorkerLost, Pause, Resume)
"""After these something may be wrong, or well again. What shows only in time goes with the next beat."""


class Engine:
    rows = ENGINE_CHILDREN
    "Rehearsals put disturbed programs in some of them."

    def __init__(self, config: EngineConfig, front: Channel | None, supervisor: Channel) -> None:
        if not config.instance.kv.prefix_caching:
            config = replace(config, tiers=TiersConfig())
        self._plan = plan_startup(blocks_given=config.worker.blocks is not None, role=config.role, tiers=bool(config.tiers))
        self._config = replace(config, worker=replace(config.worker, pool=pool_access(self._plan)))
        self._front = front
        self._supervisor = supervisor
        self._callers = Callers(self)
        self._links: RouterLinks | None = None
        if config.routers:
            self._links = RouterLinks(config.routers, read_secret(config.cluster_secret), self, self._callers)
        self._incarnation = secrets.randbits(63)
        self._layout = b""
        scheduler = config.instance.scheduler
        self._children: ChildSet[EngineConfig] = ChildSet(
            self.rows,
            lambda: self._config,
            self,
            restarts_max=scheduler.worker_restarts_max,
            backoff_seconds_max=scheduler.restart_backoff_seconds_max,
        )
        seconds = scheduler.worker_start_seconds_max
        self._startup = Startup(self._plan, self._children, config.worker.blocks, seconds)
        self._pool = PoolHolder(self._plan, self._children)
        self._instance: Instance | None = None
        self._driver: Driver[Event, Effect] | None = None
        self._cache_hello: CacheHello | None = None
        self._peer_folder: PrivateFolder | None = None
        self._storage_counters: dict[str, int] = {}
        self._stats_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._health = WorkerHealth()
        self._probe = IdleProbe()
        self._ready: InstanceReady | None = None
        self._reload: WeightReload | None = None
        self._check_due = 0.0
        self._leaving = Leaving()
        if self._links is not None:
            self._links.on_alone = self._leaving.on_alone
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._over: asyncio.Future[None] = self._loop.create_future()

    async def run(self) -> None:
        """Until the front is gone, or the supervisor."""
        try:
            self._make_peer_folder()
            self._spawn(self._start())
            if self._front is not None:
                self._spawn(self._serve_front(self._front))
            self._spawn(self._watch_supervisor())
            await self._over
        finally:
            if self._driver is not None:
                self._driver.close()
            if self._stats_timer is not None:
                self._stats_timer.cancel()
            for task in self._tasks:
                task.cancel()
            await self._children.end()
            self._pool.close_all()
            self._health.detach()
            if self._peer_folder is not None:
                self._peer_folder.remove()

    @property
    def peer_address(self) -> str:
        """Where other instances may read our pool: the messenger's, the same in all of its lives. Empty: nowhere."""
        return self._config.peer

    def _make_peer_folder(self) -> None:
        """By us and not by the cache service, which may be killed at any moment: the folder outlives it."""
        if "cache" in self._plan.processes:
            self._peer_folder = peer_folder(needed=self._plan.creator == "messenger")
        if self._peer_folder is not None:
            self._config = replace(self._config, peer=self._peer_folder.address)

    async def _start(self) -> None:
        self._begin(await self._startup.run())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task whose failure ends the engine: nothing of ours fails unseen."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_over(error)

    def on_over(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    # The children

    @property
    def _worker(self) -> Child | None:
        return self._children.get("worker")

    def on_started(self, child: Child) -> None:
        self._pool.hand_to(child)

    def on_descriptor(self, child: Child, message: Message, fd: int) -> None:
        if type(message) is HostPoolReady:
            self._pool.keep_host(message, fd)
        elif type(message) is PoolReady:
            child.mark_ready()
            self._pool.on_announced(child, message, fd)
            self._startup.reach("create", child.name)
        elif type(message) is ProgressShared:
            self._health.attach(fd)
        else:
            os.close(fd)

    def on_lost(self, child: Child, loss: Loss) -> None:
        logger.warning("%s", loss.text)
        self._pool.on_lost(child)
        if child.name == "cache":
            self._cache_hello = None
            self.tell(CacheLost())
        if child.row.restart is Restart.ORDERED:
            self._health.detach()
            self.tell(WorkerLost(WorkerEpoch(child.life), loss.text, loss.cause))

    def on_message(self, child: Child, message: Message) -> None:
        if type(message) is StepResult:
            self.tell(StepDone(message))
        else:
            self._on_rare_message(child, message)

    def _on_rare_message(self, child: Child, message: Message) -> None:
        match message:
            case Pong(number) if number == PROBE:
                self._probe.answered(self._loop.time())
            case Pong():
                self._callers.pong(message)
            case LoadProgress() if self._driver is None:
                self._supervisor.send(message)
            case PoolSized():
                self._startup.on_sized(child.name, message)
            case PoolAttached():
                child.mark_ready()
                self._pool.on_attached(child, message.incarnation)
                self._startup.reach("attach", child.name)
            case MoveResult():
                self.tell(BlocksMoved(message))
            case StorageAnswer():
                self.tell(StorageAnswered(message))
            case CacheHello():
                self._on_cache_hello(message)
            case CacheStats(counters):
                self._storage_counters = counters
            case PoolDetached():
                self._pool.on_detached(child, message.incarnation)
            case WorkerHello():
                child.mark_ready()
                if self._driver is None:
                    self._startup.on_hello(child.name, message)
                else:
                    self._on_next_hello(child, message)

    def _begin(self, hello: WorkerHello) -> None:
        """Everything is started: now the size of the pool is known, and the instance exists."""
        config = self._config.instance
        kv = replace(config.kv, blocks=hello.blocks, block_size=hello.block_size)
        tiers = config.tiers
        if "cache" in self._plan.processes:
            tiers = replace(self._config.tiers.machine(hello.block_bytes), peers=bool(self._config.peer))
        instance = self._instance = Instance(replace(config, kv=kv, tiers=tiers))
        worker = replace(self._config.worker, blocks=hello.blocks)  # its successors have as many, or fail
        self._config = replace(self._config, worker=worker)
        self._children.start_is_over()
        ports: dict[type[Any], Callable[[Any], None]] = {
            RunStep: self._run_step,
            Emit: self._callers.emit,
            Refuse: self._callers.refuse,
            **dict.fromkeys((Expecting, Offer, AskRelease, Released, Adopted), self._callers.pass_on),
            RestartWorker: self._restart_worker,
            ModeChanged: self._on_mode,
            OrderAnswer: self._answer_order,
            StopWorker: self._stop_worker,
            TellCache: self._tell_cache,
            RestartCache: self._restart_cache,
        }
        self._driver = Driver(instance, ports, self._on_due)
        freeze_gc_heap()
        ready = InstanceReady(
            hello.blocks,
            hello.block_size,
            config.scheduler.slots,
            hello.vocab_size,
            hello.context_tokens,
            hello.model_context_tokens,
            hello.sampling_defaults,
            hello.identity,
            self._resolved() | hello.plan,
        )
        self._ready, self._layout = ready, hello.layout
        self._send_front(ready)
        self._supervisor.send(ready)
        if hello.digest_seconds:
            logger.info("digest of the weights: %.1f s beside loading, kept for the next start", hello.digest_seconds)
        self.tell(WorkerReady(hello.epoch, hello.pool, hello.identity))
        if self._cache_hello is not None:
            self._on_cache_hello(self._cache_hello)
        if self._links is not None:
            self._spawn(self._links.run())

    def _on_cache_hello(self, hello: CacheHello) -> None:
        if self._driver is None:
            self._cache_hello = hello  # it was quicker than the rest
            self._startup.reach("ready", "cache")
            return
        assert self._instance is not None
        books = self._instance.board.tiers.host.total
        if hello.host_blocks != books:
            raise PeerError(f"the cache service has {hello.host_blocks} host blocks, and the books are about {books}")
        if hello.peer != self._config.peer:
            raise PeerError("the cache service lets others read our pool elsewhere than it was told")
        self.tell(CacheReady(hello.kept, hello.wants_tokens))

    def _tell_cache(self, effect: TellCache) -> None:
        cache = self._children.get("cache")
        if cache is not None:
            cache.control.send(effect.message)

    def _restart_cache(self, effect: RestartCache) -> None:
        """Its end is noticed like any other, and another one is started."""
        logger.warning("the cache service is killed: %s", effect.reason)
        cache = self._children.get("cache")
        if cache is not None:
            cache.process.kill()

    def _resolved(self) -> dict[str, int | float | str]:
        """The row of core/startup.py that was carried out, for people."""
        return {
            "role": self._config.role,
            "processes": ", ".join(self._plan.processes),
            "pool_created_by": self._plan.creator,
            "pool_attached_by": ", ".join(self._plan.attachers) or "nobody",
        }

    def _on_next_hello(self, worker: Child, hello: WorkerHello) -> None:
        if self._reload is not None and self._ready is not None and self._reload.does_not_fit(hello, self._ready):
            worker.process.kill()  # its end is noticed like any other, and another one is started
            return
        before, reload = None if self._instance is None else self._instance.fingerprint, self._reload
        if hello.identity != before and reload is None:
            logger.warning("the model's files have changed: the next worker computes with others, and the cache begins anew")
        if self._ready is not None:
            self._ready, self._layout = replace_fields(self._ready, identity=hello.identity), hello.layout
        self.tell(WorkerReady(WorkerEpoch(worker.life), hello.pool, hello.identity))
        if hello.identity != before and reload is None and self._links is not None:
            self._links.identity_changed(ModelChanged(self._config.worker.model, hello.identity))

    def _run_step(self, effect: RunStep) -> None:
        if self._worker is not None:
            self._worker.control.send(effect.plan)

    def _on_mode(self, effect: ModeChanged) -> None:
        self._callers.send_all(ModeReport(effect.mode.value))
        self._leaving.on_mode(effect.mode)

    def _stop_worker(self, effect: StopWorker) -> None:
        async def stop(worker: Child | None) -> None:
            await self._pool.release("worker")  # importers unmap first
            if worker is not None:
                await self._children.stop(worker)
            self._health.detach()
            self._callers.answer_pings("")
            self.tell(WorkerStopped())

        self._spawn(stop(self._worker))

    def wake(self, number: int, model: str) -> None:
        if model and self._instance is not None:
            if self._reload is not None or self._instance.worker.state is not WorkerState.ASLEEP:
                self._callers.answer(OrderAnswer(number, "refused", "weights are loaded where it is asleep, one set at a time"))
                return
            self._reload = WeightReload(number, self._config.worker.model, model)
            self._use_model(model)
        self.tell(Wake(number))

    def _use_model(self, model: str) -> None:
        self._config = replace(self._config, worker=replace(self._config.worker, model=model))

    def _answer_order(self, answer: OrderAnswer) -> None:
        reload = self._reload
        if reload is not None and answer.number == reload.number:
            self._reload = None
            if reload.failure:
                answer = OrderAnswer(answer.number, "refused", reload.failure)
            elif answer.outcome == "done" and self._instance is not None:
                changed = ModelChanged(reload.new, self._instance.fingerprint)
                self._send_front(changed)
                self._supervisor.send(changed)
                if self._links is not None:
                    self._links.identity_changed(changed, self._callers.who_ordered(answer.number))
        self._callers.answer(answer)

    def _restart_worker(self, effect: RestartWorker) -> None:
        if self._reload is not None and not self._reload.worker_starts(effect.reason):
            self._use_model(self._reload.old)
        logger.warning("starting another worker (%s)", effect.reason)
        self._probe = IdleProbe()
        self._callers.answer_pings("the worker was lost and is being started again")

        async def wanted() -> bool:
            await self._pool.release("worker")
            await asyncio.sleep(effect.delay_seconds)
            return self._instance is not None and self._instance.worker.epoch == effect.epoch  # else it is lost already

        self._children.replace("worker", int(effect.epoch), wanted)

    # Callers

    async def _serve_front(self, front: Channel) -> None:
        caller = self._callers.add(front.send, alone=self._links is None)
        await front.listen(lambda message: self._callers.on_message(caller, message))
        await self._leave()

    def _send_front(self, message: Message) -> None:
        if self._front is not None:
            self._front.send(message)

    def open_requests(self) -> Iterable[RequestId]:
        return [] if self._instance is None else self._instance.view.request_ids()

    def ping(self, number: int) -> None:
        if self._instance is None:
            return
        fault, worker = self._health.fault(self._instance, self._loop.time()), self._worker
        if worker is not None and not fault and not (self._instance.in_flight and self._health.known):
            worker.control.send(Ping(number))  # nothing else is asked of it
        else:
            self._callers.pong(Pong(number, fault))

    # What routers are told

    def hello(self) -> NodeHello:
        assert self._ready is not None
        config, ready = self._config, self._ready
        tiers = TierConfig() if self._instance is None else self._instance.config.tiers
        about = (config.peer, config.health_url, os.getpid(), tiers.adopt_seconds_max if tiers.peers else 0.0)
        return NodeHello(config.name, self._incarnation, config.role, ready, self._layout, *about)

    def beat(self) -> Beat:
        assert self._instance is not None
        now, instance, worker = self._loop.time(), self._instance, self._worker
        fault = self._health.fault(instance, now)
        if not fault and worker is not None:
            idle = instance.worker.state is WorkerState.READY and not instance.in_flight
            fault = self._probe.look(now, idle=idle, ask=lambda: worker.control.send(Ping(PROBE)))
        return beat_of(instance, fault)

    def stats(self) -> InstanceStats:
        assert self._instance is not None
        stats = snapshot(self._instance, self._storage_counters)
        if self._links is not None:
            stats.routers, stats.router_sessions = self._links.open_sessions, {**self._links.counts}
        return stats

    async def _watch_supervisor(self) -> None:
        while await self._supervisor.receive() is not None:
            pass
        await self._leave()

    def on_terminated(self) -> None:
        """SIGTERM, to an instance of a cluster. The second time it ends at once."""
        if self._leaving.begun and not self._over.done():
            self._over.set_result(None)
        else:
            self._spawn(self._leave())

    async def _leave(self) -> None:
        """Nobody needs us any more, but perhaps routers do."""
        if self._links is not None and self._links.open_sessions and self._instance is not None:
            await self._leaving.drained(self, self._config.drain_seconds_max)
        if not self._over.done():
            self._over.set_result(None)

    def _on_due(self) -> None:
        try:
            self.tell(Tick())
        except Exception as error:
            self.on_over(error)

    def tell(self, event: Event) -> None:
        if self._driver is None or self._instance is None:
            return
        self._driver.tell(event)
        if self._links is not None and type(event) in FAULT_EVENTS:
            self._links.look_at_fault()
        if self._instance.worker.state is WorkerState.GONE:  # its requests have their error; who runs us may start us again
            self.on_over(EngineError(f"the worker was lost {self._instance.worker.losses} time(s) in a row: the server ends"))
        if self._instance.idle:
            self._check_when_due(self._instance)
        if not self._instance.in_flight:
            self._send_stats()
        elif self._stats_timer is None:
            self._health.look(self._instance, self._loop.time())
            self._stats_timer = self._loop.call_later(STATS_SECONDS, self._send_stats)

    def _check_when_due(self, instance: Instance) -> None:
        """Nobody waits for us now: prove that nothing leaked. An engine whose state is impossible must not go on."""
        if self._loop.time() >= self._check_due:
            self._check_due = self._loop.time() + CHECK_SECONDS
            try:
                instance.check()
            except InvariantBroken as broken:
                logger.error("the engine found its own state impossible: %s", broken)
                self.on_over(broken)

    def _send_stats(self) -> None:
        if self._stats_timer is not None:
            self._stats_timer.cancel()
            self._stats_timer = None
        if self._instance is None:
            return
        self._health.look(self._instance, self._loop.time())
        self._send_front(self.stats())
        if self._instance.in_flight:  # also while nothing happens: that is when somebody has to look
            self._stats_timer = self._loop.call_later(STATS_SECONDS, self._send_stats)


def pool_access(plan: StartupPlan) -> PoolAccess:
    if plan.creator != "worker":
        return "attached"
    return "announced" if plan.attachers else "private"


async def serve(config: EngineConfig, sockets: dict[str, socket.socket], engine: type[Engine] = Engine) -> None:
    supervisor = await Channel.open(sockets[CONTROL])
    front = await Channel.open(sockets["front"]) if "front" in sockets else None
    try:
        running = engine(config, front, supervisor)
        if config.routers:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.on_terminated)
        await running.run()
    except (EngineError, OSError) as error:
        supervisor.send(StartFailed(str(error) or type(error).__name__))
        await asyncio.gather(*(channel.finish() for channel in (front, supervisor) if channel is not None))
        sys.exit(1)


def main(engine: type[Engine] = Engine) -> None:
    config, sockets = begin_child(EngineConfig)
    configure(config.name or "engine", config.log_level, config.log_format)
    asyncio.run(serve(config, sockets, engine))


if __name__ == "__main__":
    main()
