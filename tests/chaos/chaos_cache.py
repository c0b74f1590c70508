"""The cache service, disturbed: pulls wait at a gate (chaos_gates.py), and so does what is sent to other machines. While the
gate `transport` is armed, nobody is where the peer's pool should be: the way to it is broken. With the order `far`, or while
the gate `far` is armed, peers are on another machine: only the network leads to them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from chaos_gates import ORDERS, POLL_SECONDS, Gate
from msgspec.structs import replace

from baton.kvcache import tcp_session
from baton.kvcache.tcp_session import TcpSession
from baton.protocol.codec import Message
from baton.protocol.ids import PoolIncarnation
from baton.protocol.moves import BlockMove
from baton.runtime.cache import process as cache


class ChaosCache(cache.CacheProcess):
    def __init__(self, *settings: object) -> None:
        super().__init__(*settings)  # type: ignore[arg-type]
        self._gate = Gate("pull")
        self._transport_gate = Gate("transport")
        self._far_gate = Gate("far")
        self._held: list[asyncio.Task[None]] = []
        gate, write_piece = Gate("send"), TcpSession.write_piece

        def write_when_open(session: TcpSession, content: Sequence[memoryview], digest: bytes) -> None:
            gate.wait()
            write_piece(session, content, digest)

        TcpSession.write_piece = write_when_open  # type: ignore[method-assign]
        tcp_session.PIECE_BYTES = 1  # a block: there are several to be held

    def on_message(self, message: Message) -> None:
        pull = isinstance(message, BlockMove) and message.kind == "pull"
        if pull and (ORDERS.get("far") or self._far_gate.closed):
            message = replace(message, peer=next(address for address in message.peer.split() if address.startswith("tcp:")))
        if pull and self._transport_gate.closed:
            message = replace(message, peer=f"{message.peer}.nobody", peer_pool=PoolIncarnation(0))
        if pull and self._gate.closed:
            self._held.append(asyncio.create_task(self._later(message)))
        else:
            super().on_message(message)

    async def _later(self, message: Message) -> None:
        while self._gate.still_closed:
            await asyncio.sleep(POLL_SECONDS)
        super().on_message(message)


if __name__ == "__main__":
    sys.exit(cache.main(ChaosCache))
