"""Reading another machine's pool: only who knows the secret, only bytes that arrived as they were sent; and whoever misbehaves,
on either side or on the way, costs that read and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
from messenger_peer import LAYOUT, SECRET, content, filled
from messenger_rig import BLOCKS, Rig, Served, finish, until

from baton.addresses import Address, parse_address
from baton.errors import LinkFailed, PeerUnreadable, ProtocolError
from baton.kvcache import tcp_session
from baton.kvcache.messenger import Messenger
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.tcp import Tcp
from baton.kvcache.tcp_session import TcpSession
from baton.kvpool.block_bytes import ByWayOfHost, block_bytes
from baton.kvpool.copies import CopySpan
from baton.kvpool.pool import KVPool
from baton.protocol.moves import MoveResult
from baton.protocol.pool import PoolReady, ReadBlocks, ReadPool, ReadRefused
from baton.protocol.versions import CAPABILITIES
from baton.trust.dialling import connected
from baton.trust.handshake import LINK
from baton.trust.secret import Secret
from baton.trust.session import prove_as_dialler
from baton.trust.stream import SocketStream

OTHER_SECRET = Secret(b"of another cluster, which has nothing to say here")


pytestmark = pytest.mark.usefixtures("no_descriptor_is_kept")


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one block."""
    monkeypatch.setattr(tcp_session, "PIECE_BYTES", 1)


class Wire:
    """Between reader and peer, and not to be trusted: `change(number, bytes)` is what becomes of the so-many-th bytes on their
    way to the reader. None: nothing more arrives."""

    def __init__(self, peer: Served, change: Callable[[int, bytes], bytes | None]) -> None:
        self._to = parse_address(peer.address)
        self._change = change
        self.incarnation = peer.incarnation
        self.connections = 0

    async def __aenter__(self) -> Wire:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()
        await asyncio.sleep(0.01)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        back, forth = await asyncio.open_connection(self._to.host, self._to.port)

        async def there() -> None:
            while piece := await reader.read(65536):
                forth.write(piece)

        async def here() -> None:
            at = 0
            while piece := await back.read(1000):
                changed = self._change(at, piece)
                if changed is None:
                    await asyncio.Event().wait()
                writer.write(changed)
                at += len(piece)

        ways = [asyncio.create_task(there()), asyncio.create_task(here())]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ways:
                task.cancel()
            writer.close()
            forth.close()


@contextlib.asynccontextmanager
async def session(peer: Served, secret: Secret = SECRET) -> AsyncIterator[TcpSession]:
    sock = await connected(parse_address(peer.address))
    try:
        yield await TcpSession.as_reader(sock, secret)
    finally:
        sock.close()


async def received(session: TcpSession) -> bytes:
    """A piece of one block."""
    content = bytearray(LAYOUT.block_bytes)
    with session.stream.blocking():
        digest = await asyncio.to_thread(session.read_piece, [memoryview(content)])
    session.verify([memoryview(content)], 1, digest)
    return bytes(content)


def readers(peer: Served) -> int:
    return len(peer.transport._server._readers)


# Bytes


