"""Two builds agree on a message version, or both say which versions they speak."""

from __future__ import annotations

import asyncio
import socket

import pytest
from link_rig import SECRET, Door
from run_loop import finish

from baton.errors import LinkFailed
from baton.kvcache.tcp_session import TcpSession
from baton.protocol.codec import FROM_READER, encode
from baton.protocol.control import Ping, Pong
from baton.protocol.pool import ReadPool
from baton.protocol.versions import VERSIONS, Versions
from baton.runtime.wire.link import dial
from baton.trust import handshake
from baton.trust.handshake import GREETING_BYTES, LINK, PROOF_BYTES, READ, Purpose
from baton.trust.seal import Sealer, Unsealer
from baton.trust.session import prove_as_dialler, prove_as_listener
from baton.trust.stream import SocketStream

OLDEST, NEWEST = VERSIONS
UNKNOWN = b"BT" + bytes([NEWEST, 0xFA]) + (3).to_bytes(4, "big") + b"\x92\x01\xa0"
"""A frame of a kind that no build has yet."""


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (Versions(8, 8), Versions(8, 8), 8),
        (Versions(8, 9), Versions(8, 8), 8),
        (Versions(8, 9), Versions(9, 12), 9),
        (Versions(3, 9), Versions(5, 7), 7),
        (Versions(8, 8), Versions(9, 9), None),
        (Versions(10, 11), Versions(8, 9), None),
    ],
)
def test_the_newest_version_that_both_speak(one: Versions, other: Versions, common: int | None):
    assert one.common(other) == common
    assert other.common(one) == common


async def both(purpose: Purpose, listener: Versions, dialler: Versions) -> list[object]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
    try:
        async with asyncio.timeout(10):
            return await asyncio.gather(
                prove_as_listener(SocketStream(ours), [SECRET], purpose, listener),
                prove_as_dialler(SocketStream(theirs), [SECRET], purpose, dialler),
                return_exceptions=True,
            )
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("purpose", [LINK, READ], ids=["router and instance", "transfer"])
def test_both_sides_agree_where_their_ranges_overlap(purpose: Purpose):
    listener, dialler = finish(both(purpose, Versions(OLDEST, NEWEST + 1), VERSIONS))
    assert listener == dialler
    assert listener.version == NEWEST


@pytest.mark.parametrize("purpose", [LINK, READ], ids=["router and instance", "transfer"])
@pytest.mark.parametrize("newer", ["listener", "dialler"])
def test_both_sides_refuse_in_words_where_their_ranges_do_not_overlap(purpose: Purpose, newer: str):
    other = Versions(NEWEST + 1, NEWEST + 2)
    given = (other, VERSIONS) if newer == "listener" else (VERSIONS, other)
    for failed in finish(both(purpose, *given)):
        assert isinstance(failed, LinkFailed), failed
        assert failed.reason == "version"
        assert f"{purpose.listener} speaks version {given[0]} and the {purpose.dialler} {given[1]}" in str(failed)


def test_a_peer_of_another_session_format_is_refused_in_words():
    """The greeting of format 1 is as long, so neither side waits for bytes that never come."""
    older = handshake._GREETING.pack(b"BTLK", 1, 7, 0, bytes(31))
    assert len(older) == GREETING_BYTES

    async def main() -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        ours.send(older)
        with pytest.raises(LinkFailed, match=rf"one side speaks version 1\.7, the other 2\.{VERSIONS}") as failed:
            await prove_as_dialler(SocketStream(theirs), [SECRET], LINK)
        assert failed.value.reason == "version"
        assert len(ours.recv(1000)) == GREETING_BYTES + PROOF_BYTES, "the listener hears which version we speak"
        ours.close()
        theirs.close()

    finish(main())


def test_a_newer_instance_writes_the_version_that_the_router_reads():
    async def main() -> None:
        async with Door() as door:
            newer = await dial(door.address, SECRET, versions=Versions(OLDEST, NEWEST + 1))
            await door.until(lambda: bool(door.links))
            assert newer.version == NEWEST
            newer.send(Pong(1))
            assert await door.links[0].receive() == Pong(1)
            door.links[0].send(Ping(2))
            assert await newer.receive() == Ping(2)
            newer.close()

    finish(main())


def test_the_router_counts_messages_of_kinds_that_it_does_not_know():
    async def main() -> None:
        async with Door() as door:
            instance, router = await door.session()
            instance._frames.write(UNKNOWN)
            instance.send(Pong(1))
            assert await router.receive() == Pong(1)
            assert door.server.counts == {"opened": 1, "unknown_kind": 1}
            instance.close()

    finish(main())


def test_a_reader_skips_answers_of_kinds_that_it_does_not_know():
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for sock in (ours, theirs):
            sock.setblocking(False)
        (from_peer, from_reader), version = (await both_kept(ours, theirs))[0]
        session = TcpSession(SocketStream(ours), Sealer(from_peer), Unsealer(from_reader, FROM_READER), version)
        sealer = Sealer(from_reader)
        theirs.send(sealer.seal([UNKNOWN]))
        theirs.send(sealer.seal([encode(ReadPool(1, b"f"))]))
        async with asyncio.timeout(10):
            assert await session.receive() == ReadPool(1, b"f")
        ours.close()
        theirs.close()

    finish(main())


async def both_kept(ours: socket.socket, theirs: socket.socket) -> list[handshake.Agreement]:
    return await asyncio.gather(
        prove_as_listener(SocketStream(ours), [SECRET], READ), prove_as_dialler(SocketStream(theirs), [SECRET], READ)
    )
