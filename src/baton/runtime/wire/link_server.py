"""The router's listener: accepts connections of instances, authenticates them, and passes sessions on (link.py).

A connection that is not authenticated yet holds a descriptor and a timer, nothing else, and their number is limited. At the
limit the oldest one is closed: an honest instance needs milliseconds, so it gets in even while an attacker opens silent
connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from baton.addresses import Address
from baton.config import WireConfig
from baton.errors import InvalidConfig, LinkFailed
from baton.repeats import Repeats, printable
from baton.runtime.wire.link import WIRE, Link, welcome
from baton.runtime.wire.listener import bind, listen
from baton.trust.acceptor import Acceptor
from baton.trust.credentials import Credentials

logger = logging.getLogger("baton.link")

LOG_SECONDS: Final = 10.0
"""Least seconds between two log lines of the same kind of failure: any host that reaches the port could fill the disk."""


class LinkServer:
    """The listener for sessions. `on_link(link, peer)` is called on the loop with every new session; `peer` is its address, for
    logs."""

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        on_link: Callable[[Link, str], None],
        *,
        sessions_max: int = 1024,
        wire: WireConfig = WIRE,
    ) -> None:
        """`sock` is bound; the server owns it, and listens on it in `serve`."""
        self._sessions_max = sessions_max
        self._wire = wire
        self._sock = sock
        self._credentials = credentials
        self._on_link = on_link
        self._handshakes: Acceptor[None] | None = None
        self._sessions: dict[Link, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] | None = None
        self._repeats = Repeats(LOG_SECONDS)
        self.counts: Counter[str] = Counter()
        "Number of sessions: opened ones, and by LinkReason those that failed or ended by their peer's fault."
        self.on_refused: Callable[[str, str], None] = lambda host, reason: None
        "Called when a peer speaks no version that this build speaks."

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def handshakes(self) -> int:
        return 0 if self._handshakes is None else len(self._handshakes.open)

    async def serve(self) -> None:
        """Serve until cancelled. An error of `on_link` is raised here."""
        listen(self._sock, 128, "cluster-")
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        self._handshakes = Acceptor(self._sock, self)
        try:
            await asyncio.wait({self._handshakes.task, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            self._handshakes.task.result()
        finally:
            self._handshakes.close()
            tasks = [self._handshakes.task, *self._handshakes.open, *self._sessions.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._failed.cancel()

    def on_accept_failed(self, error: OSError) -> None:
        """Handle a failed accept: the connection closed before, or this process has no descriptors left."""
        self._note("accept", "", f"a connection cannot be accepted: {error.strerror}")

    def make_room(self, living: list[asyncio.Task[None]]) -> None:
        most = self._wire.session_handshakes_max
        if len(living) >= most:
            living[0].cancel()
            self._note("crowded", "", f"{most} connections prove nothing: the oldest is closed")

    async def serve_connection(self, sock: socket.socket, place: Any) -> None:
        peer = "a unix socket" if sock.family == socket.AF_UNIX else f"{place[0]}:{place[1]}"
        try:
            link = await welcome(sock, self._credentials, self._wire)
        except LinkFailed as failed:
            self._note(failed.reason, peer, str(failed))
            if failed.reason == "version":
                self.on_refused(peer.rpartition(":")[0] or peer, str(failed))
            return
        if len(self._sessions) >= self._sessions_max:
            self._note("crowded", peer, f"{self._sessions_max} sessions are open already")
            link.close()
            return
        self.counts["opened"] += 1
        link.on_unknown_kind(lambda kind: self._note("unknown_kind", peer, f"a message of kind {kind} is skipped"))
        self._sessions[link] = asyncio.create_task(self._watch(link, peer))
        self._on_link(link, peer)

    async def _watch(self, link: Link, peer: str) -> None:
        try:
            await link.wait_ended()
        finally:
            self._sessions.pop(link, None)
            link.close()
            if link.failure is not None:
                self._note(link.failure.reason, peer, str(link.failure))

    def on_ended(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        if task.cancelled():
            sock.close()  # perhaps before the session began
        elif (error := task.exception()) is not None and self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _note(self, reason: str, peer: str, text: str) -> None:
        self.counts[reason] += 1
        if self._repeats.due(reason, asyncio.get_running_loop().time()):
            logger.warning("%s%s (%s, %d so far)", f"{peer}: " if peer else "", printable(text), reason, self.counts[reason])


def listen_at(address: Address) -> socket.socket:
    """Bind a socket for LinkServer. A stale unix socket is replaced; only our user may connect to ours."""
    if not address.path:
        return bind(address.host, address.port, "cluster-")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(address.path)
        sock.bind(address.path)
        os.chmod(address.path, 0o600)
    except OSError as error:
        sock.close()
        raise InvalidConfig(f"cannot listen on {address} ({error.strerror}): give another path") from None
    return sock


def _remove_stale(path: str) -> None:
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except BlockingIOError:
            pass