@pytest.mark.parametrize("piece_bytes", [1, 3 * LAYOUT.block_bytes, 1 << 20])
def test_runs_of_every_length_arrive(piece_bytes: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tcp_session, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr("baton.kvcache.tcp_session.RUNS_MAX", 5)

    async def main() -> None:
        async with Rig("tcp") as rig:
            peer, chance = rig.serve(), np.random.default_rng(11)
            for turn in range(30):
                rig.device.data[:] = 0
                count = int(chance.integers(1, BLOCKS))
                begin = int(chance.integers(0, BLOCKS - count + 1))
                sources = list(range(begin, begin + count)) if turn % 2 else list(chance.permutation(BLOCKS)[:count])
                targets = list(range(count)) if turn % 3 else list(chance.permutation(BLOCKS)[:count])
                result = await rig.pull(peer, [int(block) for block in sources], [int(block) for block in targets])
                assert (result.moved, result.error) == (count, None)
                assert rig.has([int(block) for block in targets], content(1, BLOCKS)[sources])

    finish(main())


def test_of_several_ways_the_first_that_works_is_taken():
    async def main() -> None:
        async with Rig("tcp") as rig:
            peer = rig.serve()
            assert (await rig.pull(peer, [1], [1], peer=f"unix:/nowhere/peer.sock rdma:x {peer.address}")).moved == 1
            assert (await rig.pull(peer, [2], [2], peer=f"unix:/nowhere/peer.sock {peer.address} unix:/nowhere")).moved == 1
            near = Rig("unix")
            async with near:
                both = near.serve("both", 4)
                assert (await rig.pull(both, [3], [3], peer=f"{both.address} tcp://127.0.0.1:1")).moved == 1

    finish(main())


def test_what_a_messenger_says_of_itself_is_all_of_its_addresses():
    async def main() -> None:
        messenger = Messenger({"tcp": Tcp(SECRET, "tcp://10.0.0.5:1"), "other": Tcp(SECRET)}, lambda result: None)
        assert messenger.address == "tcp://10.0.0.5:1"
        messenger.close()

    finish(main())


def test_blocks_by_way_of_the_host_are_the_same_bytes():
    """The way of a GPU's pool, with one in memory."""
    source, target = filled(3, BLOCKS), KVPool.create(LAYOUT, BLOCKS)
    direct, staged = block_bytes(source, 4), ByWayOfHost(target, 4)
    again = ByWayOfHost(source, 4)
    for first, blocks in ((0, 1), (5, 4), (60, 4)):
        runs = [(first, blocks)]
        (plain,), (other,) = (way.read(runs, lambda nbytes: memoryview(bytearray(nbytes))) for way in (direct, again))
        assert plain == other
        staged.write(runs, [plain])
        plain.release()
        assert np.array_equal(target.data[first : first + blocks], source.data[first : first + blocks])
    assert int(target.data.any(axis=1).sum()) == 9
    for part in (direct, staged, again, source, target):
        part.close()


def test_the_loop_goes_on_while_bytes_pass():
    """Also where the network is faster than we are, and nothing ever waits for it."""

    async def main() -> None:
        async with Rig("tcp") as rig:
            peer, turns = rig.serve(), list[int]()
            reading = rig.tell(peer, [block % BLOCKS for block in range(20_000)], [block % BLOCKS for block in range(20_000)])
            while reading not in rig.results:
                turns.append(1)
                await asyncio.sleep(0)
            assert rig.results[reading].moved == 20_000
            assert len(turns) > 20

    finish(main())


@pytest.mark.parametrize("old", [False, True], ids=["joined", "of the build before"])
def test_scattered_blocks_come_in_pieces_of_several_runs_unless_the_peer_is_old(old: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tcp_session, "PIECE_BYTES", 4 * LAYOUT.block_bytes)
    if old:
        monkeypatch.setattr("baton.kvcache.tcp_server.CAPABILITIES", ("keyed_digest",))
    pieces, write_piece = list[int](), TcpSession.write_piece

    def written(session: TcpSession, content: list[memoryview], digest: bytes) -> None:
        pieces.append(len(content))
        write_piece(session, content, digest)

    monkeypatch.setattr(TcpSession, "write_piece", written)

    async def main() -> None:
        async with Rig("tcp") as rig:
            peer, sources = rig.serve(), [9, 3, 20, 21, 22, 23, 24, 5, 7]
            assert (await rig.pull(peer, sources, sources)).moved == 9
            assert rig.has(sources, content(1, BLOCKS)[sources])

    finish(main())
    assert pieces == ([1] * 6 if old else [2, 1, 3])


# Who may read


def test_without_the_secret_nothing_is_read():
    async def main() -> None:
        async with Rig("tcp") as rig:
            peer, results = rig.serve(), list[MoveResult]()
            stranger = Messenger({"tcp": Tcp(OTHER_SECRET)}, results.append)
            rig.messenger.detach()
            stranger.attach(rig.device)
            own, rig.messenger = rig.messenger, stranger
            rig.tell(peer, [1], [1])
            await until(lambda: bool(results))
            assert results[0].moved == 0
            assert "does it have another cluster secret" in results[0].error
            assert not rig.device.data.any()
            stranger.close()
            rig.messenger = own
            own.attach(rig.device)
            assert (await rig.pull(peer, [1], [1])).moved == 1

    finish(main())


def test_a_peer_that_does_not_know_the_secret_is_not_read_from():
    async def main() -> None:
        async with Rig("tcp") as rig:
            place = parse_address(rig.address("liar"))
            liar = Tcp(OTHER_SECRET, str(place))
            liar.listen(socket.create_server((place.host, place.port)))
            pool = filled(1, BLOCKS)
            liar.attach(pool)
            with pytest.raises(PeerUnreadable, match="secret"):
                await Tcp(SECRET).open(str(place), pool.incarnation, LAYOUT.fingerprint(), lambda: None)
            liar.close()
            pool.close()
            await asyncio.sleep(0.01)

    finish(main())


def test_a_proof_for_the_routers_port_is_none_here():
    async def main() -> None:
        async with Rig("tcp") as rig:
            sock = await connected(parse_address(rig.serve().address))
            with pytest.raises(LinkFailed, match="is it the router's cluster port"):
                await prove_as_dialler(SocketStream(sock), [SECRET], LINK)
            sock.close()

    finish(main())


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 200, b"BTRD\x01\x07" + bytes(64)])
def test_garbage_costs_its_sender_the_connection(garbage: bytes):
    async def main() -> None:
        async with Rig("tcp") as rig:
            peer = rig.serve()
            for _ in range(20):
                sock = await connected(parse_address(peer.address))
                await asyncio.get_running_loop().sock_sendall(sock, garbage)
                sock.close()
            assert (await rig.pull(peer, [1], [1])).moved == 1
            await until(lambda: not peer.transport._server._handshakes.open)
            assert readers(peer) == 1

    finish(main())


