"""Descriptors are handed over with a message, one each, and the end of the other side is seen."""

from __future__ import annotations

import os
import socket
from threading import Timer

import pytest
from run_loop import finish

from baton.errors import PeerError, Unavailable
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PeerSocket, PoolReady
from baton.runtime.wire.descriptors import receive_descriptor, send_descriptor, take_descriptor, wait_for_descriptor

READY = PoolReady(b"f" * 32, PoolIncarnation(7), 3)


def test_a_socket_is_handed_over_and_the_end_is_seen(pair):
    link, theirs = pair
    near, far = socket.socketpair()

    async def main() -> None:
        send_descriptor(link, PeerSocket("engine"), far.fileno())
        far.close()
        link.close()
        message, fd = await receive_descriptor(theirs)
        assert message == PeerSocket("engine")
        got = socket.socket(fileno=fd)
        assert not got.get_inheritable()
        near.sendall(b"x")
        assert got.recv(1) == b"x"
        assert await receive_descriptor(theirs) is None
        got.close()
        near.close()

    finish(main())


def test_each_message_keeps_its_own_descriptor(pair):
    """Sent before anybody reads: the kernel must not join them."""
    link, theirs = pair
    pipes = [os.pipe() for _ in range(5)]
    for number, (_, write) in enumerate(pipes):
        send_descriptor(link, PeerSocket(str(number)), write)
        os.close(write)
    for number, (read, _) in enumerate(pipes):
        message, fd = take_descriptor(theirs)
        assert message == PeerSocket(str(number))
        os.write(fd, b"%d" % number)
        os.close(fd)
        assert os.read(read, 10) == b"%d" % number
        os.close(read)


def test_one_for_a_child_that_is_gone_is_nobodys(pair):
    link, theirs = pair
    near, far = socket.socketpair()
    theirs.close()
    with far:
        send_descriptor(link, PeerSocket("engine"), far.fileno())
    assert near.recv(1) == b""
    near.close()


@pytest.mark.parametrize("wrong", ["no descriptor", "garbage"])
def test_what_is_no_message_is_the_peers_error(pair, wrong):
    link, theirs = pair
    if wrong == "garbage":
        socket.send_fds(link, [b"garbage"], [0])
    else:
        link.sendall(b"x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PeerError):
        take_descriptor(theirs)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_sender_that_was_killed_with_something_unread_is_gone_too(pair):
    """The kernel says that the connection was reset, and not that it has ended."""
    link, theirs = pair
    theirs.sendall(b"never read")
    link.close()
    assert take_descriptor(theirs) is None


def test_waiting_ends_at_its_deadline_and_with_the_sender(pair):
    link, theirs = pair
    with pytest.raises(Unavailable, match=r"the KV pool did not come within 0\.01 s"):
        wait_for_descriptor(theirs, 0.01, "the KV pool")
    later = Timer(0.2, send_descriptor, (link, READY, 0))
    later.start()
    message, fd = wait_for_descriptor(theirs, 10, "the KV pool")
    later.join()
    os.close(fd)
    assert message == READY
    link.close()
    with pytest.raises(Unavailable, match="its sender is gone"):
        wait_for_descriptor(theirs, 10, "the KV pool")
