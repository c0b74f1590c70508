"""Descriptors between parent and child, over a dedicated socketpair (SCM_RIGHTS): passed, never looked up.

Every message carries exactly one descriptor, so the kernel never joins two of them in one read. The sender keeps its own copy
of a sent descriptor; the receiver owns the received one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from typing import Final

from baton.errors import PeerError, ProtocolError, Unavailable
from baton.protocol.codec import Message, decode, encode

MESSAGE_BYTES_MAX: Final = 4096


def send_descriptor(link: socket.socket, message: Message, fd: int) -> None:
    """Send a message with a descriptor. Never waits. A closed peer is ignored: its end is handled elsewhere."""
    with contextlib.suppress(OSError):
        socket.send_fds(link, [encode(message)], [fd])


def take_descriptor(link: socket.socket) -> tuple[Message, int] | None:
    """Read one (message, fd) that is ready. None: the other side has closed."""
    try:
        content, fds, _, _ = socket.recv_fds(link, MESSAGE_BYTES_MAX, 1)
    except ConnectionError:
        return None
    if not content:
        return None
    if len(fds) != 1:
        raise PeerError(f"{len(fds)} descriptors came where one was expected")
    os.set_inheritable(fds[0], False)
    try:
        return decode(content), fds[0]
    except ProtocolError as error:
        os.close(fds[0])
        raise PeerError(str(error)) from None


async def receive_descriptor(link: socket.socket) -> tuple[Message, int] | None:
    """Return the next (message, fd), or None at end of file. No timeout."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(link, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(link)
    return take_descriptor(link)


def wait_for_descriptor(link: socket.socket, seconds: float, what: str) -> tuple[Message, int]:
    """Wait for a message with a descriptor, and block meanwhile. Raises Unavailable if none arrives in time, or the sender has
    closed."""
    poller = select.poll()  # select() itself knows only descriptors below 1024
    poller.register(link, select.POLLIN)
    if not poller.poll(seconds * 1000):
        raise Unavailable(f"{what} did not come within {seconds:g} s")
    received = take_descriptor(link)
    if received is None:
        raise Unavailable(f"{what} did not come: its sender is gone")
    return received