def test_those_who_say_nothing_keep_nobody_out():
    async def main() -> None:
        async with Rig("tcp", reader_handshakes_max=4) as rig:
            peer = rig.serve()
            silent = [await connected(parse_address(peer.address)) for _ in range(20)]
            assert (await rig.pull(peer, [1], [1])).moved == 1
            await until(lambda: len(peer.transport._server._handshakes.open) <= 4)
            for sock in silent:
                sock.close()

    finish(main())


def test_one_that_says_nothing_is_closed_after_a_while():
    async def main() -> None:
        async with Rig("tcp", reader_handshake_seconds=0.05) as rig:
            peer = rig.serve()
            silent = await connected(parse_address(peer.address))
            while await asyncio.get_running_loop().sock_recv(silent, 100):  # its greeting
                pass
            silent.close()
            async with session(peer) as proved:
                with pytest.raises(LinkFailed, match="hung up"):
                    await proved.receive()

    finish(main())


def test_one_reader_more_than_there_are_places_takes_that_of_the_one_idle_longest(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with Rig("tcp", readers_max=2) as rig:
            peer = rig.serve()
            readers = peer.transport._server._readers
            async with session(peer) as idle, session(peer) as used:
                for each in (idle, used):
                    await each.send(ReadPool(peer.incarnation, LAYOUT.fingerprint()))
                    assert isinstance(await each.receive(), PoolReady)
                for each in (used, idle, used):
                    await each.send(ReadBlocks(((1, 1),)))
                    await received(each)
                    await until(lambda: not any(reader.sending for reader in readers.values()))  # its thread returns later
                assert (await rig.pull(peer, [1], [1])).moved == 1
                with pytest.raises(LinkFailed, match="hung up"):
                    await idle.receive()
                await used.send(ReadBlocks(((1, 1),)))
                await received(used)
            assert peer.transport.readers["evicted"] == 1
            assert "readers_max" in caplog.text

    finish(main())


def test_a_reader_that_is_sent_blocks_keeps_its_place_and_the_new_one_learns_why(caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with Rig("tcp", readers_max=1) as rig:
            layout = replace(LAYOUT, layers=32, head_dim=128)
            peer = rig.serve(pool=filled(1, 64, layout))
            async with session(peer) as busy:
                await busy.send(ReadPool(peer.incarnation, layout.fingerprint()))
                assert isinstance(await busy.receive(), PoolReady)
                most = tcp_session.piece_blocks(layout.block_bytes)
                await busy.send(ReadBlocks(tuple((0, most) for _ in range(64))))  # and it reads nothing of it
                await until(lambda: any(reader.sending for reader in peer.transport._server._readers.values()))
                result = await rig.pull(peer, [1], [1])
                assert result.error is not None
                assert "readers_max" in result.error
                assert rig.messenger.pulls.outcomes == {"tcp/refused": 1}
            await until(lambda: readers(peer) == 0)

    finish(main())


# Readers that know the secret and ask for what is not theirs


@pytest.mark.parametrize(
    "runs",
    [((-1, 1),), ((0, 0),), ((0, BLOCKS + 1),), ((BLOCKS, 1),), ((0, 1), (2**40, 1)), ((0, -1),), ((0, 1),) * 9000],
    ids=["before", "none", "too many", "behind", "far", "negative", "runs"],
)
def test_blocks_that_are_not_there_are_not_sent(runs: tuple[tuple[int, int], ...]):
    async def main() -> None:
        async with Rig("tcp") as rig:
            peer = rig.serve()
            async with session(peer) as reader:
                await reader.send(ReadPool(peer.incarnation, LAYOUT.fingerprint()))
                ready = PoolReady(LAYOUT.fingerprint(), peer.incarnation, BLOCKS, capabilities=CAPABILITIES)
                assert await reader.receive() == ready
                await reader.send(ReadBlocks(runs))
                with pytest.raises((LinkFailed, ConnectionError)):
                    await reader.receive()
            await until(lambda: readers(peer) == 0)

    finish(main())


def test_who_asks_out_of_turn_is_closed():
    async def main() -> None:
        async with Rig("tcp") as rig:
            peer = rig.serve()
            async with session(peer) as reader:
                await reader.send(ReadBlocks(((0, 1),)))
                with pytest.raises(LinkFailed, match="hung up"):
                    await reader.receive()
            async with session(peer) as reader:
                await reader.send(ReadRefused("what only a peer says"))
                with pytest.raises(LinkFailed, match="hung up"):
                    await reader.receive()

    finish(main())


def test_a_reader_that_takes_nothing_is_closed():
    async def main() -> None:
        async with Rig("tcp", reader_send_seconds=0.1) as rig:
            layout = replace(LAYOUT, layers=32, head_dim=128)
            peer = rig.serve(pool=filled(1, 8, layout))
            async with session(peer) as reader:
                await reader.send(ReadPool(peer.incarnation, layout.fingerprint()))
                assert isinstance(await reader.receive(), PoolReady)
                await reader.send(ReadBlocks(((0, 1),) * 4000))
                await until(lambda: readers(peer) == 0)

    finish(main())


def test_a_reader_that_asks_for_nothing_is_closed(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")

    async def main() -> None:
        async with Rig("tcp", reader_idle_seconds=0.05) as rig:
            peer = rig.serve()
            assert (await rig.pull(peer, [1], [1])).moved == 1
            await until(lambda: readers(peer) == 0 and rig.open_peers == 0)
            assert "is closed: TimeoutError" in caplog.text, "an error without words has its name"
            assert (await rig.pull(peer, [2], [2])).moved == 1

    finish(main())


# What happens on the way


def test_bytes_that_were_damaged_are_not_used(short_pieces: None):
    """What was verified before counts for nothing more than it is: nothing is said to have moved."""

    async def main() -> None:
        async with Rig("tcp") as rig:
            peer = rig.serve()

            def damage(at: int, piece: bytes) -> bytes:
                hit = 5 * LAYOUT.block_bytes - at
                return piece if not 0 <= hit < len(piece) else piece[:hit] + bytes([piece[hit] ^ 16]) + piece[hit + 1 :]

            async with Wire(peer, damage) as wire:
                result = await rig.pull(wire, range(20), range(20))
                assert result.moved == 0
                assert "damaged on their way" in result.error or "changed on its way" in result.error
                await until(lambda: rig.open_peers == 0)
                touched = int(rig.device.data.any(axis=1).sum())
                assert 2 <= touched < 19, "the damaged one may be there, and the next: they do not count"
                assert rig.has(range(touched - 2), content(1, BLOCKS)[: touched - 2])
            assert (await rig.pull(peer, range(20), range(20))).moved == 20
            assert rig.has(range(20), content(1, BLOCKS)[:20])

    finish(main())


@pytest.mark.parametrize("place", [3, 20, 75, 120, 150])
def test_a_bit_that_was_changed_in_what_is_sealed_is_found(place: int):
    """In the greeting, the proof, or an answer of the peer."""

    async def main() -> None:
        async with Rig("tcp") as rig:
            peer = rig.serve()

            def change(at: int, piece: bytes) -> bytes:
                hit = place - at
                return piece if not 0 <= hit < len(piece) else piece[:hit] + bytes([piece[hit] ^ 1]) + piece[hit + 1 :]

            async with Wire(peer, change) as wire:
                result = await rig.pull(wire, [1], [1], seconds_max=3.0)
                assert result.moved == 0
                assert not rig.device.data.any()

    finish(main())


def test_a_way_that_stands_still_costs_that_read_its_deadline_and_nobody_else_anything(short_pieces: None):
    async def main() -> None:
        async with Rig("tcp") as rig:
            peer, other = rig.serve(), rig.serve("other", 2)
            async with Wire(peer, lambda at, piece: piece if at < 8 * LAYOUT.block_bytes else None) as wire:
                stuck = rig.tell(wire, range(20), range(20), seconds_max=0.5)
                behind = rig.tell(wire, [30], [30], seconds_max=0.3)
                assert (await rig.pull(other, [40], [40])).moved == 1
                await until(lambda: stuck in rig.results and behind in rig.results)
                whole = rig.results[stuck].moved
                assert rig.results[stuck].error == "it took too long"
                assert 1 <= whole < 20
                assert rig.has(range(whole), content(1, BLOCKS)[:whole])
                assert (rig.results[behind].moved, rig.results[behind].error) == (0, "it took too long")
                await until(lambda: rig.open_peers == 1)
            await until(lambda: readers(peer) == 0)

    finish(main())


def test_a_peer_that_ends_in_the_middle_of_a_read(short_pieces: None):
    async def main() -> None:
        async with Rig("tcp") as rig:
            remote = rig.start(seed=5)
            loop, seen = asyncio.get_running_loop(), threading.Event()

            def kill(at: int, piece: bytes) -> bytes:
                if at > 6 * LAYOUT.block_bytes and not seen.is_set():
                    seen.set()
                    loop.run_in_executor(None, remote.kill)
                return piece

            async with Wire(remote, kill) as wire:
                numbers = [rig.tell(wire, range(BLOCKS), range(BLOCKS), seconds_max=10.0) for _ in range(50)]
                await until(lambda: all(number in rig.results for number in numbers))
                assert any(rig.results[number].moved < BLOCKS for number in numbers)
                await until(lambda: rig.open_peers == 0)

    finish(main())


# The end of a pool, on either side


def test_a_pool_is_taken_away_while_it_is_read(short_pieces: None):
    """It is closed in the same breath: an error if anything of it were still in use."""

    async def main() -> None:
        async with Rig("tcp") as rig:
            peer, old = rig.serve(), content(1, BLOCKS)
            numbers = [rig.tell(peer, range(BLOCKS), range(BLOCKS)) for _ in range(20)]
            await until(lambda: bool(rig.results))
            peer.replace(filled(9, BLOCKS))
            await until(lambda: all(number in rig.results for number in numbers))
            assert any("lost" in (rig.results[number].error or "") for number in numbers)
            assert rig.has(range(BLOCKS), old), "of the new pool nothing was sent to who asked for the old one"
            assert (await rig.pull(peer, [2], [2])).moved == 1

    finish(main())


def test_nothing_is_written_after_detach_has_returned(short_pieces: None):
    async def main() -> None:
        async with Rig("tcp") as rig:
            peer, device, going_on = rig.serve(), rig.device, asyncio.Event()
            half = BLOCKS * LAYOUT.block_bytes // 2
            async with Wire(peer, lambda at, piece: piece if at < half or going_on.is_set() else piece[:0]) as wire:
                numbers = [rig.tell(wire, range(BLOCKS), range(BLOCKS)) for _ in range(5)]
                await until(lambda: bool(device.data.any()))
                rig.messenger.detach()
                going_on.set()
                device.data[:] = 0
                await until(lambda: all(number in rig.results for number in numbers))
                await asyncio.sleep(0.05)
                assert not device.data.any()
            assert rig.results[numbers[0]].error == "the pool was detached"
            assert all(rig.results[number].moved < BLOCKS for number in numbers)
            device.close()
            rig.device = KVPool.create(LAYOUT, BLOCKS)
            rig.messenger.attach(rig.device)
            assert (await rig.pull(peer, [1], [1])).moved == 1

    finish(main())


def test_a_pool_that_is_closed_while_it_is_read_ends_the_read_and_the_socket(short_pieces: None):
    """As when it makes room for another peer."""

    async def main() -> None:
        async with Rig("tcp") as rig:
            peer = rig.serve()
            async with Wire(peer, lambda at, piece: piece if at < 8 * LAYOUT.block_bytes else None) as wire:
                reader = Tcp(SECRET)
                reader.attach(rig.device)
                opened = await reader.open(wire.address, peer.incarnation, LAYOUT.fingerprint(), lambda: None)
                runs, deadline = [CopySpan(0, 0, 20)], Deadline.after(1000)
                reads = [asyncio.create_task(opened.read(runs, rig.device, deadline, lambda: True)) for _ in range(3)]
                await until(lambda: bool(rig.device.data.any()))
                opened.close()
                opened.close()
                ends = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), 20)
                assert all(isinstance(end, PeerUnreadable) for end in ends)
                assert opened._session.sock.fileno() == -1
                reader.close()

    finish(main())


def test_a_port_is_served_by_one_after_the_other():
    """The engine keeps the socket: who dials while no service is there is served by the next one."""

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        address = str(Address(host="127.0.0.1", port=listener.getsockname()[1]))
        async with Rig("tcp") as rig:
            pool = filled(7, BLOCKS)
            for turn in range(3):
                reader = Tcp(SECRET)
                reader.attach(rig.device)
                opening = asyncio.create_task(reader.open(address, pool.incarnation, LAYOUT.fingerprint(), lambda: None))
                await asyncio.sleep(0.02)
                assert not opening.done()
                service = Tcp(SECRET, address)
                service.attach(pool)
                service.listen(listener.dup())
                opened = await opening
                assert (await opened.read([CopySpan(turn, turn, 1)], rig.device, Deadline.after(5), lambda: True)).blocks == 1
                opened.close()
                service.close()
                reader.close()
                await asyncio.sleep(0.01)
            assert rig.has(range(3), content(7, BLOCKS)[:3])
            pool.close()
        listener.close()

    finish(main())


def test_a_message_that_promises_too_much_is_refused_at_once():
    async def main() -> None:
        async with Rig("tcp", reader_handshake_seconds=1000.0) as rig:
            peer = rig.serve()
            async with session(peer) as reader:
                huge = (2**28).to_bytes(4, "big") + bytes(tcp_session.SEAL_BYTES - 4)
                await asyncio.get_running_loop().sock_sendall(reader.sock, huge)
                with pytest.raises((ProtocolError, ConnectionError)):
                    await asyncio.wait_for(reader.receive(), 20)

    finish(main())
