"""The instances of a router: sessions from hello to end, heartbeats, and stats."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Final, Protocol

from msgspec.structs import replace

from baton.config import RouterConfig, WireConfig
from baton.core.cluster.events import ClusterEvent, InstanceJoined, InstanceLeft, InstanceMessage, Resumed, Session
from baton.errors import InvariantBroken, PeerError
from baton.protocol.codec import Message
from baton.protocol.control import InstanceReady, InstanceStats, ModelChanged, ModeReport, OrderAnswer, Pong
from baton.protocol.instance import Heartbeat, InstanceHello, RouterHeartbeat, RouterHello
from baton.protocol.output import Emit
from baton.protocol.versions import CAPABILITIES
from baton.repeats import Repeats, printable
from baton.runtime.processes.build_info import own_build
from baton.runtime.router.instance_session import InstanceSession, counters_of, summed
from baton.runtime.router.refusals import Refusals
from baton.runtime.wire.channel import Channel
from baton.runtime.wire.link import Link
from baton.trust.credentials import Credentials

logger = logging.getLogger("baton.router")

STALL_SECONDS: Final = 0.5
"""Delay of a heartbeat from which the router itself counts as stopped."""


class SessionOwner(Protocol):
    def dispatch(self, event: ClusterEvent) -> None:
        """Dispatch to the router machine."""
        ...

    def on_message(self, message: Message) -> None:
        """Called with a message of an instance, before the machine gets it."""
        ...

    def fail(self, error: Exception) -> None:
        """Called on an internal error: the router must end."""
        ...


class InstanceSet:
    def __init__(
        self,
        router: str,
        config: RouterConfig,
        owner: SessionOwner,
        wire: WireConfig | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._credentials = credentials
        self._hello_seconds = (wire or WireConfig()).session_hello_seconds
        self._config = config
        self._hello = RouterHello(router, config.beat_seconds, config.lapse_seconds, CAPABILITIES, own_build())
        self._owner = owner
        self._by_session: dict[Session, InstanceSession] = {}
        self._sessions = count(1)
        self.reloading = False
        "Whether instances are loading other weights by order."
        self.joined = 0
        "Number of sessions so far."
        self.malformed = 0
        "Number of sessions that ended because of a malformed message."
        self.refusals = Refusals()
        self._logged = Repeats()
        self._gone = InstanceStats()
        "Counters of lost instances, summed."
        self._loop = asyncio.get_running_loop()
        self._beat_timer: asyncio.TimerHandle | None = None
        self._beat_due = self._loop.time()
        self.first: asyncio.Future[InstanceHello] = self._loop.create_future()
        "The hello of the first instance."
        self.on_joined: Callable[[InstanceSession], None] = lambda instance: None
        self.on_changed: Callable[[], None] = lambda: None
        "Called when an instance has joined or left, or other weights are served."
        self.unservable: Callable[[InstanceReady], str] = lambda ready: ""
        "The reason why the router's HTTP server cannot serve an instance's model. Empty: it can."

    @property
    def sessions(self) -> list[InstanceSession]:
        return list(self._by_session.values())

    @property
    def context_tokens(self) -> int | None:
        """Context that every instance can hold, so that each can continue the others' requests. None: no instance is
        connected."""
        return min((instance.hello.ready.context_tokens for instance in self._by_session.values()), default=None)

    def stats(self) -> InstanceStats:
        return summed([self._gone, *(instance.stats for instance in self._by_session.values())])

    def send(self, session: Session, message: Message) -> None:
        """Send to one instance. A lost one is ignored."""
        if (instance := self._by_session.get(session)) is not None:
            instance.send(message)

    async def serve(self, channel: Channel) -> None:
        """Serve one session, from its hello to its end."""
        instance: InstanceSession | None = None
        try:
            async with asyncio.timeout(self._hello_seconds):
                hello = await channel.receive()
            if isinstance(hello, InstanceHello):
                instance = self._join(hello, channel)
                await channel.listen(partial(self._on_message, instance))
            elif hello is not None:
                self._note_malformed(None, f"its first message is a {type(hello).__name__} and no hello")
        except TimeoutError:
            self._log(None, f"it sent no hello within {self._hello_seconds:g} s")
        except PeerError as error:  # malformed bytes, or values outside their ranges
            self._log(instance, str(error))  # link_server.py counts the failure
        except InvariantBroken as error:
            self._owner.fail(error)
        except Exception as error:  # a message that fails a handler ends its session, and no other
            self._note_malformed(instance, f"malformed: {type(error).__name__}: {error}", error)
        finally:
            channel.close()
            if instance is not None and instance.session in self._by_session:
                self.lose(instance.session, "its session ended")
                self._owner.dispatch(InstanceLeft(instance.session, "its session ended"))

    def end_malformed(self, session: Session, error: Exception) -> None:
        """End a session with a message that the router machine could not handle."""
        if (instance := self._by_session.get(session)) is not None:
            text = f"malformed: {type(error).__name__}: {error}"
            self._note_malformed(instance, text, error)
            self.lose(session, printable(text))

    def _note_malformed(self, instance: InstanceSession | None, text: str, error: Exception | None = None) -> None:
        self.malformed += 1
        self._log(instance, text, error)

    def _log(self, instance: InstanceSession | None, text: str, error: Exception | None = None) -> None:
        """Log at most once per instance and minute: repeated failures must not fill the disk."""
        name = "" if instance is None else instance.hello.name
        if times := self._logged.due(name, self._loop.time()):
            who = f"instance {name}" if name else "an instance without a hello"
            logger.warning("%s: %s (%d since this was last logged)", who, printable(text), times, exc_info=error)

    def warn(self, session: Session, text: str) -> None:
        if (instance := self._by_session.get(session)) is not None:
            self._log(instance, text)

    def _revoked(self, *instances: InstanceSession) -> str:
        """The reason why one of these instances is refused. Empty: none is revoked. The file is read once, however many there
        are."""
        names = [instance.hello.name for instance in instances]
        names += [name for instance in instances if isinstance(instance.channel, Link) for name in instance.channel.names]
        return "" if self._credentials is None else self._credentials.revoked(names)

    def _join(self, hello: InstanceHello, channel: Channel) -> InstanceSession:
        """Create the session of a new instance and present it to the router machine, which may refuse it."""
        instance = InstanceSession(Session(next(self._sessions)), hello, channel, self._config.suspect_seconds)
        self._by_session[instance.session] = instance
        if why := self._revoked(instance) or self.unservable(hello.ready):
            self.lose(instance.session, why)
            return instance
        self._owner.dispatch(InstanceJoined(instance.session, hello))
        if instance.session not in self._by_session:
            return instance  # the instance does not fit, and was refused
        instance.hello = hello = replace(hello, refused=False)
        instance.welcome(self._hello)
        self.refusals.forget(hello.name)
        logger.info("instance %s (%s) has joined", hello.name, hello.role)
        self.joined += 1
        self.on_joined(instance)
        self.on_changed()
        if self._beat_timer is None:
            self._beat_due = self._loop.time()
            self._beat()
        if not self.first.done():
            self.first.set_result(hello)
        return instance

    def rejoin(self, first: Sequence[InstanceSession]) -> None:
        """Present these instances, which have other weights now, to the machine as new ones. No request is under way. All leave
        first: while an instance with another identity is present, they do not fit. They rejoin before instances that joined
        meanwhile."""
        there = sorted(self.sessions, key=lambda instance: instance not in first)
        for instance in there:
            del self._by_session[instance.session]
            self._owner.dispatch(InstanceLeft(instance.session, "other weights", reloaded=True))
        for instance in there:
            instance.session = Session(next(self._sessions))
            self._by_session[instance.session] = instance
            self._owner.dispatch(InstanceJoined(instance.session, instance.hello))

    def lose(self, session: Session, reason: str, retry_seconds: float = 0.0) -> None:
        """Remove the instance: it timed out, was rejected, or disconnected. `retry_seconds`: as in InstanceRefused."""
        instance = self._by_session.pop(session, None)
        if instance is None:
            return
        name, why = instance.hello.name, printable(reason)
        if instance.welcomed:
            logger.warning("instance %s is gone: %s", name, why)
        else:
            self.refusals.note(name, reason, self._loop.time())
            if times := self._logged.due(("refused", name, why), self._loop.time()):  # it dials again every few seconds
                logger.warning("instance %s is refused: %s%s", name, why, f" ({times} times)" if times > 1 else "")
        self._gone = summed([self._gone, counters_of(instance.stats)])
        instance.disconnect(reason, retry_seconds)
        self.on_changed()

    def give_up(self, instance: InstanceSession, reason: str) -> None:
        """End the session; its requests continue at other instances. The instance may dial again."""
        if instance.session in self._by_session:
            self.lose(instance.session, reason)
            self._owner.dispatch(InstanceLeft(instance.session, reason))

    def _on_message(self, instance: InstanceSession, message: Message) -> None:
        """Handle a message of a joined instance: tokens and load go to the router machine, answers to their orders."""
        instance.received_at = self._loop.time()
        if type(message) is Emit:  # nearly all messages
            if instance.session in self._by_session:
                self._owner.dispatch(InstanceMessage(instance.session, message))
            return
        match message:
            case Pong():
                instance.orders.on_pong(message)
            case OrderAnswer():
                instance.orders.on_answer(message)
            case ModeReport(mode):
                instance.stats = replace(instance.stats, mode=mode)
                self._owner.dispatch(InstanceMessage(instance.session, instance.stats))
            case ModelChanged(model, identity, parts):
                ready = replace(instance.hello.ready, identity=identity, identity_parts=parts)
                instance.hello = replace(instance.hello, ready=ready, model=model)
                if not self.reloading:  # loaded by an order that has failed: the next join decides whether the instance fits
                    self.give_up(instance, "it computes with other weights now")
            case _:
                if type(message) is InstanceStats:
                    instance.stats = message
                elif type(message) is Heartbeat:
                    instance.beat = message
                self._owner.on_message(message)
                if instance.session in self._by_session:
                    self._owner.dispatch(InstanceMessage(instance.session, message))  # type: ignore[arg-type]

    def _beat(self) -> None:
        """Send heartbeats, detect that the router itself was stopped, and set the next timer."""
        now = self._loop.time()
        stalled, self._beat_due = now - self._beat_due > STALL_SECONDS, now + self._config.beat_seconds
        if self._revoked(*self.sessions):
            for instance in self.sessions:
                if why := self._revoked(instance):
                    self.give_up(instance, why)
        for instance in self.sessions:
            instance.send(RouterHeartbeat())
            if stalled:
                instance.received_at = now
        if stalled:  # the cause of the router's stop stops others too: no instance is lost for that
            self._owner.dispatch(Resumed())
        self._beat_timer = self._loop.call_at(self._beat_due, self._beat)

    def close(self) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        for instance in self._by_session.values():
            instance.channel.close()
            instance.orders.fail("the router ends")
        self._by_session.clear()
