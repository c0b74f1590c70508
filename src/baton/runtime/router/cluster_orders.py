"""Orders to a whole cluster: each is sent to all instances, and is done when all have done it.

The router itself drains first. It rejects new requests, waits for open ones (hand-offs included, for which both instances must
run), and only then pauses the instances. An instance that joins while the cluster is paused is paused too.

Weights: all instances sleep, all wake with the new ones, and the cluster's identity is the new one when all have them. If one
of them cannot load them, the others get their old ones again, and the order is refused. An instance that can load neither, or
is lost on the way, has other weights than the rest when it comes back: then it is refused as unfit until it is started with the
right ones.

A pause for other weights is held by the router's session: if the router ends in the middle, each instance serves again by
itself, with the weights that it has. Any other pause lasts until an order to resume. An instance whose session was lost before
that order gets it when it joins again.

An instance that does not answer an order in time (orders.py) is given up: its session ends, the order continues with the
others, and it is checked anew when it dials again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final, Protocol

from baton.errors import CallerError, EngineError, Unavailable
from baton.protocol.request import Refused
from baton.repeats import printable
from baton.runtime.front.orders import OrderLate
from baton.runtime.router.instance_session import InstanceSession
from baton.runtime.router.instance_set import InstanceSet

logger = logging.getLogger("baton.router")

UNRESUMED_MAX: Final = 4096
"""Maximum of names of paused instances that are remembered until they are resumed."""
ALL_LOST: Final = "every instance was lost on the way: try again later"


class Streams(Protocol):
    """The requests of the cluster's clients."""

    @property
    def streams_open(self) -> int: ...

    def withdraw_all(self) -> None: ...


