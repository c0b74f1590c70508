"""Sessions between router and instance: both sides prove themselves, and nothing that was changed on the way is read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import pytest
from link_rig import OTHER_SECRET, SECRET, Door, Wire, heard, read_all
from run_loop import finish

from baton.addresses import Address
from baton.config import WireConfig
from baton.errors import InvalidConfig, LinkFailed
from baton.protocol.codec import HEADER_BYTES, encode
from baton.protocol.control import AbortRequest, Ping, Pong, RefusedRequest, StartFailed
from baton.protocol.ids import RequestId
from baton.protocol.instance import Heartbeat, RouterHeartbeat
from baton.protocol.output import Emit
from baton.protocol.request import GenerateRequest, Refused
from baton.runtime.wire import link as module
from baton.runtime.wire import link_server
from baton.runtime.wire.channel import Channel
from baton.runtime.wire.link import dial, welcome
from baton.trust.handshake import GREETING_BYTES, PROOF_BYTES, Handshake, make_greeting
from baton.trust.seal import CONTENT_BYTES_MAX, SEAL_BYTES, Sealer

LARGE = GenerateRequest(id=RequestId("large"), prompt=tuple(range(300_000)))
UP = [
    Heartbeat(),
    Emit([(RequestId("a"), 1, 0, 0, [5])], []),
    RefusedRequest(RequestId("é" * 1000), Refused("no_room")),
    Pong(2**40),
]
DOWN = [Ping(1), AbortRequest(RequestId("a"), 1), LARGE, RouterHeartbeat()]


@pytest.mark.parametrize("unix", [False, True])
def test_messages_arrive_whole_and_in_order_both_ways(tmp_path: Path, unix: bool):
    async def main() -> None:
        async with Door(str(tmp_path / "door") if unix else "") as door:
            instance, router = await door.session()
            assert isinstance(instance, Channel)
            for _ in range(3):
                for message in UP:
                    instance.send(message)
                for message in DOWN:
                    router.send(message)
            assert [await router.receive() for _ in range(12)] == UP * 3
            assert [await instance.receive() for _ in range(12)] == DOWN * 3
            got: list[object] = []
            listening = asyncio.create_task(router.listen(got.append))
            instance.send(Heartbeat("ill"))
            await door.until(lambda: got == [Heartbeat("ill")])
            instance.close()  # what was sent before is not lost
            await listening
            assert door.server.counts == {"opened": 1}
            await door.until(lambda: door.server.sessions == 0)

    finish(main())


def test_what_is_sent_before_close_arrives():
    async def main() -> None:
        async with Door() as door:
            instance, router = await door.session()
            for number in range(100):
                instance.send(Pong(number))
            await instance.finish()
            assert await heard(router) == [Pong(number) for number in range(100)]

    finish(main())


def test_messages_of_one_turn_share_a_frame():
    """A MAC is paid once for them."""
    sizes: list[int] = []

    def note(data: bytes) -> bytes:
        sizes.append(len(data))
        return data

    async def main() -> None:
        async with Door() as door, Wire(door.address, note) as wire:
            instance = await dial(wire.address, SECRET)
            for _ in range(50):
                instance.send(Pong(1))
            assert instance.backlog == 50 * len(encode(Pong(1)))
            await door.until(lambda: bool(door.links))
            for _ in range(50):
                assert await door.links[0].receive() == Pong(1)
            assert sum(sizes) == SEAL_BYTES + 50 * len(encode(Pong(1)))
            instance.close()

    finish(main())


# The handshake


def test_another_secret_is_refused_by_either_side():
    async def main() -> None:
        async with Door() as door:
            with pytest.raises(LinkFailed, match="another cluster secret") as failed:
                await dial(door.address, OTHER_SECRET)
            assert failed.value.reason == "closed"
            await door.until(lambda: door.server.counts["secret"] == 1)
            assert not door.links

    finish(main())


def test_an_instance_does_not_trust_a_router_that_only_says_yes(pair):
    """It takes whatever the instance proves, and proves nothing itself."""

    async def main() -> None:
        dialling = asyncio.create_task(_dial_over(pair[0]))
        pair[1].setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(pair[1], make_greeting())
        answer = await loop.sock_recv(pair[1], 1000)
        # its own proof, sent back: the roles in it are not the same
        await loop.sock_sendall(pair[1], answer[GREETING_BYTES:])
        with pytest.raises(LinkFailed, match="does not know our cluster secret") as failed:
            await dialling
        assert failed.value.reason == "secret"

    finish(main())


async def _dial_over(sock: socket.socket) -> object:
    return await module._open(sock, SECRET, "instance")


def test_a_proof_of_an_earlier_handshake_proves_nothing():
    async def main() -> None:
        async with Door() as door:
            answers = []
            for _ in range(2):
                sock = door.connect()
                greeting = await asyncio.get_running_loop().sock_recv(sock, GREETING_BYTES)
                reply = make_greeting()
                answers.append((sock, reply + Handshake(SECRET, greeting, reply).proof("instance")))
            (first, _), (second, for_second) = answers
            for sock in (first, second):
                await asyncio.get_running_loop().sock_sendall(sock, for_second)
            assert await read_all(first) == b""
            assert len(await asyncio.get_running_loop().sock_recv(second, 1000)) == PROOF_BYTES
            await door.until(lambda: door.server.counts == {"secret": 1, "opened": 1})
            first.close()
            second.close()

    finish(main())


def test_the_routers_proof_is_not_the_instances():
    greeting, reply = make_greeting(), make_greeting()
    handshake = Handshake(SECRET, greeting, reply)
    secrets = [handshake.proof("router"), handshake.proof("instance"), *handshake.keys()]
    assert len(set(secrets)) == 4
    with pytest.raises(LinkFailed, match="instance does not know"):
        handshake.check("instance", handshake.proof("router"))
    with pytest.raises(LinkFailed, match="router does not know"):
        handshake.check("router", handshake.proof("instance"))


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: router\r\n\r\n" + b"x" * 64, b"\0" * 70, b"BTLK\x07\x07" + b"n" * 64]
)
def test_who_speaks_something_else_is_shown_out(garbage: bytes):
    async def main() -> None:
        async with Door() as door:
            sock = door.connect()
            await asyncio.get_running_loop().sock_sendall(sock, garbage)
            assert len(await read_all(sock)) == GREETING_BYTES
            await door.until(lambda: door.server.counts["version"] == 1)
            sock.close()
            instance, _ = await door.session()
            instance.close()

    finish(main())


def test_a_handshake_has_a_deadline_on_both_sides(pair):
    async def main() -> None:
        async with Door(session_handshake_seconds=0.2) as door:
            sock = door.connect()
            assert len(await read_all(sock)) == GREETING_BYTES
            assert door.server.counts == {"timeout": 1}
            sock.close()
        listener = socket.create_server(("127.0.0.1", 0))  # accepts, and says nothing
        with pytest.raises(LinkFailed, match="cluster port") as failed:
            await dial(Address(*listener.getsockname()), SECRET, WireConfig(session_handshake_seconds=0.2))
        assert failed.value.reason == "timeout"
        listener.close()
        with pytest.raises(LinkFailed, match="took more than"):
            await welcome(pair[0], SECRET)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = Address(*unused.getsockname())
        with pytest.raises(ConnectionRefusedError):
            await dial(address, SECRET)

    finish(main())


@pytest.mark.parametrize("kept", [0, 1, GREETING_BYTES, GREETING_BYTES + PROOF_BYTES - 1])
def test_a_handshake_that_is_cut_short_leaves_nothing(kept: int):
    async def main() -> None:
        async with Door() as door:
            sock = door.connect()
            greeting = await asyncio.get_running_loop().sock_recv(sock, GREETING_BYTES)
            reply = make_greeting()
            answer = reply + Handshake(SECRET, greeting, reply).proof("instance")
            await asyncio.get_running_loop().sock_sendall(sock, answer[:kept])
            sock.close()
            await door.until(lambda: door.server.counts["closed"] == 1)
            await door.until(lambda: door.server.handshakes == 0)

    finish(main())


def test_those_who_prove_nothing_are_few_and_keep_nobody_out():
    async def main() -> None:
        async with Door(session_handshakes_max=4) as door:
            idle = [door.connect() for _ in range(20)]
            await door.until(lambda: door.server.counts["crowded"] == 16)
            await door.until(lambda: door.server.handshakes == 4)  # those that are closed take a turn of the loop to end
            instance, router = await door.session()
            instance.send(Heartbeat())
            assert await router.receive() == Heartbeat()
            for sock in idle[:16]:
                await read_all(sock)
            for sock in idle:
                sock.close()
            instance.close()

    finish(main())


def test_sessions_are_bounded_too():
    async def main() -> None:
        async with Door(sessions_max=2) as door:
            first = [(await door.session())[0] for _ in range(2)]
            third = await dial(door.address, SECRET)
            assert await heard(third) == []
            assert door.server.counts == {"opened": 2, "crowded": 1}
            first[0].close()
            await door.until(lambda: door.server.sessions == 1)
            first[1].close()
            third.close()

    finish(main())


def test_an_error_of_whoever_takes_the_sessions_is_not_swallowed():
    def broken(link: object, peer: str) -> None:
        raise ValueError("on purpose")

    async def main() -> None:
        async with Door(on_link=broken) as door:
            instance = await dial(door.address, SECRET)
            with pytest.raises(ValueError, match="on purpose"):
                await asyncio.wait_for(door.serving, 10)
            instance.close()

    finish(main())


# Frames


def changed(place: int, bit: int = 1):
    def change(data: bytes) -> bytes:
        return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]

    return change


FRAME_BYTES = SEAL_BYTES + len(encode(Pong(7)))


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (lambda data: data + data, {"replay"}),
        (changed(FRAME_BYTES - 1), {"mac"}),
        (changed(SEAL_BYTES), {"mac"}),
        (changed(SEAL_BYTES - 1), {"mac"}),
        (changed(11), {"mac"}),
        (changed(0, 0x80), {"too_large"}),
        (changed(3), {"mac", None}),  # a byte more or less than there is: it waits for it, or the next frame is cut wrong
        (lambda data: data[:-1], {None}),
        (lambda data: b"\0" * 100, {"mac"}),
        (lambda data: b"GET / HTTP/1.1\r\n" * 20, {"too_large"}),
    ],
)
def test_what_was_changed_on_the_way_is_not_read(change, reasons):
    async def main() -> None:
        async with Door() as door, Wire(door.address, change) as wire:
            instance = await dial(wire.address, SECRET)
            instance.send(Pong(7))
            await door.until(lambda: bool(door.links))
            router = door.links[0]
            closing = asyncio.get_running_loop().call_later(0.3, instance.close)
            messages: list[object] = []
            with contextlib.suppress(LinkFailed):
                await asyncio.wait_for(router.listen(messages.append), 20)
            failure = router.failure
            assert (failure.reason if failure else None) in reasons
            assert messages == ([Pong(7)] if reasons == {"replay"} else [])
            if failure is not None:
                await door.until(lambda: door.server.counts[failure.reason] == 1)
                assert await heard(instance) == []  # it is shown out
            closing.cancel()
            instance.close()

    finish(main())


def test_a_frame_may_come_in_crumbs_and_many_frames_at_once():
    """However TCP cuts it."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        sealed = module.SealedFrames(KEYS, "router")
        await asyncio.get_running_loop().create_connection(lambda: sealed, sock=ours)
        sealer = Sealer(KEYS.from_dialler)
        link = module.Link(sealed)
        for byte in sealer.seal([encode(Pong(1)), encode(Pong(2))]):
            theirs.send(bytes([byte]))
            await asyncio.sleep(0)
        assert [await link.receive() for _ in range(2)] == [Pong(1), Pong(2)]
        theirs.sendall(b"".join(sealer.seal([encode(Pong(number))]) for number in range(50)))
        theirs.close()
        assert await heard(link) == [Pong(number) for number in range(50)]
        link.close()
        await asyncio.sleep(0.01)

    finish(main())


