"""The cache service's process: what it is told about the KV pool. What it does with blocks is kvcache/.

It serves one pool at a time, until its control channel ends:

    PoolReady + descriptor   over the descriptor socket: map that pool instead of the one before, verify it, confirm with
                             PoolAttached over the control channel
    CreatePool               over the control channel (messenger): make the pool, announce it with PoolReady + descriptor
    DetachPool               over the control channel: unmap that pool, confirm with PoolDetached

The engine sends PoolReady right after this process was started, if there is a pool by then, and again whenever there is another
(a restarted worker that made one). Whatever goes wrong in here ends the process; the engine starts another and hands it the
pool again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys

from baton.config import CacheConfig
from baton.errors import EngineError, PeerError
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.observe.logs import configure
from baton.protocol.codec import Message
from baton.protocol.control import StartFailed
from baton.protocol.pool import CreatePool, DetachPool, PoolAttached, PoolDetached, PoolReady
from baton.runtime.channel import Channel
from baton.runtime.children import begin_child
from baton.runtime.descriptors import receive_descriptor, send_descriptor
from baton.runtime.process_table import CONTROL, DESCRIPTORS


class CacheProcess:
    def __init__(self, config: CacheConfig, control: Channel, link: socket.socket) -> None:
        self._config = config
        self._control = control
        self._link = link
        self.pool: KVPool | None = None

    async def run(self) -> None:
        """Until the engine is gone."""
        reading = asyncio.create_task(self._read_descriptors())
        listening = asyncio.create_task(self._control.listen(self.on_message))
        try:
            done, _ = await asyncio.wait({reading, listening}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            reading.cancel()
            listening.cancel()

    def on_message(self, message: Message) -> None:
        match message:
            case CreatePool():
                self.create(message)
            case DetachPool(incarnation):
                if self.pool is not None and self.pool.incarnation == incarnation:
                    self.detach()
                self._control.send(PoolDetached(incarnation))

    def create(self, order: CreatePool) -> None:
        self.detach()
        self.pool = KVPool.create(self._layout(order), order.blocks)
        send_descriptor(self._link, self.pool.announcement(), self.pool.fd)

    def attach(self, ready: PoolReady, fd: int) -> None:
        self.detach()
        self.pool = KVPool.attach(fd, ready)
        self._control.send(PoolAttached(ready.incarnation))

    def detach(self) -> None:
        """Nothing may be copied from or to it any more."""
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    def _layout(self, order: CreatePool) -> KVLayout:
        if order.layout:
            return KVLayout.decode(order.layout)
        from baton.worker.build import layout_of  # a look into the model's files, and none at its weights

        return layout_of(self._config.worker)

    async def _read_descriptors(self) -> None:
        while (received := await receive_descriptor(self._link)) is not None:
            message, fd = received
            if type(message) is not PoolReady:
                os.close(fd)
                raise PeerError(f"a {type(message).__name__} came with a descriptor")
            self.attach(message, fd)


async def serve(config: CacheConfig, sockets: dict[str, socket.socket], process: type[CacheProcess]) -> None:
    control = await Channel.open(sockets[CONTROL])
    sockets[DESCRIPTORS].setblocking(False)
    try:
        await process(config, control, sockets[DESCRIPTORS]).run()
    except (EngineError, OSError) as error:
        control.send(StartFailed(str(error) or type(error).__name__))
        await control.finish()
        sys.exit(1)


def main(process: type[CacheProcess] = CacheProcess) -> None:
    config, sockets = begin_child(CacheConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure("cache", config.log_level, config.log_format)
    asyncio.run(serve(config, sockets, process))


if __name__ == "__main__":
    main()
