"""The instances of a router: sessions from hello to end, beats, and the numbers that they tell."""

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
from baton.protocol.control import InstanceStats, ModelChanged, ModeReport, OrderAnswer, Pong
from baton.protocol.instance import Heartbeat, InstanceHello, RouterHeartbeat, RouterHello
from baton.protocol.output import Emit
from baton.protocol.versions import CAPABILITIES
from baton.repeats import Repeats, printable
from baton.runtime.processes.build_info import own_build
from baton.runtime.router.instance_session import InstanceSession, counters_of, summed
from baton.runtime.wire.channel import Channel

logger = logging.getLogger("baton.router")

STALL_SECONDS: Final = 0.5
"""A beat that is so late means that the router itself was stopped."""


class SessionOwner(Protocol):
    def dispatch(self, event: ClusterEvent) -> None:
        """To the router machine."""
        ...

    def on_message(self, message: Message) -> None:
        """An instance says something to the machine."""
        ...

    def fail(self, error: Exception) -> None:
        """Something of ours is wrong: the router must not go on."""
        ...


class InstanceSet:
    def __init__(self, router: str, config: RouterConfig, owner: SessionOwner, wire: WireConfig | None = None) -> None:
        self._hello_seconds = (wire or WireConfig()).session_hello_seconds
        self._config = config
        self._hello = RouterHello(router, config.beat_seconds, config.lapse_seconds, CAPABILITIES, own_build())
        self._owner = owner
        self._nodes: dict[Session, InstanceSession] = {}
        self._sessions = count(1)
        self.reloading = False
        "Instances are loading other weights because they were told to."
        self.joined = 0
        "Sessions so far."
        self.malformed = 0
        "Sessions that ended because of what their instance sent."
        self._logged = Repeats()
        self._gone = InstanceStats()
        "Counters of instances that are not there any more."
        self._loop = asyncio.get_running_loop()
        self._beat_timer: asyncio.TimerHandle | None = None
        self._beat_due = self._loop.time()
        self.first: asyncio.Future[InstanceHello] = self._loop.create_future()
        "There is, or was, an instance."
        self.on_joined: Callable[[InstanceSession], None] = lambda instance: None
        self.on_changed: Callable[[], None] = lambda: None
        "Somebody has joined or left."

    @property
    def sessions(self) -> list[InstanceSession]:
        return list(self._nodes.values())

    @property
    def context_tokens(self) -> int | None:
        """What every instance could hold, so that each can go on with what another has begun. None: nobody is there."""
        return min((instance.hello.ready.context_tokens for instance in self._nodes.values()), default=None)

    def stats(self) -> InstanceStats:
        return summed([self._gone, *(instance.stats for instance in self._nodes.values())])

    def send(self, session: Session, message: Message) -> None:
        """To one that is gone: nothing happens."""
        if (instance := self._nodes.get(session)) is not None:
            instance.send(message)

    async def serve(self, channel: Channel) -> None:
        """One session, from its hello to its end."""
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
            self._log(None, f"it said no hello within {self._hello_seconds:g} s")
        except PeerError as error:  # bytes that are no message, or values outside their ranges
            self._log(instance, str(error))  # its door counts it (link_server.py)
        except InvariantBroken as error:
            self._owner.fail(error)
        except Exception as error:  # a message whose meaning nobody foresaw: its session ends, and no other
            self._note_malformed(instance, f"malformed: {type(error).__name__}: {error}", error)
        finally:
            channel.close()
            if instance is not None and instance.session in self._nodes:
                self.lose(instance.session, "its session ended")
                self._owner.dispatch(InstanceLeft(instance.session, "its session ended"))

    def end_malformed(self, session: Session, error: Exception) -> None:
        """The router machine could not handle a message of this session."""
        if (instance := self._nodes.get(session)) is not None:
            text = f"malformed: {type(error).__name__}: {error}"
            self._note_malformed(instance, text, error)
            self.lose(session, printable(text))

    def _note_malformed(self, instance: InstanceSession | None, text: str, error: Exception | None = None) -> None:
        self.malformed += 1
        self._log(instance, text, error)

    def _log(self, instance: InstanceSession | None, text: str, error: Exception | None = None) -> None:
        """Once per instance and minute: one that comes again and again must not fill the disk."""
        name = "" if instance is None else instance.hello.name
        if times := self._logged.due(name, self._loop.time()):
            who = f"instance {name}" if name else "an instance without a hello"
            logger.warning("%s: %s (%d since this was last logged)", who, printable(text), times, exc_info=error)

    def _join(self, hello: InstanceHello, channel: Channel) -> InstanceSession:
        instance = InstanceSession(Session(next(self._sessions)), hello, channel, self._config.suspect_seconds)
        self._nodes[instance.session] = instance
        self._owner.dispatch(InstanceJoined(instance.session, hello))
        if instance.session not in self._nodes:
            return instance  # it does not fit, and was told
        instance.hello = hello = replace(hello, refused=False)
        instance.welcome(self._hello)
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
        """These compute with other weights from now on: to the machine they are others. Nothing is under way. First all leave:
        while one of another identity is there, they do not fit. Then they come before those that joined meanwhile."""
        there = sorted(self.sessions, key=lambda instance: instance not in first)
        for instance in there:
            del self._nodes[instance.session]
            self._owner.dispatch(InstanceLeft(instance.session, "other weights", reloaded=True))
        for instance in there:
            instance.session = Session(next(self._sessions))
            self._nodes[instance.session] = instance
            self._owner.dispatch(InstanceJoined(instance.session, instance.hello))

    def lose(self, session: Session, reason: str) -> None:
        """It is given up, or does not fit, or has left."""
        instance = self._nodes.pop(session, None)
        if instance is None:
            return
        name, why = instance.hello.name, printable(reason)
        if instance.welcomed:
            logger.warning("instance %s is gone: %s", name, why)
        elif times := self._logged.due(("refused", name, why), self._loop.time()):  # it comes again every few seconds
            logger.warning("instance %s is refused: %s%s", name, why, f" ({times} times)" if times > 1 else "")
        self._gone = summed([self._gone, counters_of(instance.stats)])
        instance.hang_up(reason)
        self.on_changed()

    def give_up(self, instance: InstanceSession, reason: str) -> None:
        """Its session ends, and what it had goes on elsewhere. It may dial again."""
        if instance.session in self._nodes:
            self.lose(instance.session, reason)
            self._owner.dispatch(InstanceLeft(instance.session, reason))

    def _on_message(self, instance: InstanceSession, message: Message) -> None:
        instance.heard_at = self._loop.time()
        if type(message) is Emit:  # nearly all of them
            if instance.session in self._nodes:
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
                if not self.reloading:  # by an order that was given up: whether it fits is decided when it joins again
                    self.give_up(instance, "it computes with other weights now")
            case _:
                if type(message) is InstanceStats:
                    instance.stats = message
                elif type(message) is Heartbeat:
                    instance.beat = message
                self._owner.on_message(message)
                if instance.session in self._nodes:
                    self._owner.dispatch(InstanceMessage(instance.session, message))  # type: ignore[arg-type]

    def _beat(self) -> None:
        now = self._loop.time()
        stalled, self._beat_due = now - self._beat_due > STALL_SECONDS, now + self._config.beat_seconds
        for instance in self.sessions:
            instance.send(RouterHeartbeat())
            if stalled:
                instance.heard_at = now
        if stalled:  # the router was: a machine that stops it stops others too, and no instance is given up for that
            self._owner.dispatch(Resumed())
        self._beat_timer = self._loop.call_at(self._beat_due, self._beat)

    def close(self) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        for instance in self._nodes.values():
            instance.channel.close()
            instance.orders.fail("the router ends")
        self._nodes.clear()
