"""Both sides of the handshake against somebody who does it wrong, and what is handed over by one who does it right."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import random
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest
from messenger_peer import LAYOUT, content, filled
from messenger_rig import BLOCKS, Rig, Served, finish, until

from baton.errors import PeerUnreadable, ProtocolError
from baton.kvcache import pool_server
from baton.kvcache.shared_memory import SharedMemory
from baton.kvpool.pool import HEADER_BYTES, KVPool
from baton.protocol.codec import decode, encode
from baton.protocol.control import Ping
from baton.protocol.ids import PoolIncarnation
from baton.protocol.pool import PoolReady, ReadPool, ReadRefused
from baton.protocol.versions import VERSIONS
from baton.trust import acceptor

pytestmark = pytest.mark.usefixtures("no_descriptor_is_kept")


async def dial(peer: Served) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, peer.address.removeprefix("unix:"))
    return sock


async def hung_up(sock: socket.socket) -> bool:
    with sock:
        try:
            return await asyncio.get_running_loop().sock_recv(sock, 4096) == b""
        except ConnectionResetError:
            return True


def question(peer: Served) -> bytes:
    return encode(ReadPool(peer.incarnation, peer.pool.layout.fingerprint()))


async def handed(peer: Served) -> tuple[socket.socket, PoolReady, int]:
    """What a reader gets that asks as it should."""
    sock = await dial(peer)
    sock.send(question(peer))
    readable = asyncio.Event()
    asyncio.get_running_loop().add_reader(sock, readable.set)
    await readable.wait()
    asyncio.get_running_loop().remove_reader(sock)
    answer, (fd,), _, _ = socket.recv_fds(sock, 4096, 1)
    ready = decode(answer)
    assert isinstance(ready, PoolReady)
    return sock, ready, fd


# What is handed out


def test_nothing_can_be_written_through_what_is_handed_out():
    async def main() -> None:
        async with Rig() as rig:
            peer = rig.serve(seed=4)
            sock, ready, fd = await handed(peer)
            size = os.fstat(fd).st_size
            with pytest.raises(PermissionError):
                mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(fd, b"x", HEADER_BYTES)
            with pytest.raises(OSError, match="Invalid argument"):
                os.ftruncate(fd, 0)
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            pool = KVPool.attach(fd, ready, read_only=True)
            assert (pool.data == content(4, BLOCKS)).all()
            for array in (pool.data, pool.keys, pool.values):
                with pytest.raises(ValueError, match="read-only"):
                    array[:] = 0
            del array
            peer.pool.data[0] = 7.0
            assert (pool.data[0] == 7.0).all(), "it is the same memory"
            pool.close()
            sock.close()

    finish(main())


def test_the_end_of_the_pool_ends_the_connection():
    async def main() -> None:
        async with Rig() as rig:
            peer = rig.serve()
            sock, _, fd = await handed(peer)
            os.close(fd)
            peer.transport.detach()
            assert await hung_up(sock)
            refused = await dial(peer)
            refused.send(question(peer))
            answer = decode(await asyncio.get_running_loop().sock_recv(refused, 4096))
            assert answer == ReadRefused("there is no KV pool")
            assert await hung_up(refused)

    finish(main())


# Readers that do it wrong

WRONG: dict[str, Callable[[Served], bytes]] = {
    "bytes": lambda peer: random.Random(1).randbytes(100),
    "one byte": lambda peer: b"B",
    "another message": lambda peer: encode(Ping(1)),
    "an announcement": lambda peer: encode(peer.pool.announcement()),
    "half a question": lambda peer: question(peer)[:-5],
    "a question and more": lambda peer: question(peer) + b"more",
    "another version": lambda peer: question(peer).replace(b"BT%c" % VERSIONS.newest, b"BT%c" % (VERSIONS.newest + 1), 1),
    "too much": lambda peer: question(peer) + bytes(20_000),
    "wrong types": lambda peer: question(peer)[:4] + b"\x00\x00\x00\x03\x92\xa1x",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_garbage_costs_its_sender_the_connection_and_nobody_anything(wrong: str):
    async def main() -> None:
        async with Rig() as rig:
            peer = rig.serve()
            assert (await rig.pull(peer, [1], [1])).moved == 1
            sock = await dial(peer)
            sock.send(WRONG[wrong](peer))
            assert await hung_up(sock)
            assert rig.open_peers == 1, "the one that was open stays open"
            assert (await rig.pull(peer, [2], [2])).moved == 1

    finish(main())


def test_a_reader_that_goes_on_talking_is_closed():
    async def main() -> None:
        async with Rig() as rig:
            peer = rig.serve()
            sock, _, fd = await handed(peer)
            os.close(fd)
            sock.send(question(peer))
            assert await hung_up(sock)
            assert (await rig.pull(peer, [2], [2])).moved == 1

    finish(main())


def test_one_that_says_nothing_is_closed_after_a_while():
    async def main() -> None:
        async with Rig(reader_handshake_seconds=0.1) as rig:
            assert await hung_up(await dial(rig.serve()))

    finish(main())


def test_connections_are_bounded_and_one_that_says_nothing_makes_room(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with Rig(readers_max=3, reader_handshake_seconds=30.0) as rig:
            peer = rig.serve()
            silent = [await dial(peer) for _ in range(3)]
            assert (await rig.pull(peer, [1], [1])).moved == 1
            assert await hung_up(silent[0]), "the oldest has lost its place"
            silent += [await dial(peer) for _ in range(5)]
            for sock in silent[1:6]:
                assert await hung_up(sock)
            assert (await rig.pull(peer, [2], [2])).moved == 1, "one that reads keeps its place while others say nothing"
            assert peer.transport.readers == {"opened": 1, "evicted": 6}
            assert "readers_max" in caplog.text
            for sock in silent:
                sock.close()

    finish(main())


def test_the_reader_that_came_first_makes_room_and_comes_back(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with Rig(readers_max=1) as rig:
            peer = rig.serve()
            assert (await rig.pull(peer, [1], [1])).moved == 1
            other = await dial(peer)
            other.send(question(peer))
            await until(lambda: rig.open_peers == 0)
            assert (await rig.pull(peer, [2], [2])).moved == 1
            assert await asyncio.get_running_loop().sock_recv(other, 4096), "its answer"
            assert await hung_up(other)

    finish(main())


def test_a_thousand_bad_connections_leave_nothing_behind():
    async def main() -> None:
        async with Rig() as rig:
            peer = rig.serve()
            before = len(os.listdir("/proc/self/fd"))
            chance = random.Random(2)
            for _ in range(1000):
                sock = await dial(peer)
                if chance.random() < 0.7:
                    sock.send(chance.randbytes(chance.randrange(1, 200)))
                sock.close()
                await asyncio.sleep(0)
            server = peer.transport._server
            assert server is not None
            await until(lambda: not server._readers.open)
            await until(lambda: len(os.listdir("/proc/self/fd")) == before)
            assert (await rig.pull(peer, [1], [1])).moved == 1

    finish(main())


def test_another_users_process_gets_nothing(monkeypatch: pytest.MonkeyPatch):
    """As far as it can be tried: the kernel's word is replaced, on either side."""
    monkeypatch.setattr(pool_server, "user_of", lambda sock: os.getuid() + 1)

    async def main() -> None:
        async with Rig() as rig:
            peer = rig.serve()
            sock = await dial(peer)
            sock.send(question(peer))
            assert await hung_up(sock)
            monkeypatch.setattr("baton.kvcache.shared_memory.user_of", lambda sock: os.getuid() + 1)
            assert (await rig.pull(peer, [1], [1])).error == "the KV pool is another user's"

    finish(main())


