"""A ChannelClient, and a test in the engine's place."""

from __future__ import annotations

import asyncio
import socket

from baton.api.generate.engine_client import Delta
from baton.protocol.codec import Message
from baton.protocol.control import InstanceReady, Ping, Pong
from baton.protocol.ids import RequestId
from baton.protocol.output import Ended
from baton.protocol.request import FinishReason, GenerateRequest, SamplingParams
from baton.runtime.front.client import ChannelClient
from baton.runtime.wire.channel import Channel

READY = InstanceReady(1, 2, 3, 4, 5)
A, B = RequestId("a"), RequestId("b")


def request(name: RequestId = A, n: int = 1, **sampling) -> GenerateRequest:
    return GenerateRequest(id=name, prompt=(1, 2, 3), n=n, sampling=SamplingParams(max_tokens=9, **sampling))


def ended(name: RequestId = A, index: int = 0, reason: FinishReason = FinishReason.LENGTH, attempt: int = 1) -> Ended:
    return Ended(name, index, reason, 3, 0, 2, 0, attempt=attempt)


class Pair:
    def __init__(self, *, successors_within: float | None = None) -> None:
        """Where seconds are given, an engine that goes may be followed by another, within so many."""
        self._successors_within = successors_within
        self._successors: asyncio.Queue[Channel | None] = asyncio.Queue()

    async def __aenter__(self) -> Pair:
        ours, theirs = socket.socketpair()
        self.channel, self.engine = await Channel.open(ours), await Channel.open(theirs)
        self.client = ChannelClient(self.channel)
        next_channel = None if self._successors_within is None else self._successors.get
        self.reading = asyncio.create_task(self.client.read(next_channel, self._successors_within or 0.0))
        return self

    async def another_engine(self) -> None:
        """The present one goes, and the next one is there; it is not ready yet."""
        self.engine.close()
        ours, theirs = socket.socketpair()
        self.channel, self.engine = await Channel.open(ours), await Channel.open(theirs)
        self._successors.put_nowait(self.channel)
        while self.client._channel is not self.channel:
            await asyncio.sleep(0)

    async def __aexit__(self, *_: object) -> None:
        self.engine.close()
        self._successors.put_nowait(None)
        await asyncio.wait_for(self.reading, 10)
        self.channel.close()
        if self.client.ready.done() and not self.client.ready.cancelled():
            self.client.ready.exception()
        assert self.client.front.ledgers == {}
        assert self.client._orders.waiting == 0
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert len(others) <= 1, others  # the one of `finish`

    async def heard(self) -> Message:
        message = await self.engine.receive()
        assert message is not None
        return message

    async def told(self, *messages: Message) -> None:
        """When this returns the client has taken all of them in."""
        for message in messages:
            self.engine.send(message)
        ping = asyncio.create_task(self.client.ping(10))
        number = await self.heard()
        assert type(number) is Ping
        self.engine.send(Pong(number.number))
        await ping

    async def told_ready(self) -> None:
        """The client knows that this engine is ready, and had nothing to send it."""
        self.engine.send(READY)
        while self.client.front.away is not None:
            await asyncio.sleep(0)
        await self.told()

    async def begin(self, wanted: GenerateRequest) -> Asked:
        asked = Asked(self.client, wanted)
        assert await self.heard() == wanted
        return asked


class Asked:
    """A request, and the deltas that came of it."""

    def __init__(self, client: ChannelClient, wanted: GenerateRequest) -> None:
        self.deltas: list[Delta] = []
        self.over = asyncio.ensure_future(client.generate(wanted, self.take))

    def take(self, delta: Delta) -> None:
        self.deltas.append(delta)

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.tokens]
