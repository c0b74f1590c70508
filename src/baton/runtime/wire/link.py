"""A session between a router and an instance: a channel (channel.py) over an untrusted network.

    instance  dial(address, credentials) -------> LinkServer  router
              Link  <== sealed frames, both ways, in TLS if there are certificates ==>  Link

Messages arrive in order and once, from a peer that knows the cluster's secret (trust/); otherwise the session ends. `send`
gathers: all messages of one turn of the loop are sent in one sealed frame, for the price of one MAC. A peer that does not read
is dropped when too much is unread. A link does not detect a dead peer: the end of a TCP connection can stay unseen for hours,
so both sides send heartbeats (protocol/instance.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Final, Literal

from baton.addresses import Address
from baton.config import WireConfig
from baton.errors import LinkFailed
from baton.protocol.codec import FROM_INSTANCE, FROM_ROUTER, Message, encode
from baton.protocol.versions import VERSIONS, Versions
from baton.runtime.wire.channel import LAST_WORDS_SECONDS, Channel, FrameProtocol
from baton.trust import stream as tls_stream
from baton.trust.credentials import Credentials
from baton.trust.dialling import connected
from baton.trust.handshake import LINK, SessionKeys
from baton.trust.seal import CONTENT_BYTES_MAX, SealedBuffer, Sealer
from baton.trust.session import prove_as_dialler, prove_as_listener
from baton.trust.stream import open_stream
from baton.trust.tls import TlsLayer

Side = Literal["router", "instance"]

BATCH_BYTES: Final = 256 * 1024
"""Bytes of gathered messages beyond which they are sent at once: the peer need not wait for a large frame to be complete."""
RECORD_BYTES: Final = 64 * 1024
"""Bytes of TLS records received at a time."""
WIRE: Final = WireConfig()
"""Default times of a session."""


class Link(Channel):
    """A session, used like a Channel. A fault of the peer raises LinkFailed, with a reason."""

    _frames: SealedFrames

    def __init__(self, frames: SealedFrames, version: int = VERSIONS.newest, names: tuple[str, ...] = ()) -> None:
        """`version`: of messages, as both sides have agreed. `names`: in the peer's certificate, if it has shown one."""
        super().__init__(frames)
        self.version = version
        self.names = names

    def send(self, message: Message) -> None:
        self._frames.write(encode(message, self.version))

    def on_unknown_kind(self, call: Callable[[int], None]) -> None:
        """Set the callback for unknown messages: `call` gets the kind of every message that is skipped because this build does
        not know it."""
        self._frames.on_unknown_kind(call)

    @property
    def failure(self) -> LinkFailed | None:
        """The reason for the session's end, if the peer is at fault."""
        return self._frames.failure

    @property
    def own_host(self) -> str:
        """The local address of the connection. Empty: a unix socket."""
        place = self._frames.transport.get_extra_info("sockname")
        return str(place[0]) if isinstance(place, tuple) else ""

    async def wait_ended(self) -> None:
        """Wait until no message follows. Raises nothing: `failure` has the peer's fault, if any."""
        await asyncio.wait({self._frames.ended})