class ClusterOrders:
    def __init__(self, streams: Streams, instances: InstanceSet) -> None:
        self._streams = streams
        self._instances = instances
        self.mode = "serving"
        self.on_identity: Callable[[bytes], None] = lambda identity: None
        "Called when other weights are served."
        self._held = False
        "Whether the present pause is part of an order that ends with a resume."
        self._unresumed: dict[str, None] = {}
        "Names of instances that were paused, and not resumed since."
        self._resuming: dict[asyncio.Task[None], None] = {}
        self._stream_ended = asyncio.Event()
        instances.on_joined = self.on_joined

    @property
    def refusal(self) -> Refused | None:
        """The refusal for a new request while the cluster does not serve."""
        if self.mode == "serving":
            return None
        return Refused("draining" if self.mode == "draining" else "paused")

    def on_joined(self, instance: InstanceSession) -> None:
        if self.mode not in ("serving", "draining"):
            self._note_paused([instance])
            instance.orders.pause_again(held=self._held)
        elif self.mode == "serving" and instance.hello.name in self._unresumed:
            task = asyncio.create_task(self._resume_late(instance))
            self._resuming[task] = None
            task.add_done_callback(lambda task: self._resuming.pop(task, None))

    def _note_paused(self, instances: Sequence[InstanceSession]) -> None:
        self._unresumed.update((instance.hello.name, None) for instance in instances)
        while len(self._unresumed) > UNRESUMED_MAX:  # those that never came back
            del self._unresumed[next(iter(self._unresumed))]

    async def _resume_late(self, instance: InstanceSession) -> None:
        """Wake and resume an instance whose session was lost when all were resumed."""
        with contextlib.suppress(EngineError):  # it is lost again
            await instance.orders.wake()
            if self.mode == "serving":
                await self._resume(instance)

    def on_stream_ended(self) -> None:
        self._stream_ended.set()

    async def pause(self, drain_seconds: float | None) -> None:
        """Drain the router, then pause all instances. Requests that are open after `drain_seconds` end; None: no limit."""
        if self.mode == "serving":
            self.mode = "draining"
        left = drain_seconds
        try:
            async with asyncio.timeout(drain_seconds):
                await self._drained()
        except TimeoutError:
            self._streams.withdraw_all()
            left = 0.0
        self._require_not_resumed()
        paused: dict[InstanceSession, None] = {}
        while late := [instance for instance in self._instances.sessions if instance not in paused]:  # some may join meanwhile
            paused.update(dict.fromkeys(late))
            self._note_paused(late)
            await self._send_to(late, lambda instance: instance.orders.pause(left, held=self._held))
            self._require_not_resumed()
        if self.mode == "draining":
            self.mode = "paused"

    async def _drained(self) -> None:
        """Wait until no stream is open, or the cluster was resumed."""
        while self._streams.streams_open and self.mode != "serving":
            self._stream_ended.clear()
            await self._stream_ended.wait()

    def _require_not_resumed(self) -> None:
        if self.mode == "serving":
            raise Unavailable("the cluster was resumed before it was paused")

    async def resume(self) -> None:
        self.mode = "serving"
        self._stream_ended.set()  # wakes tasks that wait for the drain
        await self._send_to_connected(self._resume)

    async def _resume(self, instance: InstanceSession) -> None:
        await instance.orders.resume()
        self._unresumed.pop(instance.hello.name, None)

    async def clear_cache(self, *, device: bool, host: bool) -> None:
        await self._send_to_all(lambda instance: instance.orders.clear_cache(device=device, host=host))

    async def sleep(self, drain_seconds: float | None) -> None:
        await self.pause(drain_seconds)
        await self._send_to_all(lambda instance: instance.orders.sleep())
        self.mode = "asleep"

    async def wake(self) -> None:
        await self._send_to_all(lambda instance: instance.orders.wake())
        await self.resume()

    async def load_weights(self, model: str, drain_seconds: float | None) -> None:
        """Load other weights. The cluster serves afterwards, also after an error. Raises CallerError if they cannot be loaded;
        then it serves the old ones."""
        self._held = True
        try:
            await self._load_weights(model, drain_seconds)
        finally:
            self._held = False

    async def _load_weights(self, model: str, drain_seconds: float | None) -> None:
        try:
            await self.sleep(drain_seconds)
        except EngineError:
            await self._serve_again()
            raise
        self._instances.reloading = True
        try:
            await self._reload(model)
        finally:
            self._instances.reloading = False

    async def _reload(self, model: str) -> None:
        """Load weights while all instances are asleep."""
        sessions = self._instances.sessions
        before = {instance: instance.hello.model for instance in sessions}
        outcomes = await self._outcomes(sessions, lambda instance: instance.orders.wake_with(model))
        refused = [
            (instance, error) for instance, error in zip(sessions, outcomes, strict=True) if isinstance(error, CallerError)
        ]
        if refused:
            await self._restore_models(
                {instance: before[instance] for instance, error in zip(sessions, outcomes, strict=True) if error is None}
            )
        self._rejoin(sessions)
        await self.resume()
        if refused:
            raise CallerError("; ".join(f"{instance.hello.name}: {error}" for instance, error in refused))
        if None not in outcomes:
            raise Unavailable(ALL_LOST)

    async def _serve_again(self) -> None:
        """Resume instances that were paused, and in part asleep, for an order that has failed."""
        await self._outcomes(self._instances.sessions, lambda instance: instance.orders.wake())
        with contextlib.suppress(EngineError):  # one instance failed; the others serve
            await self.resume()

    async def _restore_models(self, models: Mapping[InstanceSession, str]) -> None:
        """Load the old weights again in these instances. `models`: the path of each, because paths are valid on one machine
        only."""

        async def restore(instance: InstanceSession) -> None:
            await instance.orders.sleep()
            await instance.orders.wake_with(models[instance])

        changed = list(models)
        for instance, error in zip(changed, await self._outcomes(changed, restore), strict=True):
            if error is not None:
                logger.warning("instance %s does not get its old weights again: %s", printable(instance.hello.name), error)

    def _rejoin(self, sessions: Sequence[InstanceSession]) -> None:
        """Remove all sessions from the machine first: while an instance with the old identity is present, none with another
        fits."""
        self._instances.rejoin(sessions)
        there = self._instances.sessions
        if there:
            self.on_identity(there[0].hello.ready.identity)

    async def _send_to_all(self, order: Callable[[InstanceSession], Awaitable[None]]) -> None:
        """Send an order to all instances. Raises Unavailable if none is connected, or all are lost meanwhile."""
        if not self._instances.sessions:
            raise Unavailable("no instance is connected: try again later")
        await self._send_to_connected(order)
        if not self._instances.sessions:
            raise Unavailable(ALL_LOST)

    async def _send_to_connected(self, order: Callable[[InstanceSession], Awaitable[None]]) -> None:
        await self._send_to(self._instances.sessions, order)

    async def _send_to(self, sessions: list[InstanceSession], order: Callable[[InstanceSession], Awaitable[None]]) -> None:
        """Send an order to these instances. A lost instance counts as done; any other error is raised."""
        for instance, error in zip(sessions, await self._outcomes(sessions, order), strict=True):
            if error is not None and instance in self._instances.sessions:
                raise error

    async def _outcomes(
        self, sessions: Sequence[InstanceSession], order: Callable[[InstanceSession], Awaitable[None]]
    ) -> list[EngineError | None]:
        async def outcome(instance: InstanceSession) -> EngineError | None:
            try:
                await order(instance)
            except OrderLate as late:
                self._instances.give_up(instance, str(late))
                return late
            except EngineError as error:
                return error
            return None

        return list(await asyncio.gather(*map(outcome, sessions)))
