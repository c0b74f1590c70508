"""`baton up`: a cluster on one machine. One process starts a router and the instances that dial it, and keeps them running.

    up
     |-- prefill-0, decode-0, ...   engines without a front; restarted, with backoff, however they end
     `-- router                     HTTP and the router machine; restarted, with backoff, unless it ended without an error

`baton router` is the same without engines; its start is over once the router listens, which may be hours before an instance
joins. The last row ends first: the router drains while its instances still work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from baton.config import EngineConfig, WorkerConfig
from baton.config.router_process import RouterProcessConfig
from baton.core.child_silence import SILENT_SECONDS_MAX
from baton.errors import InvalidConfig
from baton.protocol.codec import Message
from baton.protocol.control import InstanceReady, LoadProgress, ModelChanged
from baton.protocol.instance import ClusterView, RouterListening
from baton.runtime.processes.child import Child, Loss
from baton.runtime.processes.process_group import ProcessGroup
from baton.runtime.processes.process_table import KILL_SECONDS, ChildRow, Restart

ROUTER = "router"


@dataclass(frozen=True, kw_only=True, slots=True)
class UpConfig:
    router: RouterProcessConfig
    engines: Mapping[str, EngineConfig]
    "Settings of each engine, by name."

    def __post_init__(self) -> None:
        limit = self.router.router.handing_seconds_max
        for name, engine in self.engines.items():
            needed = engine.instance.tiers.adopt_seconds_max if engine.role != "mixed" else 0.0
            if needed >= limit:
                raise InvalidConfig(
                    f"{name} may take {needed:g} s to go on with a prompt (pull_seconds_max + release_seconds_max), and the "
                    f"router gives up after {limit:g} s (handing_seconds_max)"
                )


def start_after(name: str, engines: Mapping[str, EngineConfig]) -> list[str]:
    """Instances that must be ready before that one is started: each measures the free memory of the GPU, which it cannot while
    another one loads weights."""
    if name not in engines or not _measures(engines[name].worker):
        return []
    index = engines[name].worker.device_index
    earlier = list(engines)[: list(engines).index(name)]
    return [other for other in earlier if engines[other].worker.device_index == index and _measures(engines[other].worker)]


def _measures(worker: WorkerConfig) -> bool:
    return worker.device_sharers > 1 and worker.blocks is None and worker.kv_memory_gib is None


def up_children(names: Iterable[str]) -> tuple[ChildRow[UpConfig], ...]:
    """The rows of `baton up`: an engine for each name, and the router."""

    def engine_config(name: str, up: UpConfig, life: int) -> object:
        return up.engines[name]

    engines: list[ChildRow[UpConfig]] = [
        ChildRow(
            name=name,
            module="baton.runtime.engine",
            config=partial(engine_config, name),
            restart=Restart.ALWAYS,
            silent_seconds_max=SILENT_SECONDS_MAX,
            end_seconds=lambda up: KILL_SECONDS,
        )
        for name in names
    ]
    router: ChildRow[UpConfig] = ChildRow(
        name=ROUTER,
        module="baton.runtime.router",
        config=lambda up, life: up.router,
        restart=Restart.IF_FAILED,
        silent_seconds_max=SILENT_SECONDS_MAX,
        terminated=True,
        end_seconds=lambda up: up.router.serve.drain_seconds_max + KILL_SECONDS,
        hurry_seconds=6.0,  # it ends its requests with an error
    )
    return (*engines, router)


class UpReporter:
    """Callbacks to the program that runs a cluster. This class prints nothing."""

    def on_progress(self, name: str, progress: LoadProgress) -> None:
        pass

    def on_instance_ready(self, name: str) -> None:
        pass

    def on_lost(self, name: str, why: str) -> None:
        """Called when an instance was lost; another one is started."""

    def on_ready(self, ready: InstanceReady) -> None:
        """Called once, when every instance has joined and requests are accepted."""

    def on_view(self, view: ClusterView) -> None:
        """Called with the view of the cluster, several times per second."""

    def on_stopping(self) -> None:
        pass


class UpGroup(ProcessGroup[UpConfig]):
    def __init__(self, config: UpConfig, reporter: UpReporter, rows: tuple[ChildRow[UpConfig], ...] | None = None) -> None:
        """`rows`: tests replace some with faulty programs."""
        self._config = config
        self._reporter = reporter
        self._ready: InstanceReady | None = None
        self._announced = False
        "The reporter knows that all are ready."
        self._instance_ready = {name: asyncio.Event() for name in config.engines}
        self._models: dict[str, str] = {}
        "Path of the weights of each running engine."
        serve = config.router.serve
        scheduler = serve.engine().instance.scheduler
        super().__init__(
            up_children(config.engines) if rows is None else rows,
            lambda: self._config,
            start_seconds_max=serve.start_seconds_max if config.engines else None,  # a router alone waits for remote instances
            restarts_max=scheduler.worker_restarts_max,
            backoff_seconds_max=scheduler.restart_backoff_seconds_max,
        )

    def on_started(self, child: Child) -> None:
        super().on_started(child)
        if (engine := self._config.engines.get(child.name)) is not None:
            self._models[child.name] = engine.worker.model

    async def before_start(self, name: str) -> None:
        for other in start_after(name, self._config.engines):
            await self._instance_ready[other].wait()

    def on_message(self, child: Child, message: Message) -> None:
        """Handle a message of a child: progress and views for the reporter, readiness, and new weights for later restarts."""
        match message:
            case LoadProgress():
                self._reporter.on_progress(child.name, message)
            # all instances load the same weights, one after the other; restarted ones begin with these
            case ModelChanged(model):
                self._models[child.name] = model
                engines = {
                    name: replace(engine, worker=replace(engine.worker, model=model))
                    for name, engine in self._config.engines.items()
                }
                self._config = replace(self._config, engines=engines)
            case RouterListening():
                child.mark_ready()
                if not self._config.engines:
                    self.start_is_over()
            case InstanceReady() if child.name == ROUTER:
                self._ready = message
            case InstanceReady():
                child.mark_ready()
                self._on_instance_ready(child.name, message)
            case ClusterView():
                self._on_view(message)

    def _on_instance_ready(self, name: str, ready: InstanceReady) -> None:
        self._instance_ready[name].set()
        engine = self._config.engines[name]
        if _measures(engine.worker):  # its next life finds the GPU full, so it gets as many blocks as this one
            engine = replace(engine, worker=replace(engine.worker, blocks=ready.blocks))
            self._config = replace(self._config, engines={**self._config.engines, name: engine})
        self._reporter.on_instance_ready(name)

    def _on_view(self, view: ClusterView) -> None:
        there = {instance.name for instance in view.instances}
        self._reporter.on_view(view)
        for refused in view.refused:
            self._restart_if_outdated(refused.name)
        if self._ready is not None and not self._announced and all(name in there for name in self._config.engines):
            self._announced = True
            self.start_is_over()
            self._reporter.on_ready(self._ready)

    def _restart_if_outdated(self, name: str) -> None:
        """Start a refused instance again if it has other weights than the next one would: it was lost, and started with the
        former weights, while the others loaded new ones."""
        engine, child = self._config.engines.get(name), self._children.get(name)
        if engine is not None and child is not None and self._models.get(name, engine.worker.model) != engine.worker.model:
            self._models[name] = engine.worker.model
            child.set_last_words(f"{name} was started with other weights than the cluster serves by now")
            child.kill()

    def on_lost(self, child: Child, loss: Loss) -> None:
        self._reporter.on_lost(child.name, loss.text)

    def on_stopping(self) -> None:
        self._reporter.on_stopping()
