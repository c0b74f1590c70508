"""The engine process: an instance between its callers (the front, routers) and its worker.

    callers --requests, aborts, pings--> ENGINE --plans--> worker
            <--tokens, ends, stats-----         <-results-

It starts its children by its row of core/startup.py. The machine decides; these files act:

    instance_loop.py       the machine on this loop, and checks after each event
    worker_supervisor.py   the worker in all of its lives: plans, health, restarts, sleep, other weights
    cache_supervisor.py    the cache service in all of its lives
    child_messages.py      dispatches messages of children
    pool_registry.py       the KV pool: its creator, and the processes that have it mapped
    callers.py             requests and orders of front and routers
    router_links.py        a session to each router
    router_sources.py      addresses of routers, from names and files
    reporting.py           reports to front, supervisor and routers
    graceful_shutdown.py   the end, where routers still need us

This file puts them together, and maps effects of the machine to them.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any

from baton.config import EngineConfig, InstanceConfig, PoolAccess, SchedulerConfig, TierConfig, TiersConfig, without_password
from baton.config.device_defaults import BY_DEVICE, OPTIONS, as_options
from baton.core.effects import ModeChanged, Refuse, RestartCache, RestartWorker, RunStep, SendToCache, StopWorker
from baton.core.events import Event, WorkerReady
from baton.core.instance import Instance
from baton.core.kv.digest import DigestFeed
from baton.core.startup import StartupPlan, plan_startup
from baton.errors import ChildKilled, EngineError
from baton.observe.logs import configure
from baton.protocol.control import InstanceReady, InstanceStats, ModeReport, OrderAnswer, StartFailed, WorkerHello
from baton.protocol.handoff import Adopted, Offer, Release, Released, Reserved
from baton.protocol.ids import RequestId
from baton.protocol.instance import Heartbeat, InstanceHello
from baton.protocol.output import Emit
from baton.runtime.credentials import credentials_of
from baton.runtime.engine.cache_supervisor import CacheSupervisor
from baton.runtime.engine.callers import Callers
from baton.runtime.engine.child_messages import ChildMessages
from baton.runtime.engine.graceful_shutdown import Leaving
from baton.runtime.engine.instance_loop import InstanceLoop
from baton.runtime.engine.pool_registry import PoolRegistry
from baton.runtime.engine.reporting import Reporting
from baton.runtime.engine.router_links import RouterLinks
from baton.runtime.engine.snapshot import beat_of
from baton.runtime.engine.startup import Startup
from baton.runtime.engine.worker_supervisor import WorkerSupervisor
from baton.runtime.processes.child import Child
from baton.runtime.processes.child_set import ChildSet
from baton.runtime.processes.children import begin_child, freeze_gc_heap
from baton.runtime.processes.private_folder import PrivateFolder
from baton.runtime.processes.process_table import CONTROL, ENGINE_CHILDREN, KILLED_BELOW
from baton.runtime.processes.silence_watch import answer_parent
from baton.runtime.wire.channel import Channel

logger = logging.getLogger("baton.engine")


def _resolved_tiers(given: TiersConfig, resolved: TierConfig, block_bytes: int) -> dict[str, int | float | str]:
    """Resolved settings of lower tiers, if there are any."""
    if not given or not resolved.host_blocks:
        return {}
    return {
        "kv_host_blocks": resolved.host_blocks,
        "kv_host_gib": round(resolved.host_blocks * block_bytes / 2**30, 3),
        "kv_storage": without_password(given.kv_storage),
        "kv_write": resolved.write,
        "preempted_kv": resolved.preempted,
    }


def _resolved_steps(scheduler: SchedulerConfig, chosen: tuple[str, ...]) -> dict[str, int | float | str]:
    """Step sizes by option name, and the options that were chosen by the device."""
    options = dict(zip(BY_DEVICE, OPTIONS, strict=True))
    values = as_options({name: getattr(scheduler, name) for name in BY_DEVICE})
    return {**values, "chosen_for_device": ", ".join(options[name] for name in chosen)}


class Engine:
    rows = ENGINE_CHILDREN
    "The engine. Tests replace some rows with faulty programs."

    def __init__(self, config: EngineConfig, front: Channel | None, supervisor: Channel) -> None:
        if not config.instance.kv.prefix_caching:
            config = replace(config, tiers=TiersConfig())
        plan = self._plan = plan_startup(
            blocks_given=config.worker.blocks is not None, role=config.role, tiers=bool(config.tiers)
        )
        self._given = replace(config, worker=replace(config.worker, pool=pool_access(plan)))
        self._front = front
        self._supervisor = supervisor
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._over: asyncio.Future[None] = self._loop.create_future()
        scheduler = config.instance.scheduler
        self._machine = machine = InstanceLoop(self.on_over)
        messages = ChildMessages(machine, supervisor, self.on_over)
        self._children: ChildSet[EngineConfig] = ChildSet(
            self.rows,
            lambda: self.config,
            messages,
            restarts_max=scheduler.worker_restarts_max,
            backoff_seconds_max=scheduler.restart_backoff_seconds_max,
        )
        self._callers = Callers(self)
        self._pool = messages.pool = PoolRegistry(plan, self._children)
        seconds = scheduler.worker_start_seconds_max
        self._startup = messages.startup = Startup(plan, self._children, config.worker.blocks, seconds, config.worker.ranks)
        self._reporting = Reporting(front, supervisor, machine)
        self._cache = messages.cache = CacheSupervisor(plan, self._children, machine, self._startup, config.worker.ranks)
        self._worker_supervisor = messages.worker = WorkerSupervisor(
            config.worker.model, self._children, self._pool, machine, self._callers, self._reporting, self._spawn
        )
        self._folder: PrivateFolder | None = None
        "Directory in which the ranks of a worker set find each other."
        self._leaving = Leaving()
        self._callers.leaving = lambda: self._leaving.begun
        self._links: RouterLinks | None = None
        if config.routers:
            self._links = RouterLinks(config.routers, credentials_of(config), self, self._callers, config.wire)
            self._links.on_alone = self._leaving.on_alone
            self._links.on_sessions = self._reporting.send_stats
        self._reporting.links = self._links
        self._reporting.storage_counters = lambda: self._cache.counters
        self._reporting.add_counters = self._add_counters
        self._reporting.observe = self._worker_supervisor.observe

    def _add_counters(self, stats: InstanceStats) -> None:
        self._cache.add_counters(stats)
        stats.step_tokens = self._worker_supervisor.step_tokens.table()

    async def run(self) -> None:
        """Run until the front or the supervisor closes its channel."""
        try:
            self._cache.make_folder()
            if self._given.worker.ranks > 1:
                self._folder = PrivateFolder()
                self._given = replace(self._given, worker=replace(self._given.worker, rendezvous=str(self._folder.path)))
            self._spawn(self._start())
            if self._front is not None:
                self._spawn(self._serve_front(self._front))
            self._spawn(self._watch_supervisor())
            await self._over
        finally:
            self._machine.close()
            self._reporting.close()
            for task in self._tasks:
                task.cancel()
            await self._children.end()
            self._pool.close_all()
            self._worker_supervisor.close()
            self._cache.close()
            if self._folder is not None:
                self._folder.remove()

    @property
    def config(self) -> EngineConfig:
        """Settings for children that are started now: as given, with the present peer address and model."""
        return replace(
            self._given, peer=self._cache.peer, worker=replace(self._given.worker, model=self._worker_supervisor.model)
        )

    @property
    def peer_address(self) -> str:
        """Address at which other instances read our pool. Empty: our pool is not readable."""
        return self._cache.peer

    @property
    def _instance(self) -> Instance | None:
        return self._machine.instance

    @property
    def _worker(self) -> Child | None:
        return self._worker_supervisor.child

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task whose failure ends the engine: no error of ours is lost."""
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

    # The start

    async def _start(self) -> None:
        self._cache.refuse_more_than_memory(self._given.tiers)
        self._cache.open_ports(self._given)
        self._begin(await self._startup.run())

    def _begin(self, hello: WorkerHello) -> None:
        """Create the instance: every process is started, and the size of the pool is known."""
        config = self._with_steps(hello)
        kv = replace(config.kv, blocks=hello.blocks, block_size=hello.block_size, digest=self._links is not None)
        tiers = config.tiers
        if self._cache.needed:
            tiers = replace(self._given.tiers.machine(hello.block_bytes), peers=self._cache.reads_others)
        # Successors of this worker have as many blocks and the same step sizes, or fail.
        slots, tokens = config.scheduler.slots, config.scheduler.tokens_per_step
        worker = replace(self._given.worker, blocks=hello.blocks, slots=slots, tokens_per_step=tokens, by_device=())
        chosen = self._given.worker.by_device
        self._given = replace(self._given, worker=worker)
        self._children.start_is_over()
        self._machine.begin(Instance(replace(config, kv=kv, tiers=tiers)), self._ports())
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
            self._resolved(hello.identity)
            | _resolved_steps(config.scheduler, chosen)
            | _resolved_tiers(self._given.tiers, tiers, hello.block_bytes)
            | hello.plan,
            hello.identity_parts,
            hello.pooling,
            hello.scoring,
            hello.generates,
            hello.labels,
        )
        self._reporting.begin(ready, hello.layout)
        if hello.digest_seconds:
            logger.info("digest of the weights: %.1f s beside loading", hello.digest_seconds)
        self.dispatch(WorkerReady(hello.epoch, hello.pool, hello.identity, hello.steps_ahead))
        self._cache.on_begun()
        self._worker_supervisor.watch_idle()
        if self._links is not None:
            self._spawn(self._links.run())

    def _with_steps(self, hello: WorkerHello) -> InstanceConfig:
        """The config with the step sizes that the worker chose, where none were given."""
        config = self._given.instance
        steps: dict[str, Any] = {name: size for name, size in hello.steps.items() if name in self._given.worker.by_device}
        return replace(config, scheduler=replace(config.scheduler, **steps))

    def _resolved(self, identity: bytes) -> dict[str, int | float | str]:
        """The row of core/startup.py that was performed, as text for users."""
        return {
            "role": self._given.role,
            "kv_identity": identity.hex()[:16],
            "processes": ", ".join(self._plan.processes),
            "pool_created_by": self._plan.creator,
            "pool_attached_by": ", ".join(self._plan.attachers) or "nobody",
            "pool_read_at": self._cache.peer or "nowhere",  # a port of transfer_address auto is opened with the first session
        }

    # The machine

    def dispatch(self, event: Event) -> None:
        self._machine.dispatch(event)

    def _ports(self) -> dict[type[Any], Callable[[Any], None]]:
        """The function that performs each effect."""
        return {
            RunStep: self._worker_supervisor.run_step,
            Emit: self._callers.emit,
            Refuse: self._callers.refuse,
            **dict.fromkeys((Reserved, Offer, Release, Released, Adopted), self._callers.forward),
            ModeChanged: self._on_mode,
            OrderAnswer: self._worker_supervisor.answer_order,
            RestartWorker: self._worker_supervisor.restart,
            StopWorker: self._worker_supervisor.stop,
            SendToCache: self._cache.send,
            RestartCache: self._cache.restart,
        }

    def _on_mode(self, effect: ModeChanged) -> None:
        self._callers.send_all(ModeReport(effect.mode.value))
        self._leaving.on_mode(effect.mode)

    # Requests of callers (callers.py)

    async def _serve_front(self, front: Channel) -> None:
        caller = self._callers.add(front.send, alone=self._links is None)
        await front.listen(lambda message: self._callers.on_message(caller, message))
        await self._drain_and_end()

    def open_requests(self) -> Iterable[RequestId]:
        return [] if self._instance is None else self._instance.view.request_ids()

    def ping(self, number: int) -> None:
        self._worker_supervisor.ping(number)

    def wake(self, number: int, model: str) -> None:
        self._worker_supervisor.wake(number, model)

    # Facts for routers (router_links.py)

    def reached(self, host: str) -> bool:
        """Record that a session with a router leaves from this address of ours. True: our next hello differs."""
        return self._cache.reached(host, on_gpu=self._pool.pool is not None and self._pool.pool.memory is not None)

    def hello(self) -> InstanceHello:
        return self._reporting.hello(self.config)

    def beat(self) -> Heartbeat:
        assert self._instance is not None
        return beat_of(self._instance, self._worker_supervisor.fault())

    def stats(self) -> InstanceStats:
        return self._reporting.stats()

    def digest(self) -> DigestFeed | None:
        digest = None if self._instance is None else self._instance.board.digest
        return None if digest is None else DigestFeed(digest)

    # The end

    async def _watch_supervisor(self) -> None:
        await answer_parent(self._supervisor)
        await self._drain_and_end()

    def on_terminated(self) -> None:
        """Handle SIGTERM to an instance of a cluster. A second one ends it at once."""
        if self._leaving.begun and not self._over.done():
            self._over.set_result(None)
        else:
            self._spawn(self._drain_and_end())

    async def _drain_and_end(self) -> None:
        """End, after a drain if routers have sessions."""
        if self._links is not None and self._links.open_sessions and self._instance is not None:
            await self._leaving.drained(self, self._given.drain_seconds_max)
        if not self._over.done():
            self._over.set_result(None)


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
        sys.exit(KILLED_BELOW if isinstance(error, ChildKilled) else 1)


def main(engine: type[Engine] = Engine) -> None:
    config, sockets = begin_child(EngineConfig)
    configure(config.name or "engine", config.log_level, config.log_format)
    asyncio.run(serve(config, sockets, engine))