KEYS = module.SessionKeys(b"r" * 32, b"i" * 32)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (encode(Ping(1)), "kind"),  # what only routers say
        (encode(StartFailed("x")), "kind"),
        (b"XX" + encode(Pong(1))[2:], "malformed"),
        (encode(Pong(1))[:-1], "malformed"),
        (encode(Pong(1)) + b"\0", "malformed"),
        (encode(Pong(1))[:HEADER_BYTES] + b"\xc1" * (len(encode(Pong(1))) - HEADER_BYTES), "malformed"),
    ],
)
def test_a_peer_that_knows_the_secret_may_still_only_say_what_it_may(content: bytes, reason: str):
    async def main() -> None:
        ours, theirs = socket.socketpair()
        sealed = module.SealedFrames(KEYS, "router")
        await asyncio.get_running_loop().create_connection(lambda: sealed, sock=ours)
        link = module.Link(sealed)
        theirs.sendall(Sealer(KEYS.from_dialler).seal([encode(Pong(5))]))
        assert await link.receive() == Pong(5)
        sealer = Sealer(KEYS.from_dialler)
        sealer.seal([b""])
        theirs.sendall(sealer.seal([content]))
        with pytest.raises(LinkFailed) as failed:
            await heard(link)
        assert failed.value.reason == reason
        theirs.close()
        link.close()
        await asyncio.sleep(0.01)

    finish(main())