class SealedFrames(FrameProtocol):
    def __init__(self, keys: SessionKeys, side: Side, wire: WireConfig = WIRE) -> None:
        """`side`: our own side of the session."""
        self._backlog_bytes_max = wire.session_backlog_bytes_max
        ours, theirs = keys if side == "router" else reversed(keys)
        self._sealed = SealedBuffer(theirs, FROM_INSTANCE if side == "router" else FROM_ROUTER)
        super().__init__(self._sealed)
        self._sealer = Sealer(ours)
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        self._closing: asyncio.TimerHandle | None = None

    def on_unknown_kind(self, call: Callable[[int], None]) -> None:
        self._sealed.unsealer.on_unknown = call

    @property
    def failure(self) -> LinkFailed | None:
        error = self.ended.exception() if self.ended.done() else None
        return error if isinstance(error, LinkFailed) else None

    @property
    def backlog(self) -> int:
        return super().backlog + self._gathered_bytes

    def write(self, frame: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._gathered_bytes + len(frame) > CONTENT_BYTES_MAX:
            self._flush()
        if not self._gathered:
            asyncio.get_running_loop().call_soon(self._flush)
        self._gathered.append(frame)
        self._gathered_bytes += len(frame)
        if self._gathered_bytes > BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._gathered:
            gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
            self._send(self._sealer.seal(gathered))

    def _send(self, sealed: bytes) -> None:
        super().write(sealed)

    def close(self) -> None:
        """Close. A peer that does not read the last messages keeps no descriptor of ours open."""
        self._flush()
        super().close()
        if self._closing is None:
            self._closing = asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._gathered, self._gathered_bytes = [], 0
        if self._closing is not None:
            self._closing.cancel()

    def backlog_bytes_max(self) -> int:
        return self._backlog_bytes_max

    def _drop_unread(self, unread: int) -> None:
        self._end(LinkFailed("unread", f"the peer does not read: {unread} bytes wait for it"))
        super()._drop_unread(unread)


class TlsFrames(SealedFrames):
    """Sealed frames inside TLS. The transport carries records."""

    def __init__(self, tls: TlsLayer, keys: SessionKeys, side: Side, wire: WireConfig = WIRE) -> None:
        super().__init__(keys, side, wire)
        self._tls = tls
        self._records = memoryview(bytearray(RECORD_BYTES))
        self._encrypted = 0
        "Bytes that our key of TLS has encrypted."

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.buffer_updated(0)  # bytes that came right behind the handshake

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._records

    def buffer_updated(self, nbytes: int) -> None:
        self._tls.feed(self._records[:nbytes])
        try:
            while not self.ended.done() and (count := self._tls.read_into(super().get_buffer(-1))):
                super().buffer_updated(count)
        except LinkFailed as failed:
            self._end(failed)
            self.transport.close()

    def _send(self, sealed: bytes) -> None:
        super()._send(self._tls.encrypt(sealed))
        self._encrypted += len(sealed)
        if self._encrypted > tls_stream.KEY_BYTES_MAX:
            text = f"its key of TLS has encrypted {tls_stream.KEY_BYTES_MAX >> 30} GiB; the next session has another"
            self._end(LinkFailed("key_used_up", text))
            self.transport.close()


# Handshakes


async def dial(address: Address, credentials: Credentials, wire: WireConfig = WIRE, versions: Versions = VERSIONS) -> Link:
    """Dial a router, as an instance. Raises LinkFailed, or OSError if nothing listens there."""
    limit = wire.session_handshake_seconds
    try:
        async with asyncio.timeout(limit):
            link = await _open(await connected(address), credentials, "instance", wire, versions)
    except TimeoutError:
        tls = "" if credentials.tls() is not None else ", and without TLS"
        raise LinkFailed("timeout", f"no router answered within {limit:g} s: is it the cluster port{tls}?") from None
    if why := credentials.revoked(link.names):
        link.close()
        raise LinkFailed("revoked", f"the router's certificate: {why}")
    return link


async def welcome(sock: socket.socket, credentials: Credentials, wire: WireConfig = WIRE) -> Link:
    """Accept an instance, as a router. Owns the socket: closed if this raises LinkFailed."""
    limit = wire.session_handshake_seconds
    try:
        async with asyncio.timeout(limit):
            return await _open(sock, credentials, "router", wire)
    except TimeoutError:
        tls = "" if credentials.tls() is None else ": does the instance have --cluster-ssl-certfile?"
        raise LinkFailed("timeout", f"the handshake took more than {limit:g} s{tls}") from None


async def _open(
    sock: socket.socket, credentials: Credentials, side: Side, wire: WireConfig = WIRE, versions: Versions = VERSIONS
) -> Link:
    """Secure the connection (TLS, if there are certificates), prove the secret on both sides, and start the sealed frames."""
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = await open_stream(sock, credentials, LINK, listens=side == "router")
        prove = prove_as_listener if side == "router" else prove_as_dialler
        keys, version = await prove(stream, credentials.secrets(), LINK, versions)
        frames = SealedFrames(keys, side, wire) if stream.tls is None else TlsFrames(stream.tls, keys, side, wire)
        await asyncio.get_running_loop().create_connection(lambda: frames, sock=sock)
        undo.pop_all()
    return Link(frames, version, stream.names)
