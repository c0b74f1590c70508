"""A RouterClient with the real router machine, and tests in the place of its instances."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, TypeVar

from baton.config import RouterConfig, WireConfig
from baton.core.cluster.router import Router
from baton.protocol.codec import Message
from baton.protocol.control import InstanceReady, InstanceStats, ModelChanged, OrderAnswer, WakeInstance
from baton.protocol.instance import Heartbeat, InstanceHello, InstanceRefused, Role, RouterHeartbeat, RouterHello
from baton.runtime.router.router_client import RouterClient
from baton.runtime.wire.channel import Channel
from baton.trust.credentials import Credentials

MessageT = TypeVar("MessageT")
READY = InstanceReady(64, 16, 8, 300, 512, 512, identity=b"weights")


class FakeInstance:
    """Speaks the protocol as it is told to. It beats by itself."""

    def __init__(self, channel: Channel, name: str, role: Role, ready: InstanceReady) -> None:
        self.channel = channel
        self.hello = InstanceHello(name, 1, role, ready, b"layout", (f"/peer/{name}",), model=f"/old/{name}")
        self.beat = Heartbeat("", 0.05, ready.blocks, ready.slots)
        self.serving: asyncio.Task[None] | None = None
        self._beats: asyncio.Task[None] | None = None

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.channel.send(message)

    async def join(self) -> None:
        self.send(self.hello)
        await self.heard(RouterHello)
        self.send(self.beat, InstanceStats(blocks_total=64, blocks_free=64))
        self._beats = asyncio.create_task(self._keep_beating())

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.send(self.beat)

    async def heard(self, kind: type[MessageT]) -> MessageT:
        """The next message that is no beat, which must be of this kind."""
        async with asyncio.timeout(10):
            while type(message := await self.channel.receive()) is RouterHeartbeat:
                pass
        assert type(message) is kind, message
        return message

    async def obey(self, *orders: type[Any], refuse: str = "", identity: bytes | None = None) -> list[Any]:
        """Takes these orders, one after the other, and answers each."""
        taken = []
        for kind in orders:
            order = await self.heard(kind)
            taken.append(order)
            if type(order) is WakeInstance and identity is not None and not refuse:
                self.send(ModelChanged(order.model, identity))
            failed = bool(refuse) and type(order) is WakeInstance
            self.send(OrderAnswer(order.number, "refused" if failed else "done", refuse if failed else ""))
        return taken

    async def leave(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
        self.channel.close()
        if self.serving is not None:
            await asyncio.wait_for(self.serving, 10)

    def fall_silent(self) -> None:
        assert self._beats is not None
        self._beats.cancel()


class Cluster:
    """`async with Cluster(...) as cluster`. Settings are RouterConfig's."""

    def __init__(self, wire: WireConfig | None = None, credentials: Credentials | None = None, **settings: Any) -> None:
        self._wire, self._credentials = wire, credentials
        self.config = RouterConfig(**{"handoff_tokens_min": 0, **settings})
        self._instances: list[FakeInstance] = []

    async def __aenter__(self) -> Cluster:
        self.machine = Router(self.config)
        self.client = RouterClient(self.machine, self.config, wire=self._wire, credentials=self._credentials)
        return self

    async def connect(self, name: str, role: Role = "mixed", ready: InstanceReady = READY) -> FakeInstance:
        ours, theirs = socket.socketpair()
        instance = FakeInstance(await Channel.open(theirs), name, role, ready)
        instance.serving = asyncio.create_task(self.client.serve_instance(await Channel.open(ours)))
        self._instances.append(instance)
        return instance

    async def instance(self, name: str, role: Role = "mixed", ready: InstanceReady = READY) -> FakeInstance:
        """It has joined, and the machine knows what room it has."""
        instance = await self.connect(name, role, ready)
        await instance.join()
        async with asyncio.timeout(10):
            while not any(node.hello.name == name and node.stats.blocks_total for node in self.client.sessions):
                await asyncio.sleep(0)
        return instance

    async def refused(self, instance: FakeInstance) -> InstanceRefused:
        instance.send(instance.hello)
        return await instance.heard(InstanceRefused)

    async def __aexit__(self, *_: object) -> None:
        self.machine.check()
        for instance in self._instances:
            await instance.leave()
        self.client.close()
        self.client.over.result()
        assert self.client._streams == {}
        assert self.client.sessions == []
