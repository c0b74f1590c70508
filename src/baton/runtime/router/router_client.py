"""The cluster as the API sees it: one engine. Requests go to the router machine, which places them on instances.

    API --generate, abort--> RouterClient --SubmitRequest, WithdrawRequest--> router machine --SendToInstance--> instance
        <-------- deltas ---              <-- Deliver, RejectRequest --             <--InstanceMessage---

Instances dial. The first message of a session is an InstanceHello, the answer a RouterHello or an InstanceRefused. Orders
(pause, sleep, weights) go to all instances, beside the machine (cluster_orders.py).

A request has another id on the wire: the router's name is prepended, so that ids of two routers never collide.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from msgspec.structs import replace

from baton.api.generate.engine_client import Delta, EngineRefused
from baton.config import RouterConfig, WireConfig
from baton.core.cluster.events import (
    CloseSession,
    ClusterEffect,
    ClusterEvent,
    Deliver,
    FailRequest,
    InstanceJoined,
    InstanceLeft,
    InstanceMessage,
    RejectRequest,
    RouterTick,
    RunPass,
    SchedulePass,
    SendToInstance,
    SubmitRequest,
    WarnOfInstance,
    WithdrawRequest,
)
from baton.core.cluster.router import Router
from baton.core.delivery.take import deliver
from baton.errors import EngineError, InvariantBroken, Unavailable
from baton.protocol.codec import Message
from baton.protocol.control import InstanceStats
from baton.protocol.handoff import Adopted, Offer, request_of
from baton.protocol.ids import RequestId
from baton.protocol.instance import ClusterView, PathView
from baton.protocol.request import FinishReason, GenerateRequest, Refused
from baton.repeats import printable
from baton.runtime.driver import Driver
from baton.runtime.front.stream import Stream
from baton.runtime.router.cluster_orders import ClusterOrders
from baton.runtime.router.instance_session import InstanceSession
from baton.runtime.router.instance_set import InstanceSet
from baton.runtime.wire.channel import Channel
from baton.trust.credentials import Credentials

logger = logging.getLogger("baton.router")

CHECK_SECONDS: Final = 10.0
"""Least seconds between two checks of an idle router's state."""
HANDOFFS_SHOWN: Final = 100
"""Number of recent hand-offs in the displayed mean."""
PATHS_SHOWN: Final = 100


