"""Blocks between machines with TLS, with keyed digests, and with revoked instances."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from certificates import Certificates, keyring, write_secret
from messenger_peer import LAYOUT, content, filled
from messenger_rig import BLOCKS, finish, until
from test_tcp import Wire

from baton.addresses import Address
from baton.errors import PeerUnreadable
from baton.kvcache import digests, tcp, tcp_server, tcp_session
from baton.kvcache.digests import KeyedDigest, wants_keyed
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.tcp import Tcp
from baton.kvpool.copies import CopySpan
from baton.kvpool.pool import KVPool
from baton.testing import TransportConformance
from baton.trust import stream
from baton.trust.credentials import Credentials
from baton.trust.secret import Secret
from baton.trust.stream import Stream

SECRET = Secret(b"of the transfers of these tests, all of them")
KEY = SECRET.key.decode()

pytestmark = pytest.mark.usefixtures("no_descriptor_is_kept")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one block: a read has many."""
    monkeypatch.setattr(tcp_session, "PIECE_BYTES", 1)


@dataclass
class Transfer:
    """`async with`: a pool that is served at a port, and a reader with a pool of its own."""

    peer: Credentials = SECRET
    reader: Credentials = SECRET
    digest: Any = "auto"

    async def __aenter__(self) -> Transfer:
        listener = socket.create_server(("127.0.0.1", 0))
        self.address = str(Address(*listener.getsockname()))
        self.pool, self.into = filled(1, BLOCKS), KVPool.create(LAYOUT, BLOCKS)
        self.incarnation = self.pool.incarnation
        self.server = Tcp(self.peer, self.address, name="p0")
        self.server.listen(listener)
        self.server.attach(self.pool)
        self.tcp = Tcp(self.reader, name="d0", digest=self.digest)
        self.tcp.attach(self.into)
        return self

    async def __aexit__(self, *_: object) -> None:
        for transport, pool in ((self.tcp, self.into), (self.server, self.pool)):
            transport.close()
            pool.close()
        await asyncio.sleep(0.01)

    async def open(self, address: str = "") -> Any:
        return await self.tcp.open(address or self.address, self.incarnation, LAYOUT.fingerprint(), lambda: None)

    async def read(self, opened: Any, may_go_on: Callable[[], bool] = lambda: True) -> int:
        read = await opened.read([CopySpan(0, 0, BLOCKS)], self.into, Deadline.after(20), may_go_on)
        return int(read.blocks)

    def arrived(self) -> bool:
        return bool((self.into.data == content(1, BLOCKS)).all())


# TLS


def test_blocks_arrive_over_tls_and_are_not_readable_on_the_way(tmp_path: Path, made: Certificates):
    ours = keyring(tmp_path, KEY, tls=made.files("p0"))
    seen: list[bytes] = []

    async def main() -> None:
        async with Transfer(ours, ours) as transfer, Wire(transfer, lambda at, piece: seen.append(piece) or piece) as wire:
            opened = await transfer.open(wire.address)
            for _ in range(2):
                assert await transfer.read(opened) == BLOCKS
                assert transfer.arrived()
                transfer.into.data[:] = 0
            opened.close()

    finish(main())
    sent = b"".join(seen)
    assert len(sent) > 2 * BLOCKS * LAYOUT.block_bytes
    assert content(1, BLOCKS)[3].tobytes()[:64] not in sent


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        ({"days": -3}, "the peer refuses our certificate (--cluster-ssl-certfile): certificate expired"),
        ({"by": "foreign"}, "the peer refuses our certificate (--cluster-ssl-certfile): unknown ca"),
        ({"trusts": "foreign"}, "its authority is not in --cluster-ssl-ca-certs"),
        (None, ""),
    ],
    ids=["expired", "of another authority", "trusts another authority", "none"],
)
def test_without_a_certificate_of_the_cluster_nothing_is_read(
    tmp_path: Path, made: Certificates, shown: dict[str, Any] | None, words: str, caplog
):
    peer = keyring(tmp_path, KEY, tls=made.files("p0"))
    reader: Credentials = SECRET if shown is None else keyring(tmp_path, KEY, tls=made.files("odd", **shown))

    async def main() -> None:
        async with Transfer(peer, reader) as transfer:
            with pytest.raises((PeerUnreadable, TimeoutError)) as failed:
                await asyncio.wait_for(transfer.open(), 0.5 if shown is None else 20)  # without TLS both sides wait
            assert words in str(failed.value)
            await until(lambda: transfer.server.readers["failed"] == 1)
            assert not transfer.into.data.any()

    finish(main())
    assert "a reader of the KV pool is closed: " in caplog.text


