"""A router's door and what knocks at it: honest sessions, and bytes that somebody made up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

from baton.addresses import Address
from baton.config import WireConfig
from baton.runtime.wire.link import Link, dial
from baton.runtime.wire.link_server import LinkServer, listen_at
from baton.trust.credentials import Credentials
from baton.trust.secret import Secret

SECRET = Secret(b"s" * 32)
OTHER_SECRET = Secret(b"t" * 32)


class Door:
    """A LinkServer at a free port (or a path), whose sessions gather in `links`."""

    def __init__(
        self,
        path: str = "",
        secret: Credentials = SECRET,
        on_link: Callable[[Link, str], None] | None = None,
        sessions_max: int = 1024,
        **wire: Any,
    ) -> None:
        self._sessions_max, self._wire = sessions_max, WireConfig(**wire)
        self._given = Address(path=path) if path else Address(host="127.0.0.1")
        self._secret = secret
        self.links: list[Link] = []
        self._on_link = on_link or (lambda link, peer: self.links.append(link))

    async def __aenter__(self) -> Door:
        sock = listen_at(self._given)
        port = 0 if self._given.path else sock.getsockname()[1]
        self.address = self._given._replace(port=port)
        self.server = LinkServer(sock, self._secret, self._on_link, sessions_max=self._sessions_max, wire=self._wire)
        self.serving = asyncio.create_task(self.server.serve())
        await asyncio.sleep(0)  # it listens
        return self

    async def __aexit__(self, *_: object) -> None:
        self.serving.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await self.serving
        for link in self.links:
            link.close()
        await asyncio.sleep(0.01)

    async def until(self, question: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not question():
                await asyncio.sleep(0.005)

    async def session(self) -> tuple[Link, Link]:
        """(instance's end, router's end)"""
        known = len(self.links)
        ours = await dial(self.address, SECRET)
        await self.until(lambda: len(self.links) > known)
        return ours, self.links[-1]

    def connect(self) -> socket.socket:
        """Somebody who proves nothing."""
        if self.address.path:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self.address.path)
        else:
            sock = socket.create_connection((self.address.host, self.address.port))
        sock.setblocking(False)
        return sock


class Wire:
    """Between the two ends of a session: passes bytes on, and lets a test change them."""

    def __init__(self, address: Address, change: Callable[[bytes], bytes]) -> None:
        self._address = address
        self._change = change
        "Of what the instance sends, after the handshake."
        self._pumps: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = Address(host=host, port=port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._pumps:
            task.cancel()
        await asyncio.sleep(0.01)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._address.host, self._address.port)

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter, change: Callable[[bytes], bytes]) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(1 << 16):
                    target.write(change(data))
                    await target.drain()
            target.close()

        self._pumps.append(asyncio.create_task(pump(far_reader, writer, lambda data: data)))
        answer = await reader.readexactly(70)  # the instance's part of the handshake
        far_writer.write(answer)
        self._pumps.append(asyncio.create_task(pump(reader, far_writer, self._change)))


async def read_all(sock: socket.socket) -> bytes:
    """To the end, which comes."""
    content = b""
    async with asyncio.timeout(20):
        with contextlib.suppress(ConnectionError):
            while piece := await asyncio.get_running_loop().sock_recv(sock, 1 << 16):
                content += piece
    return content


async def heard(link: Link) -> list[Any]:
    """Everything to the end. Raises what ended it."""
    messages: list[Any] = []
    async with asyncio.timeout(20):
        while (message := await link.receive()) is not None:
            messages.append(message)
    return messages