def test_a_message_of_a_kind_that_we_do_not_know_is_skipped_and_counted():
    """A newer peer may send it. The messages around it are read."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        sealed = module.SealedFrames(KEYS, "router")
        await asyncio.get_running_loop().create_connection(lambda: sealed, sock=ours)
        link, skipped = module.Link(sealed), []
        link.on_unknown_kind(skipped.append)
        unknown = encode(Pong(1))[:3] + b"\xfa" + encode(Pong(1))[4:]
        theirs.sendall(Sealer(KEYS.from_dialler).seal([encode(Pong(5)), unknown, encode(Pong(6)), unknown]))
        theirs.close()
        assert await heard(link) == [Pong(5), Pong(6)]
        assert skipped == [0xFA, 0xFA]
        link.close()
        await asyncio.sleep(0.01)

    finish(main())


def test_a_frame_of_ours_does_not_come_back_as_theirs():
    async def main() -> None:
        ours, theirs = socket.socketpair()
        sealed = module.SealedFrames(KEYS, "router")
        await asyncio.get_running_loop().create_connection(lambda: sealed, sock=ours)
        theirs.sendall(Sealer(KEYS.from_listener).seal([encode(Pong(5))]))
        with pytest.raises(LinkFailed) as failed:
            await heard(module.Link(sealed))
        assert failed.value.reason == "mac"
        theirs.close()

    finish(main())


def test_a_promise_of_too_many_bytes_is_refused_before_they_come():
    async def main() -> None:
        ours, theirs = socket.socketpair()
        sealed = module.SealedFrames(KEYS, "router")
        await asyncio.get_running_loop().create_connection(lambda: sealed, sock=ours)
        theirs.sendall((CONTENT_BYTES_MAX + 1).to_bytes(4, "big") + b"\0" * (SEAL_BYTES - 4))
        with pytest.raises(LinkFailed) as failed:
            await heard(module.Link(sealed))
        assert failed.value.reason == "too_large"
        theirs.close()

    finish(main())


# A peer that does not read


def test_a_peer_that_does_not_read_is_given_up_and_others_are_not():
    async def main() -> None:
        async with Door(session_backlog_bytes_max=1 << 20) as door:
            (slow, to_slow), (quick, to_quick) = await door.session(), await door.session()
            slow._frames.transport.pause_reading()
            for _ in range(40):
                to_slow.send(LARGE)  # about a megabyte each
                await asyncio.sleep(0)
            assert to_slow.failure is not None
            assert to_slow.failure.reason == "unread"
            assert to_slow.backlog == 0
            to_quick.send(LARGE)
            assert await quick.receive() == LARGE
            assert door.server.counts["unread"] == 1
            slow.close()
            quick.close()

    finish(main())


def test_a_link_that_is_closed_does_not_wait_for_a_peer_that_does_not_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LAST_WORDS_SECONDS", 0.1)

    async def main() -> None:
        async with Door() as door:
            instance, router = await door.session()
            instance._frames.transport.pause_reading()
            for _ in range(10):
                router.send(LARGE)
            await asyncio.sleep(0)
            assert router.backlog
            router.close()
            await asyncio.wait_for(router.wait_ended(), 20)
            await door.until(lambda: door.server.sessions == 0)
            instance.close()

    finish(main())


# Listening


def test_a_socket_file_that_nobody_listens_on_is_replaced_and_one_in_use_is_not(tmp_path: Path):
    place = str(tmp_path / "door")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(place)

    async def main() -> None:
        async with Door(place) as door:
            instance, _ = await door.session()
            with pytest.raises(InvalidConfig, match="cannot listen on unix:"):
                link_server.listen_at(door.address)
            instance.close()
        Path(place).unlink()
        Path(place).write_text("not ours")
        with pytest.raises(InvalidConfig, match="cannot listen"):
            link_server.listen_at(Address(path=place))
        assert Path(place).read_text() == "not ours"

    finish(main())