def test_a_key_is_not_used_for_ever_and_the_next_read_has_another(tmp_path: Path, made: Certificates, monkeypatch):
    monkeypatch.setattr(stream, "KEY_BYTES_MAX", 3 * BLOCKS * LAYOUT.block_bytes // 2)
    ours = keyring(tmp_path, KEY, tls=made.files("p0"))

    async def main() -> None:
        async with Transfer(ours, ours) as transfer:
            lost: list[int] = []
            opened = await transfer.tcp.open(
                transfer.address, transfer.incarnation, LAYOUT.fingerprint(), lambda: lost.append(1)
            )
            assert [await transfer.read(opened) for _ in range(2)] == [BLOCKS] * 2
            await until(lambda: lost == [1])
            opened.close()
            opened = await transfer.open()
            assert await transfer.read(opened) == BLOCKS
            opened.close()

    finish(main())


@pytest.mark.usefixtures("made")
class TestTcpWithTls(TransportConformance):
    @pytest.fixture(autouse=True)
    def certificates(self, tmp_path: Path, made: Certificates) -> None:
        self.credentials = keyring(tmp_path, KEY, tls=made.files("any"))

    def serving(self, folder):
        listener = socket.create_server(("127.0.0.1", 0))
        server = Tcp(self.credentials, str(Address(*listener.getsockname())))
        server.listen(listener)
        return server

    def reading(self):
        return Tcp(self.credentials)


class TestTcpWithKeyedDigests(TransportConformance):
    def serving(self, folder):
        listener = socket.create_server(("127.0.0.1", 0))
        server = Tcp(SECRET, str(Address(*listener.getsockname())))
        server.listen(listener)
        return server

    def reading(self):
        return Tcp(SECRET, digest="keyed")


# Digests


def forge(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bytes], bytes]:
    """An attacker who finds other bytes with the same checksum: here all bytes have the same. Inverts the bytes of blocks."""
    monkeypatch.setattr(digests, "xxh3_128_digest", lambda content: bytes(16))
    block = content(1, BLOCKS)[5].tobytes()
    return lambda at, piece: piece.replace(block[:32], bytes(32))


def test_a_checksum_does_not_withstand_an_attacker_on_the_way(monkeypatch: pytest.MonkeyPatch):
    """Why there are keyed digests."""
    change = forge(monkeypatch)

    async def main() -> None:
        async with Transfer(digest="checksum") as transfer, Wire(transfer, change) as wire:
            opened = await transfer.open(wire.address)
            assert await transfer.read(opened) == BLOCKS
            assert not transfer.arrived()
            opened.close()

    finish(main())


def test_a_keyed_digest_does(monkeypatch: pytest.MonkeyPatch):
    change = forge(monkeypatch)

    async def main() -> None:
        async with Transfer(digest="keyed") as transfer, Wire(transfer, change) as wire:
            opened = await transfer.open(wire.address)
            with pytest.raises(PeerUnreadable, match="blocks were damaged on their way"):
                await transfer.read(opened)
            assert not transfer.into.data[5].any()
            opened.close()

    finish(main())


@pytest.mark.parametrize("algorithm", digests.ALGORITHMS)
def test_a_keyed_digest_is_of_one_session_one_piece_and_one_block(algorithm: str):
    piece = memoryview(b"x" * 100)
    first = KeyedDigest(b"k" * 32, algorithm)(piece, 7)
    session = KeyedDigest(b"k" * 32, algorithm)
    assert session(piece, 7) == first
    others = [session(piece, 7), KeyedDigest(b"l" * 32, algorithm)(piece, 7), KeyedDigest(b"k" * 32, algorithm)(piece, 8)]
    others.append(KeyedDigest(b"k" * 32, algorithm)(memoryview(b"x" * 99), 7))
    assert len({first, *others}) == 5


