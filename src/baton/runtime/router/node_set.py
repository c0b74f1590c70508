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
from baton.core.cluster.events import ClusterEvent, Join, Part, Resumed, Say, Session
from baton.errors import InvariantBroken, PeerError
from baton.protocol.codec import Message
from baton.protocol.control import InstanceStats, ModelChanged, ModeReport, OrderAnswer, Pong
from baton.protocol.node import Beat, NodeHello, RouterBeat, RouterHello
from baton.protocol.output import Emit
from baton.protocol.versions import CAPABILITIES
from baton.repeats import Repeats, printable
from baton.runtime.processes.build_info import own_build
from baton.runtime.router.node import Node, counters_of, summed
from baton.runtime.wire.channel import Channel

logger = logging.getLogger("baton.router")

STALL_SECONDS: Final = 0.5
"""A beat that is so late means that the router itself was stopped."""


class Owner(Protocol):
    def tell(self, event: ClusterEvent) -> None:
        """To the router machine."""
        ...

    def on_message(self, message: Message) -> None:
        """An instance says something to the machine."""
        ...

    def fail(self, error: Exception) -> None:
        """Something of ours is wrong: the router must not go on."""
        ...


class NodeSet:
    def __init__(self, router: str, config: RouterConfig, owner: Owner, wire: WireConfig | None = None) -> None:
        self._hello_seconds = (wire or WireConfig()).session_hello_seconds
        self._config = config
        self._hello = RouterHello(router, config.beat_seconds, config.lapse_seconds, CAPABILITIES, own_build())
        self._owner = owner
        self._nodes: dict[Session, Node] = {}
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
        self.first: asyncio.Future[NodeHello] = self._loop.create_future()
        "There is, or was, an instance."
        self.on_joined: Callable[[Node], None] = lambda node: None
        self.on_changed: Callable[[], None] = lambda: None
        "Somebody has joined or left."

    @property
    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    @property
    def context_tokens(self) -> int | None:
        """What every instance could hold, so that each can go on with what another has begun. None: nobody is there."""
        return min((node.hello.ready.context_tokens for node in self._nodes.values()), default=None)

    def stats(self) -> InstanceStats:
        return summed([self._gone, *(node.stats for node in self._nodes.values())])

    def send(self, session: Session, message: Message) -> None:
        """To one that is gone: nothing happens."""
        if (node := self._nodes.get(session)) is not None:
            node.send(message)

    async def serve(self, channel: Channel) -> None:
        """One session, from its hello to its end."""
        node: Node | None = None
        try:
            async with asyncio.timeout(self._hello_seconds):
                hello = await channel.receive()
            if isinstance(hello, NodeHello):
                node = self._join(hello, channel)
                await channel.listen(partial(self._on_message, node))
            elif hello is not None:
                self._note_malformed(None, f"its first message is a {type(hello).__name__} and no hello")
        except TimeoutError:
            self._log(None, f"it said no hello within {self._hello_seconds:g} s")
        except PeerError as error:  # bytes that are no message, or values outside their ranges
            self._log(node, str(error))  # its door counts it (link_server.py)
        except InvariantBroken as error:
            self._owner.fail(error)
        except Exception as error:  # a message whose meaning nobody foresaw: its session ends, and no other
            self._note_malformed(node, f"malformed: {type(error).__name__}: {error}", error)
        finally:
            channel.close()
            if node is not None and node.session in self._nodes:
                self.lose(node.session, "its session ended")
                self._owner.tell(Part(node.session, "its session ended"))

    def end_malformed(self, session: Session, error: Exception) -> None:
        """The router machine could not handle a message of this session."""
        if (node := self._nodes.get(session)) is not None:
            text = f"malformed: {type(error).__name__}: {error}"
            self._note_malformed(node, text, error)
            self.lose(session, printable(text))

    def _note_malformed(self, node: Node | None, text: str, error: Exception | None = None) -> None:
        self.malformed += 1
        self._log(node, text, error)

    def _log(self, node: Node | None, text: str, error: Exception | None = None) -> None:
        """Once per instance and minute: one that comes again and again must not fill the disk."""
        name = "" if node is None else node.hello.name
        if times := self._logged.due(name, self._loop.time()):
            who = f"instance {name}" if name else "an instance without a hello"
            logger.warning("%s: %s (%d since this was last logged)", who, printable(text), times, exc_info=error)

    def _join(self, hello: NodeHello, channel: Channel) -> Node:
        node = Node(Session(next(self._sessions)), hello, channel, self._config.suspect_seconds)
        self._nodes[node.session] = node
        self._owner.tell(Join(node.session, hello))
        if node.session not in self._nodes:
            return node  # it does not fit, and was told
        node.hello = hello = replace(hello, refused=False)
        node.welcome(self._hello)
        logger.info("instance %s (%s) has joined", hello.name, hello.role)
        self.joined += 1
        self.on_joined(node)
        self.on_changed()
        if self._beat_timer is None:
            self._beat_due = self._loop.time()
            self._beat()
        if not self.first.done():
            self.first.set_result(hello)
        return node

    def rejoin(self, first: Sequence[Node]) -> None:
        """These compute with other weights from now on: to the machine they are others. Nothing is under way. First all leave:
        while one of another identity is there, they do not fit. Then they come before those that joined meanwhile."""
        there = sorted(self.nodes, key=lambda node: node not in first)
        for node in there:
            del self._nodes[node.session]
            self._owner.tell(Part(node.session, "other weights", reloaded=True))
        for node in there:
            node.session = Session(next(self._sessions))
            self._nodes[node.session] = node
            self._owner.tell(Join(node.session, node.hello))

    def lose(self, session: Session, reason: str) -> None:
        """It is given up, or does not fit, or has left."""
        node = self._nodes.pop(session, None)
        if node is None:
            return
        name, why = node.hello.name, printable(reason)
        if node.welcomed:
            logger.warning("instance %s is gone: %s", name, why)
        elif times := self._logged.due(("refused", name, why), self._loop.time()):  # it comes again every few seconds
            logger.warning("instance %s is refused: %s%s", name, why, f" ({times} times)" if times > 1 else "")
        self._gone = summed([self._gone, counters_of(node.stats)])
        node.hang_up(reason)
        self.on_changed()

    def give_up(self, node: Node, reason: str) -> None:
        """Its session ends, and what it had goes on elsewhere. It may dial again."""
        if node.session in self._nodes:
            self.lose(node.session, reason)
            self._owner.tell(Part(node.session, reason))

    def _on_message(self, node: Node, message: Message) -> None:
        node.heard_at = self._loop.time()
        if type(message) is Emit:  # nearly all of them
            if node.session in self._nodes:
                self._owner.tell(Say(node.session, message))
            return
        match message:
            case Pong():
                node.orders.on_pong(message)
            case OrderAnswer():
                node.orders.on_answer(message)
            case ModeReport(mode):
                node.stats = replace(node.stats, mode=mode)
                self._owner.tell(Say(node.session, node.stats))
            case ModelChanged(model, identity, parts):
                ready = replace(node.hello.ready, identity=identity, identity_parts=parts)
                node.hello = replace(node.hello, ready=ready, model=model)
                if not self.reloading:  # by an order that was given up: whether it fits is decided when it joins again
                    self.give_up(node, "it computes with other weights now")
            case _:
                if type(message) is InstanceStats:
                    node.stats = message
                elif type(message) is Beat:
                    node.beat = message
                self._owner.on_message(message)
                if node.session in self._nodes:
                    self._owner.tell(Say(node.session, message))  # type: ignore[arg-type]

    def _beat(self) -> None:
        now = self._loop.time()
        stalled, self._beat_due = now - self._beat_due > STALL_SECONDS, now + self._config.beat_seconds
        for node in self.nodes:
            node.send(RouterBeat())
            if stalled:
                node.heard_at = now
        if stalled:  # the router was: a machine that stops it stops others too, and no instance is given up for that
            self._owner.tell(Resumed())
        self._beat_timer = self._loop.call_at(self._beat_due, self._beat)

    def close(self) -> None:
        if self._beat_timer is not None:
            self._beat_timer.cancel()
        for node in self._nodes.values():
            node.channel.close()
            node.orders.fail("the router ends")
        self._nodes.clear()
