"""Sessions with TLS: both sides show a certificate of the cluster's authority, or both logs have the reason."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest
from certificates import Certificates, keyring, write_secret
from link_rig import SECRET, Door, Wire, heard
from run_loop import finish
from test_link import DOWN, LARGE, UP

from baton.addresses import Address
from baton.config import WireConfig
from baton.errors import LinkFailed
from baton.protocol.control import Ping, Pong
from baton.runtime.wire.link import dial, welcome
from baton.trust import stream
from baton.trust.keyring import Keyring
from baton.trust.tls import TlsFiles

KEY = SECRET.key.decode()
GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"\x16\x03\x01\x00\x05hello", b"\x16\x03\x01\xff\xff" * 99]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def router(made: Certificates) -> TlsFiles:
    return made.files("router")


@pytest.fixture(scope="module")
def instance(made: Certificates) -> TlsFiles:
    return made.files("instance")


@pytest.fixture
def listening(tmp_path: Path, router: TlsFiles) -> Keyring:
    return keyring(tmp_path, KEY, tls=router)


def dialling(tmp_path: Path, files: TlsFiles | None) -> Keyring:
    return keyring(tmp_path, KEY, tls=files)


def test_messages_arrive_whole_and_in_order_both_ways(tmp_path: Path, listening: Keyring, instance: TlsFiles):
    async def main() -> None:
        async with Door(secret=listening) as door:
            ours = await dial(door.address, dialling(tmp_path, instance))
            await door.until(lambda: bool(door.links))
            theirs = door.links[0]
            assert theirs.names == ("instance", "instance.example")
            assert ours.names == ("router", "router.example")
            for _ in range(3):
                for message in UP:
                    ours.send(message)
                for message in DOWN:
                    theirs.send(message)
            assert [await theirs.receive() for _ in range(12)] == UP * 3
            assert [await ours.receive() for _ in range(12)] == DOWN * 3
            for number in range(100):
                ours.send(Pong(number))
            await ours.finish()
            assert await heard(theirs) == [Pong(number) for number in range(100)]

    finish(main())


def test_nothing_is_readable_on_the_way_and_a_changed_byte_ends_the_session(
    tmp_path: Path, listening: Keyring, instance: TlsFiles
):
    async def main() -> None:
        seen: list[bytes] = []
        broken: list[bool] = []

        def change(data: bytes) -> bytes:
            seen.append(data)
            return data[:-1] + bytes([data[-1] ^ 1]) if broken else data

        async with Door(secret=listening) as door, Wire(door.address, change) as wire:
            ours = await dial(wire.address, dialling(tmp_path, instance))
            await door.until(lambda: bool(door.links))
            ours.send(UP[2])
            assert await door.links[0].receive() == UP[2]
            assert "é".encode() * 20 not in b"".join(seen)
            broken.append(True)
            ours.send(Pong(78))
            with pytest.raises(LinkFailed, match="TLS with the instance failed"):
                await heard(door.links[0])
            await door.until(lambda: door.server.counts["tls"] == 1)
            ours.close()

    finish(main())


def test_a_session_ends_when_its_key_has_encrypted_as_much_as_it_may(
    tmp_path: Path, listening: Keyring, instance: TlsFiles, monkeypatch: pytest.MonkeyPatch
):
    """The instance dials again. Requests of the session are replayed, so it must last for long."""
    assert stream.KEY_BYTES_MAX == 256 << 30
    monkeypatch.setattr(stream, "KEY_BYTES_MAX", 20_000)

    async def main() -> None:
        async with Door(secret=listening) as door:
            ours = await dial(door.address, dialling(tmp_path, instance))
            await door.until(lambda: bool(door.links))
            for number in range(1000):
                ours.send(Pong(number, "x" * 100))
                await asyncio.sleep(0)
                if ours.failure is not None:
                    break
            assert ours.failure is not None
            assert ours.failure.reason == "key_used_up"
            assert 100 < number < 200
            await asyncio.wait_for(ours.wait_ended(), 20)
            again = await dial(door.address, dialling(tmp_path, instance))
            again.send(Pong(1))
            await door.until(lambda: len(door.links) == 2)
            assert await door.links[1].receive() == Pong(1)
            again.close()

    finish(main())


def test_a_backlog_is_seen_through_tls(tmp_path: Path, listening: Keyring, instance: TlsFiles):
    async def main() -> None:
        async with Door(secret=listening) as door:
            ours = await dial(door.address, dialling(tmp_path, instance), WireConfig(session_backlog_bytes_max=1 << 20))
            await door.until(lambda: bool(door.links))
            door.links[0]._frames.transport.pause_reading()
            for _ in range(40):
                ours.send(LARGE)
                await asyncio.sleep(0)
            await asyncio.wait_for(ours.wait_ended(), 20)
            assert ours.failure is not None
            assert ours.failure.reason == "unread"

    finish(main())


@pytest.mark.parametrize(
    ("shown", "ours", "theirs"),
    [
        ({"days": -3}, "refuses our certificate (--cluster-ssl-certfile): certificate expired", "certificate has expired"),
        (
            {"by": "foreign"},
            "refuses our certificate (--cluster-ssl-certfile): unknown ca",
            "its authority is not in --cluster-ssl-ca-certs",
        ),
        (
            {"trusts": "foreign"},
            "; its authority is not in --cluster-ssl-ca-certs",
            "the instance refuses our certificate (--cluster-ssl-certfile): unknown ca",
        ),
    ],
    ids=["expired", "of another authority", "trusts another authority"],
)
def test_a_certificate_that_does_not_fit_is_refused_in_the_words_of_both_logs(
    tmp_path: Path, made: Certificates, listening: Keyring, shown: dict[str, int], ours: str, theirs: str, caplog
):
    caplog.set_level(logging.WARNING)

    async def main() -> None:
        async with Door(secret=listening) as door:
            with pytest.raises(LinkFailed) as failed:
                await dial(door.address, dialling(tmp_path, made.files("odd", **shown)))
            assert failed.value.reason == "certificate"
            assert ours in str(failed.value)
            await door.until(lambda: door.server.counts["certificate"] == 1)
            assert not door.links

    finish(main())
    assert theirs in caplog.text


def test_a_router_whose_own_certificate_has_expired_is_refused_by_its_instances(
    tmp_path: Path, made: Certificates, instance: TlsFiles
):
    async def main() -> None:
        async with Door(secret=keyring(tmp_path, KEY, tls=made.files("old", days=-1))) as door:
            with pytest.raises(LinkFailed, match="the router's certificate is refused: certificate has expired"):
                await dial(door.address, dialling(tmp_path, instance))
            await door.until(lambda: door.server.counts["certificate"] == 1)

    finish(main())


def test_the_secret_is_wanted_inside_tls_too(tmp_path: Path, listening: Keyring, instance: TlsFiles):
    (tmp_path / "other").mkdir()

    async def main() -> None:
        async with Door(secret=listening) as door:
            with pytest.raises(LinkFailed, match="does it have another cluster secret"):
                await dial(door.address, keyring(tmp_path / "other", "x" * 40, tls=instance))
            await door.until(lambda: door.server.counts["secret"] == 1)

    finish(main())


def test_tls_with_a_router_that_has_none_is_refused_on_both_sides(instance: TlsFiles, tmp_path: Path, caplog):
    async def main() -> None:
        async with Door() as door:
            with pytest.raises(LinkFailed, match="the router does not speak TLS: both sides need") as failed:
                await dial(door.address, dialling(tmp_path, instance))
            assert failed.value.reason == "tls"
            await door.until(lambda: door.server.counts["tls"] == 1)

    finish(main())
    assert "the other side speaks TLS, and this one does not" in caplog.text


def test_no_tls_with_a_router_that_wants_it_is_named_by_both_deadlines(listening: Keyring):
    """Both sides wait for the other's first bytes."""
    wire = WireConfig(session_handshake_seconds=0.2)

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            with pytest.raises(LinkFailed, match="is it the cluster port, and without TLS"):
                await dial(Address(*silent.getsockname()), SECRET, wire)
            with socket.create_connection(silent.getsockname()):
                silent.accept()[0].close()
                sock, _ = silent.accept()
                with pytest.raises(LinkFailed, match="does the instance have --cluster-ssl-certfile"):
                    await welcome(sock, listening, wire)

    finish(main())


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_costs_its_sender_the_connection_and_nothing_else(
    tmp_path: Path, listening: Keyring, instance: TlsFiles, garbage: bytes
):
    async def main() -> None:
        async with Door(secret=listening) as door:
            with door.connect() as sock:
                sock.send(garbage)
                sock.shutdown(socket.SHUT_WR)
                await door.until(lambda: door.server.counts["tls"] == 1)
            ours = await dial(door.address, dialling(tmp_path, instance))
            await door.until(lambda: bool(door.links))
            ours.close()

    finish(main())


def test_a_unix_socket_needs_no_tls(tmp_path: Path, listening: Keyring):
    async def main() -> None:
        async with Door(str(tmp_path / "door"), secret=listening) as door:
            ours = await dial(door.address, SECRET)
            await door.until(lambda: bool(door.links))
            door.links[0].send(Ping(1))
            assert await ours.receive() == Ping(1)
            ours.close()

    finish(main())


def test_a_router_whose_certificate_is_revoked_gets_no_session(tmp_path: Path, listening: Keyring, instance: TlsFiles):
    credentials = dialling(tmp_path, instance)
    write_secret(tmp_path / "secret", KEY, "revoked router.example")

    async def main() -> None:
        async with Door(secret=listening) as door:
            with pytest.raises(LinkFailed, match=r"router's certificate: router[.]example is revoked") as failed:
                await dial(door.address, credentials)
            assert failed.value.reason == "revoked"

    finish(main())