@pytest.mark.parametrize(
    ("choice", "far", "tls", "keyed"),
    [
        ("auto", True, False, True),
        ("auto", False, False, False),
        ("auto", True, True, False),
        ("checksum", True, False, False),
        ("keyed", False, False, True),
        ("keyed", True, True, False),
    ],
)
def test_which_digest_a_reader_asks_for(choice: Any, far: bool, tls: bool, keyed: bool):
    class Sock:
        def getpeername(self) -> tuple[str, int]:
            return ("fe80::1%eth0" if far else "127.0.0.1", 1)

    async def main() -> None:
        connection = Stream(Sock())  # type: ignore[arg-type]
        connection.tls = object() if tls else None  # type: ignore[assignment]
        assert wants_keyed(choice, connection) is keyed

    finish(main())


def test_a_peer_of_the_build_before_is_read_with_checksums_unless_keyed_ones_are_required(monkeypatch: pytest.MonkeyPatch):
    """It ignores what it does not know in our ReadPool, and has no capabilities."""
    monkeypatch.setattr(tcp, "wants_keyed", lambda choice, stream: choice != "checksum")
    monkeypatch.setattr(tcp_server, "CAPABILITIES", ())
    monkeypatch.setattr(tcp_server.TcpSession, "receive", old_receive(tcp_server.TcpSession.receive))

    async def main() -> None:
        async with Transfer() as transfer:
            opened = await transfer.open()
            assert await transfer.read(opened) == BLOCKS
            assert transfer.arrived()
            opened.close()
        async with Transfer(digest="keyed") as transfer:
            with pytest.raises(PeerUnreadable, match="too old for keyed digests"):
                await transfer.open()

    finish(main())


@pytest.mark.parametrize("algorithm", ["sha256", "blake2b", "of a later build"])
def test_the_reader_chooses_the_algorithm_and_an_unknown_one_ends_its_session(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, caplog
):
    monkeypatch.setattr(tcp, "fastest", lambda: algorithm)

    async def main() -> None:
        async with Transfer(digest="keyed") as transfer:
            if algorithm in digests.ALGORITHMS:
                opened = await transfer.open()
                assert await transfer.read(opened) == BLOCKS
                assert transfer.arrived()
                opened.close()
            else:
                with pytest.raises(PeerUnreadable):
                    await transfer.open()

    finish(main())
    assert ("that this build does not have: of a later build" in caplog.text) == (algorithm not in digests.ALGORITHMS)


def old_receive(receive: Any) -> Any:
    from msgspec.structs import replace as changed

    from baton.protocol.pool import ReadPool

    async def old(session: Any) -> Any:
        message = await receive(session)
        return changed(message, keyed="", name="") if isinstance(message, ReadPool) else message

    return old


# Revoked instances


@pytest.mark.parametrize("who", ["reader", "peer"])
def test_a_revoked_instance_is_neither_served_nor_read_and_both_logs_say_so(tmp_path: Path, who: str, caplog):
    """Whichever side has the list: the other one's copy may be old, or not its own."""
    name = {"reader": "d0", "peer": "p0"}[who]
    listed = keyring(tmp_path, KEY)

    async def main() -> None:
        peer, reader = (listed, SECRET) if who == "reader" else (SECRET, listed)
        async with Transfer(peer, reader) as transfer:
            opened = await transfer.open()
            assert await transfer.read(opened) == BLOCKS
            pieces = 0

            def revoke() -> bool:
                nonlocal pieces
                if (pieces := pieces + 1) == 3:
                    write_secret(tmp_path / "secret", KEY, f"revoked {name}")
                return True

            with contextlib.suppress(PeerUnreadable):  # what was on its way already may arrive
                await transfer.read(opened, revoke)
                with pytest.raises(PeerUnreadable, match=f"{name} is revoked"):
                    await transfer.read(opened)
            with pytest.raises(PeerUnreadable, match=f"{name} is revoked"):
                opened = await transfer.open()
            write_secret(tmp_path / "secret", KEY)
            opened = await transfer.open()
            assert await transfer.read(opened) == BLOCKS
            opened.close()

    finish(main())
    if who == "reader":
        assert f"a reader of the KV pool is closed: {name} is revoked" in caplog.text


def test_a_revoked_certificate_reads_nothing_under_any_name(tmp_path: Path, made: Certificates):
    credentials = keyring(tmp_path, KEY, tls=made.files("machine-7"))
    write_secret(tmp_path / "secret", KEY, "revoked machine-7.example")

    async def main() -> None:
        async with Transfer(credentials, credentials) as transfer:
            with pytest.raises(PeerUnreadable, match=r"machine-7[.]example is revoked"):
                await transfer.open()

    finish(main())
