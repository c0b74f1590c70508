"""Reports of an engine: to its front and its supervisor, and to every router that it has a session with.

front        InstanceReady once, stats while it works and when it becomes idle, ModelChanged
supervisor   InstanceReady, ModelChanged: the next engine begins with these weights
routers      InstanceHello, Heartbeat, stats (router_links.py asks for them)
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from baton.config import EngineConfig, TierConfig
from baton.core.events import Event, Pause, Resume, WorkerLost, WorkerReady
from baton.core.instance import Instance
from baton.protocol.codec import Message
from baton.protocol.control import InstanceReady, InstanceStats, ModelChanged, WorkerHello
from baton.protocol.instance import InstanceHello
from baton.protocol.versions import CAPABILITIES
from baton.repeats import Repeats, printable
from baton.runtime.engine.callers import Caller
from baton.runtime.engine.instance_loop import InstanceLoop
from baton.runtime.engine.router_links import RouterLinks
from baton.runtime.engine.snapshot import snapshot
from baton.runtime.processes.build_info import own_build
from baton.runtime.processes.loop_lag import LoopLag
from baton.runtime.wire.channel import Channel

logger = logging.getLogger("baton.engine")

LOG_SECONDS: Final = 10.0
NAMES_MAX: Final = 3
STATS_SECONDS: Final = 0.2
"""Maximum age of the front's stats while there is work; when there is none they are sent at once."""

FAULT_EVENTS: Final = (WorkerReady, WorkerLost, Pause, Resume)
"""Events after which a fault may begin or end. A fault that shows only with time is sent with the next heartbeat."""


class Reporting:
    def __init__(self, front: Channel | None, supervisor: Channel, machine: InstanceLoop) -> None:
        self._front = front
        self._supervisor = supervisor
        self._machine = machine
        self._loop = asyncio.get_running_loop()
        self._preemptions = PreemptionLog()
        self._lag = LoopLag()
        self._timer: asyncio.TimerHandle | None = None
        self._incarnation = secrets.randbits(63)
        self._layout = b""
        self.ready: InstanceReady | None = None
        "The readiness message as sent, with the identity of the present weights."
        self.links: RouterLinks | None = None
        "Sessions with routers. None: no router is configured."
        self.storage_counters: Callable[[], dict[str, int]] = dict
        self.add_counters: Callable[[InstanceStats], None] = lambda stats: None
        "Function that adds the counters of the cache service."
        self.observe: Callable[[], None] = lambda: None
        "Called several times per second while plans are in flight, to check the worker's progress."
        machine.after = self._after_event

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def send_front(self, message: Message) -> None:
        if self._front is not None:
            self._front.send(message)

    # The model

    def begin(self, ready: InstanceReady, layout: bytes) -> None:
        self.ready, self._layout = ready, layout
        self.send_front(ready)
        self._supervisor.send(ready)

    def on_next_worker(self, hello: WorkerHello) -> None:
        if self.ready is not None:
            plan = self.ready.plan | {"kv_identity": hello.identity.hex()[:16]}
            self.ready = replace(self.ready, identity=hello.identity, identity_parts=hello.identity_parts, plan=plan)
            self._layout = hello.layout

    def weights_changed(self, changed: ModelChanged, ordered_by: Caller | None) -> None:
        """Report other weights, which were loaded by order."""
        self.send_front(changed)
        self._supervisor.send(changed)
        if self.links is not None:
            self.links.identity_changed(changed, ordered_by)

    def files_changed(self, changed: ModelChanged) -> None:
        """Report that the model's files changed without an order. Another engine reads the same files: the supervisor need not
        know."""
        self.send_front(changed)
        if self.links is not None:
            self.links.identity_changed(changed)

    # Routers

    def hello(self, config: EngineConfig) -> InstanceHello:
        """Build the hello for a router: name, role, weights, addresses and capabilities of the instance."""
        assert self.ready is not None
        instance = self._machine.instance
        tiers = TierConfig() if instance is None else instance.config.tiers
        adopt_seconds = tiers.adopt_seconds_max if tiers.peers else 0.0
        return InstanceHello(
            config.name,
            self._incarnation,
            config.role,
            self.ready,
            self._layout,
            peers=tuple(config.peer.split("\n")) if config.peer else (),
            health_url=config.health_url,
            pid=os.getpid(),
            adopt_seconds_max=adopt_seconds,
            model=config.worker.model,
            capabilities=CAPABILITIES,
            build=own_build(),
            step_tokens=0 if instance is None else instance.config.scheduler.tokens_per_step,
        )

    # Stats

    def stats(self) -> InstanceStats:
        assert self._machine.instance is not None
        block_bytes = 0 if self.ready is None else int(self.ready.plan.get("kv_block_bytes", 0))
        stats = snapshot(self._machine.instance, self.storage_counters(), block_bytes)
        self.add_counters(stats)
        stats.loop_lag_microseconds = self._lag.microseconds
        if self.links is not None:
            stats.routers, stats.router_sessions = self.links.open_sessions, {**self.links.counts}
            stats.router_refusal = self.links.refusal
        return stats

    def _after_event(self, event: Event) -> None:
        instance = self._machine.instance
        if instance is not None and instance.stats.preemptions != self._preemptions.seen:
            self._preemptions.record(instance, self._loop.time())
        if self.links is not None and type(event) in FAULT_EVENTS:
            self.links.report_fault_change()
        if instance is not None and not instance.in_flight:
            self.send_stats()
        elif self._timer is None:
            self.observe()
            self._timer = self._loop.call_later(STATS_SECONDS, self.send_stats)

    def send_stats(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        instance = self._machine.instance
        if instance is None:
            return
        self.observe()
        self.send_front(self.stats())
        if instance.in_flight:  # also without events: the worker's progress must be checked then
            self._timer = self._loop.call_later(STATS_SECONDS, self.send_stats)


class PreemptionLog:
    """Logs preemptions: such requests are slower than others, and more memory would help.

    Called after every event whose count of preemptions differs from `seen`.
    """

    __slots__ = ("_logged", "_repeats", "seen")

    def __init__(self) -> None:
        self.seen = 0
        "Preemptions of the instance at the last call of `record`."
        self._logged = 0
        "Preemptions at the last log line."
        self._repeats = Repeats(LOG_SECONDS)

    def record(self, instance: Instance, now: float) -> None:
        """Log preemptions since the last line, with the state of the pool, at most every LOG_SECONDS."""
        count = instance.stats.preemptions
        if count == self.seen:
            return
        self.seen = count
        if not self._repeats.due("preempted", now):
            return
        new, self._logged = count - self._logged, count
        board, pool = instance.board, instance.board.cache.pool
        names = ", ".join(printable(name) for name in instance.view.preempted_requests(NAMES_MAX))
        logger.warning(
            "%d sequences preempted (%d in all), for want of KV blocks: %d of %d free or idle, %d sequences run, %d wait; "
            "requests: %s",
            new,
            count,
            pool.free + pool.idle,
            pool.total,
            len(board.running),
            len(board.waiting),
            names or "running again",
        )
