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
from baton.trust import gmac, stream
from baton.trust.credentials import Credentials
from baton.trust.secret import Secret
from baton.trust.stream import SocketStream

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


class SameForAll:
    def update(self, content: memoryview) -> None: ...

    def digest(self) -> bytes:
        return bytes(16)


def forge(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, bytes], bytes]:
    """An attacker who finds other bytes with the same checksum: here all bytes have the same. Inverts the bytes of blocks."""
    monkeypatch.setattr(digests, "xxh3_128", SameForAll)
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
            assert not transfer.into.data[7:].any(), "it ends there; the next piece may have come meanwhile"
            opened.close()

    finish(main())


def digest_of(session: KeyedDigest, first: int, *parts: bytes) -> bytes:
    running = session(first)
    for part in parts:
        running.update(memoryview(part))
    return running.digest()


@pytest.mark.parametrize("algorithm", digests.ALGORITHMS)
def test_a_keyed_digest_is_of_one_session_one_piece_and_one_block(algorithm: str):
    piece = b"x" * 100

    def session(key: bytes = b"k") -> KeyedDigest:
        return KeyedDigest(key * 32, algorithm)

    first, ours = digest_of(session(), 7, piece), session()
    assert digest_of(ours, 7, b"x", b"x" * 99) == first, "however it is cut"
    others = [digest_of(ours, 7, piece), digest_of(session(b"l"), 7, piece), digest_of(session(), 8, piece)]
    others.append(digest_of(session(), 7, piece[1:]))
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
        connection = SocketStream(Sock())  # type: ignore[arg-type]
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


OLDER = ("sha256", "blake2b")


@pytest.mark.parametrize(
    ("offered", "peer_has", "used"),
    [
        (("sha256", "blake2b"), OLDER, "sha256"),
        (("blake2b", "sha256"), OLDER, "blake2b"),
        (("aes256-gmac", "blake2b", "sha256"), OLDER, "blake2b"),
        (("of a later build", "sha256", "blake2b"), OLDER, "sha256"),
        pytest.param(
            ("aes256-gmac", "sha256", "blake2b"),
            ("aes256-gmac", *OLDER),
            "aes256-gmac",
            marks=pytest.mark.skipif(not gmac.available(), reason="no libcrypto here"),
        ),
    ],
    ids=str,
)
def test_the_peer_chooses_the_readers_best_algorithm_that_it_has(
    monkeypatch: pytest.MonkeyPatch, offered: tuple[str, ...], peer_has: tuple[str, ...], used: str
):
    monkeypatch.setattr(tcp, "ranked", lambda: offered)
    monkeypatch.setattr(digests, "ALGORITHMS", {name: digests.ALGORITHMS[name] for name in peer_has})
    algorithms: list[str] = []
    begin = KeyedDigest.__init__
    monkeypatch.setattr(KeyedDigest, "__init__", lambda own, key, name: algorithms.append(name) or begin(own, key, name))

    async def main() -> None:
        async with Transfer(digest="keyed") as transfer:
            opened = await transfer.open()
            assert await transfer.read(opened) == BLOCKS
            assert transfer.arrived()
            opened.close()

    finish(main())
    assert algorithms == [used, used]


@pytest.mark.parametrize("side", ["peer", "reader"])
def test_the_build_before_has_one_algorithm_to_choose_from(monkeypatch: pytest.MonkeyPatch, side: str):
    """The one that the reader asks for: neither side knows of the choice."""
    from msgspec.structs import replace as changed

    send = tcp_session.TcpSession.send
    names = {"peer": ("PoolReady", {"keyed": ""}), "reader": ("ReadPool", {"digests": ()})}
    kind, without = names[side]

    async def old_send(session: Any, message: Any) -> None:
        await send(session, changed(message, **without) if type(message).__name__ == kind else message)

    monkeypatch.setattr(tcp_session.TcpSession, "send", old_send)
    if side == "peer":
        monkeypatch.setattr(tcp_server, "chosen", lambda offered, otherwise: otherwise)

    async def main() -> None:
        async with Transfer(digest="keyed") as transfer:
            opened = await transfer.open()
            assert await transfer.read(opened) == BLOCKS
            assert transfer.arrived()
            opened.close()

    finish(main())


def test_an_algorithm_that_the_peer_does_not_have_ends_the_session(monkeypatch: pytest.MonkeyPatch, caplog):
    for name in ("ranked", "IN_EVERY_BUILD"):
        monkeypatch.setattr(tcp, name, (lambda: ("of a later build",)) if name == "ranked" else ("of a later build",))

    async def main() -> None:
        async with Transfer(digest="keyed") as transfer:
            with pytest.raises(PeerUnreadable):
                await transfer.open()

    finish(main())
    assert "that this build does not have: of a later build" in caplog.text


@pytest.mark.skipif(not gmac.available(), reason="no libcrypto here")
@pytest.mark.parametrize(
    ("key", "nonce", "content", "tag"),
    [
        ("00" * 32, "00" * 12, "", "530f8afbc74536b9a963b4f1c4cb738b"),
        (
            "78dc4e0aaf52d935c3c01eea57428f00ca1fd475f5da86a49c8dd73d68c8e223",
            "d79cf22d504cc793c3fb6c8a",
            "b96baa8c1c75a671bfb2d08d06be5f36",
            "3e5d486aa2e30b22e040b85723a06e76",
        ),
    ],
    ids=["McGrew and Viega 13", "NIST CAVP"],
)
def test_gmac_is_that_of_the_standard(key: str, nonce: str, content: str, tag: str):
    mac = gmac.Gmac(bytes.fromhex(key))
    for _ in range(2):  # one object makes them all
        running = mac.start(bytes.fromhex(nonce))
        for byte in bytes.fromhex(content):
            running.update(bytes([byte]))
        assert running.digest().hex() == tag


def old_receive(receive: Any) -> Any:
    from msgspec.structs import replace as changed

    from baton.protocol.pool import ReadPool

    async def old(session: Any) -> Any:
        message = await receive(session)
        return changed(message, keyed="", name="", digests=()) if isinstance(message, ReadPool) else message

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