def test_without_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(acceptor, "PAUSE_SECONDS", 0.01)

    async def main() -> None:
        async with Rig() as rig:
            loop, failures = asyncio.get_running_loop(), iter(range(3))
            real = loop.sock_accept

            async def accept(sock: socket.socket) -> object:
                if next(failures, None) is not None:
                    raise OSError(24, "Too many open files")
                return await real(sock)

            monkeypatch.setattr(loop, "sock_accept", accept)
            assert (await rig.pull(rig.serve(), [1], [1])).moved == 1
            assert next(failures, None) is None

    finish(main())


# Servers that do it wrong


ASKED = PoolIncarnation(77)


def announced(layout=LAYOUT, incarnation=ASKED, blocks: int = BLOCKS) -> bytes:
    return encode(PoolReady(layout.fingerprint(), incarnation, blocks))


def pool_fd(layout=LAYOUT) -> int:
    pool = filled(1, BLOCKS, layout)
    fd = os.dup(pool.fd)
    pool.close()
    return fd


ANSWERS: dict[str, tuple[bytes, Callable[[], int] | None, str]] = {
    "garbage": (b"\x00garbage", lambda: pool_fd(), "does not begin with our magic"),
    "nothing": (b"", None, "hung up"),
    "another message": (encode(Ping(1)), lambda: pool_fd(), "answered with a Ping and 1 descriptors"),
    "no descriptor": (announced(), None, "answered with a PoolReady and 0 descriptors"),
    "another pool": (announced(incarnation=PoolIncarnation(78)), lambda: pool_fd(), "than the one that was asked for"),
    "another layout": (announced(replace(LAYOUT, layers=3)), lambda: pool_fd(), "than the one that was asked for"),
    "another pool behind it": (announced(), lambda: pool_fd(), "another KV pool than the one that was announced"),
    "another layout behind it": (announced(), lambda: pool_fd(replace(LAYOUT, layers=3)), "has another layout"),
    "no pool behind it": (announced(), lambda: os.open("/dev/null", os.O_RDONLY), "does not lead to a KV pool"),
    "a socket behind it": (announced(), lambda: socket.socket().detach(), "cannot be opened"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_a_server_answers_is_verified(case: str, tmp_path):
    """A stranger at that address, or a peer that is out of its mind: an error of that pull, and no descriptor is kept."""
    content, make, words = ANSWERS[case]

    async def main() -> None:
        loop, path = asyncio.get_running_loop(), str(tmp_path / "s")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.setblocking(False)
            listener.bind(path)
            listener.listen()

            async def answer() -> None:
                sock, _ = await loop.sock_accept(listener)
                with sock:
                    await loop.sock_recv(sock, 4096)
                    if make is not None:
                        fd = make()
                        socket.send_fds(sock, [content], [fd])
                        os.close(fd)
                    elif content:
                        sock.send(content)

            answering = asyncio.create_task(answer())
            with pytest.raises(PeerUnreadable, match=words):
                await SharedMemory().open(f"unix:{path}", ASKED, LAYOUT.fingerprint(), lambda: None)
            await answering

    finish(main())


def test_a_pool_that_can_be_cut_short_is_not_mapped():
    """Reading beyond the end of a mapped file is a signal that ends the process."""
    sealed = filled(1, BLOCKS)
    fd = os.memfd_create("no-seals", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.sendfile(fd, sealed.fd, 0, os.fstat(sealed.fd).st_size)
    with pytest.raises(ProtocolError, match="not sealed"):
        KVPool.attach(fd, sealed.announcement(), read_only=True)
    os.close(fd)
    sealed.close()