class RouterClient:
    """Implements api.engine_client.EngineClient."""

    def __init__(
        self,
        machine: Router,
        config: RouterConfig,
        *,
        name: str | None = None,
        wire: WireConfig | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """`credentials`: which instances are revoked. None: none is."""
        self.name = name or secrets.token_hex(8)
        self._prefix = f"{self.name}."
        ports: dict[type[Any], Callable[[Any], None]] = {
            SendToInstance: self._send_to_instance,
            Deliver: lambda effect: deliver(effect.emit, self._streams),
            RejectRequest: self._reject,
            FailRequest: self._fail_request,
            CloseSession: lambda effect: self.instances.lose(effect.session, effect.reason, effect.retry_seconds),
            SchedulePass: self._schedule_pass,
            WarnOfInstance: lambda effect: self.instances.warn(effect.session, effect.text),
        }
        self._machine = machine
        self._driver: Driver[ClusterEvent, ClusterEffect] = Driver(machine, ports, lambda: self.dispatch(RouterTick()))
        self._events: deque[ClusterEvent] = deque()
        self._dispatching = False
        self._check_due = 0.0
        self._streams: dict[RequestId, Stream] = {}
        "Streams by their id on the wire."
        self._loop = asyncio.get_running_loop()
        self.instances = InstanceSet(self.name, config, self, wire, credentials)
        self.orders = orders = ClusterOrders(self, self.instances)
        self.pause, self.resume, self.clear_cache = orders.pause, orders.resume, orders.clear_cache
        self.sleep, self.wake, self.load_weights = orders.sleep, orders.wake, orders.load_weights
        self._handoffs: deque[float] = deque(maxlen=HANDOFFS_SHOWN)
        "Durations of the last hand-offs, in seconds."
        self.on_handoff: Callable[[float], None] = lambda seconds: None
        self.over: asyncio.Future[None] = self._loop.create_future()
        "Completes only by an internal error, or `close`."
        self._ended: Exception | None = None
        "Error for new requests after the end. None: requests are accepted."

    # Instances

    @property
    def sessions(self) -> list[InstanceSession]:
        return self.instances.sessions

    async def serve_instance(self, channel: Channel) -> None:
        """Serve one session, from its hello to its end."""
        await self.instances.serve(channel)

    def on_message(self, message: Message) -> None:
        """Measure how long hand-offs take, before the machine gets the message."""
        if type(message) is Adopted:
            stream = self._streams.get(message.request)
            if stream is not None and stream.offered_at is not None:
                seconds, stream.offered_at = self._loop.time() - stream.offered_at, None
                self._handoffs.append(seconds)
                self.on_handoff(seconds)
        elif type(message) is Offer and message.last and (stream := self._streams.get(message.request)) is not None:
            stream.offered_at = self._loop.time()

    # Effects of the machine

    def _send_to_instance(self, effect: SendToInstance) -> None:
        message = effect.message
        try:
            self.instances.send(effect.session, message)
        except EngineError as error:  # with its outputs the request is too large for a frame
            request = request_of(message)
            if request is not None and (stream := self._streams.get(request.id)) is not None:
                stream.fail(error)
                self.dispatch(WithdrawRequest(request.id))

    def _schedule_pass(self, effect: SchedulePass) -> None:
        """Run one pass after everything that is ready in this turn of the loop, whatever the number of heartbeats and
        requests."""
        self._loop.call_soon(self.dispatch, RunPass())

    def _reject(self, effect: RejectRequest) -> None:
        if (stream := self._streams.get(effect.request)) is not None:
            stream.fail(EngineRefused(effect.refused, effect.retry_seconds))

    def _fail_request(self, effect: FailRequest) -> None:
        if (stream := self._streams.get(effect.request)) is not None:
            stream.fail(Unavailable(effect.detail))

    def dispatch(self, event: ClusterEvent) -> None:
        """Handle events one after the other: a sink may withdraw its request from within a delivery. A machine with an
        impossible state must end."""
        self._events.append(event)
        if self._dispatching or self.over.done():
            return
        self._dispatching = True
        try:
            while self._events:
                self._handle(self._events.popleft())
            if self._machine.idle and self._loop.time() >= self._check_due:
                self._check_due = self._loop.time() + CHECK_SECONDS
                self._machine.check_part()  # no client waits now
        except Exception as error:
            self.fail(error)
        finally:
            self._dispatching = False

    def _handle(self, event: ClusterEvent) -> None:
        """Handle one event. A message that the machine cannot handle ends its session and nothing else, if the machine's state
        is sound."""
        try:
            effects = self._driver.decide(event)
        except InvariantBroken:
            raise
        except Exception as error:
            if not isinstance(event, InstanceMessage | InstanceJoined):
                raise
            self._machine.check_part()
            self.instances.end_malformed(event.session, error)
            self._events.appendleft(InstanceLeft(event.session, "malformed"))
        else:
            self._driver.carry_out(effects)

    def fail(self, error: Exception) -> None:
        if not self.over.done():
            self.over.set_exception(error)
        self.end_requests(Unavailable("the router failed"))

    def close(self) -> None:
        """End all sessions; instances abort our requests."""
        self._driver.close()
        self.instances.close()
        if not self.over.done():
            self.over.set_result(None)
        self.over.exception()

    def end_requests(self, why: Exception) -> None:
        """End every open request with this error. Later requests get it too."""
        self._ended = why
        for stream in self._streams.values():
            stream.fail(why)

    # Called by the API

    async def generate(self, request: GenerateRequest, take: Callable[[Delta], None]) -> None:
        """Submit the request to the router machine and deliver its answer to `take` until it ends. Leaving early withdraws the
        request."""
        if self._ended is not None:
            raise self._ended
        if (refused := self.orders.refusal) is not None:
            raise EngineRefused(refused)
        name = RequestId(self._prefix + request.id)
        if name in self._streams:
            raise EngineRefused(Refused("duplicate_id"))

        def take_named(delta: Delta) -> None:
            if delta.ended is not None:
                delta.ended = replace(delta.ended, request=request.id)
            take(delta)

        renamed = replace(request, id=name)
        stream = self._streams[name] = Stream(renamed, take_named)
        try:
            self.dispatch(SubmitRequest(renamed))
            await stream.done
        finally:
            del self._streams[name]
            if stream.open:  # an ended request needs no withdrawal
                self.dispatch(WithdrawRequest(name))
            self.orders.on_stream_ended()

    def abort(self, request: RequestId, index: int | None = None, reason: FinishReason = FinishReason.ABORT) -> None:
        name = RequestId(self._prefix + request)
        if name in self._streams:
            self.dispatch(WithdrawRequest(name, index, reason))

    def withdraw_all(self) -> None:
        for name in list(self._streams):
            self.dispatch(WithdrawRequest(name))

    @property
    def streams_open(self) -> int:
        return len(self._streams)

    async def ping(self, timeout_seconds: float) -> None:
        """Report whether the cluster works, by the heartbeats, which report faults several times per second: no instance is
        pinged."""
        if self.over.done():
            raise Unavailable("the router failed")
        faults = [f"{instance.hello.name}: {instance.fault}" for instance in self.sessions if instance.fault]
        if len(faults) == len(self.sessions):
            raise Unavailable("; ".join(faults) or NO_INSTANCE)

    def stats(self) -> InstanceStats:
        total = self.instances.stats()
        total.mode = self.orders.mode
        return total

    # Views

    def view(self) -> ClusterView:
        """Build the view of the cluster for /v1/cluster: instances with their load, counters, failed paths and refusals."""
        stats, took = self._machine.stats, self._handoffs
        counters = {
            "requests": stats.arrived,
            "whole": stats.whole,
            "handoffs": stats.handoffs,
            "replays": stats.retries,
            "moved": stats.moved,
            "left": stats.left,
            "paths_given_up": stats.paths_given_up,
            "digest_bytes": stats.digest_bytes,
            "digest_keys_cut": self._machine.membership.index.cut,
            "broken": stats.broken,
            "broken_off": sum(stats.broken_off.values()),
            "instances_joined": self.instances.joined,
            "instances_lost": stats.instances_lost,
            "instances_refused": stats.instances_refused,
            "sessions_malformed": self.instances.malformed,
            **{f"refused_{reason}": count for reason, count in stats.turned_away.items()},
            **{f"handoff_{outcome}": count for outcome, count in stats.handoff_ends.items()},
            **{f"lost_{how}": count for how, count in stats.losses.items()},
        }
        return ClusterView(
            router=self.name,
            mode=self.orders.mode,
            queued=self._machine.queued,
            open=len(self._streams),
            instances=tuple(instance.view() for instance in self.sessions),
            counters=counters,
            handoff_seconds=sum(took) / len(took) if took else 0.0,
            failed_paths=self._failed_paths(),
            prefix_keys=len(self._machine.membership.index),
            refused=self.instances.refusals.view(self._loop.time()),
        )

    def _failed_paths(self) -> tuple[PathView, ...]:
        instances = self._machine.membership.instances
        failed = (
            PathView(printable(reader.name), printable(instances[source].name), path.failures, printable(path.fault))
            for reader in instances.values()
            for source, path in reader.paths.failed().items()
            if source in instances
        )
        return tuple(islice(failed, PATHS_SHOWN))


NO_INSTANCE: Final = "no instance is connected: try again later"
