"""Frames over a socket pair: whole, in crumbs, cut short, garbage, and a peer that stops reading."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
from run_loop import finish

from baton.errors import PeerError, ProtocolError, Unavailable
from baton.protocol.codec import FRAME_BYTES_MAX, HEADER_BYTES, MessageTooLarge, encode
from baton.protocol.control import AbortRequest, LoadProgress, Ping, Pong, StartFailed
from baton.protocol.ids import RequestId
from baton.protocol.request import GenerateRequest
from baton.runtime.wire import channel as module
from baton.runtime.wire.channel import BlockingChannel, Channel

MESSAGES = [Ping(1), LoadProgress(2, 3), AbortRequest(RequestId("a"), 1), StartFailed("é" * 1000), Pong(2**40)]
LARGE = GenerateRequest(id=RequestId("large"), prompt=tuple(range(300_000)))


def test_messages_arrive_whole_and_in_order_both_ways(pair):
    async def main() -> None:
        one, other = [await Channel.open(sock) for sock in pair]
        for message in (*MESSAGES, LARGE):
            one.send(message)
            other.send(message)
        for channel in (one, other):
            assert [await channel.receive() for _ in range(6)] == [*MESSAGES, LARGE]
        one.close()
        assert await other.receive() is None
        assert await other.receive() is None
        other.close()

    finish(main())


def test_a_frame_may_come_in_crumbs(pair):
    async def main() -> None:
        channel = await Channel.open(pair[0])
        receiving = asyncio.create_task(channel.receive())
        for byte in encode(MESSAGES[2]):
            pair[1].send(bytes([byte]))
            await asyncio.sleep(0)
        assert await receiving == MESSAGES[2]
        channel.close()

    finish(main())


@pytest.mark.parametrize("kept", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1])
@pytest.mark.parametrize("blocking", [False, True])
def test_a_frame_cut_short_by_the_end_is_the_end(pair, kept: int, blocking: bool):
    pair[1].sendall(encode(Ping(1)) + encode(MESSAGES[3])[:kept])
    pair[1].close()
    assert receive_all(pair[0], blocking) == [Ping(1)]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00" * 64,
        b"BT\xfa" + encode(Ping(1))[3:],  # another version
        b"BT\x02\xfa\x00\x00\x00\x00",  # an unknown kind
        encode(Ping(1))[:4] + (FRAME_BYTES_MAX + 1).to_bytes(4, "big"),
        encode(Ping(1))[:4] + b"\x00\x00\x00\x02\xc1\xc1",  # not msgpack
        encode(Ping(1))[:3] + b"\x02" + encode(Ping(1))[4:],  # of another kind than it says
    ],
)
@pytest.mark.parametrize("blocking", [False, True])
def test_garbage_is_an_error_and_the_end(pair, garbage: bytes, blocking: bool):
    pair[1].sendall(encode(Ping(1)) + garbage)
    with pytest.raises(ProtocolError):
        receive_all(pair[0], blocking)
    if not blocking:
        pair[1].settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # where it had still something to say
            assert pair[1].recv(1) == b""  # the other side is shown out


def receive_all(sock: socket.socket, blocking: bool) -> list:
    async def main() -> list:
        channel = await Channel.open(sock)
        try:
            messages = []
            while (message := await channel.receive()) is not None:
                messages.append(message)
            return messages
        finally:
            channel.close()

    if not blocking:
        return finish(main())
    channel = BlockingChannel(sock)
    return list(iter(channel.receive, None))


def test_last_words_are_heard_also_where_ours_were_not_read(pair):
    """The peer ends with our message unread: the kernel says reset, after what it had said itself."""

    async def main() -> None:
        channel = await Channel.open(pair[0])
        channel.send(Ping(1))
        await asyncio.sleep(0)
        pair[1].sendall(encode(StartFailed("out of memory")))
        pair[1].close()
        assert await channel.receive() == StartFailed("out of memory")
        assert await channel.receive() is None
        channel.close()

    finish(main())


def test_sending_to_a_peer_that_is_gone_does_nothing(pair):
    async def main() -> None:
        channel = await Channel.open(pair[0])
        pair[1].close()
        for _ in range(5):
            channel.send(Ping(1))
            await asyncio.sleep(0)
        assert await channel.receive() is None
        channel.close()
        channel.send(Ping(1))
        channel.close()

    finish(main())


def test_a_peer_that_does_not_read_is_dropped_when_too_much_piles_up(pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "BACKLOG_BYTES_MAX", 1 << 20)

    async def main() -> None:
        channel = await Channel.open(pair[0])
        for _ in range(100):
            channel.send(LARGE)  # about a megabyte each
        assert channel._frames.transport.get_write_buffer_size() == 0
        assert await channel.receive() is None

    finish(main())


def test_an_offer_to_a_peer_that_is_behind_is_refused_and_the_channel_stays(pair, monkeypatch: pytest.MonkeyPatch):
    """One request of 1 MB x 64 prompts once filled the backlog and ended the front's only engine channel."""
    monkeypatch.setattr(module, "OFFER_BYTES_MAX", 4 << 20)

    async def main() -> None:
        one, other = [await Channel.open(sock) for sock in pair]
        other._frames.transport.pause_reading()
        taken = 0
        while one._frames.transport.get_write_buffer_size() <= 4 << 20:
            one.offer(LARGE)
            taken += 1
        with pytest.raises(Unavailable, match="behind"):
            one.offer(LARGE)
        one.send(Ping(1))  # what cannot be refused still goes
        other._frames.transport.resume_reading()
        assert [await other.receive() for _ in range(taken + 1)] == [*[LARGE] * taken, Ping(1)]
        one.offer(LARGE)  # and it takes offers again
        assert await other.receive() == LARGE
        one.close()
        other.close()

    finish(main())


def test_a_peer_that_takes_nothing_for_long_is_dropped(pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "UNREAD_SECONDS_MAX", 0.05)

    async def main() -> None:
        channel = await Channel.open(pair[0])
        channel.send(LARGE)
        assert await channel.receive() is None
        assert channel._frames.transport.is_closing()

    finish(main())


def test_a_peer_that_reads_slowly_is_not_dropped(pair):
    async def main() -> None:
        channel = await Channel.open(pair[0])
        pair[1].setblocking(False)
        channel.send(LARGE)
        frames, expected, taken, looks = channel._frames, encode(LARGE), b"", 0
        while len(taken) < len(expected):
            unread = frames.transport.get_write_buffer_size()
            while len(taken) < len(expected) and frames.transport.get_write_buffer_size() == unread:
                with contextlib.suppress(BlockingIOError):
                    taken += pair[1].recv(1 << 16)
                await asyncio.sleep(0)
            if (timer := frames._unread_timer) is not None:
                timer._run()  # as if its time had come
                timer.cancel()
                looks += 1
        assert taken == expected
        assert looks > 1
        assert not frames.transport.is_closing()
        channel.close()

    finish(main())


def test_a_message_of_ours_that_is_too_large_is_its_senders_error_and_the_channel_goes_on(pair):
    async def main() -> None:
        one, other = [await Channel.open(sock) for sock in pair]
        with pytest.raises(MessageTooLarge):
            one.send(StartFailed("z" * (FRAME_BYTES_MAX + 1)))
        one.send(Ping(1))
        assert await other.receive() == Ping(1)
        one.close()
        other.close()

    finish(main())


@pytest.mark.parametrize("error", [MessageTooLarge("ours"), ProtocolError("ours"), KeyError("ours")])
def test_an_error_of_the_listener_is_not_blamed_on_the_peer(pair, error: Exception):
    def take(message: object) -> None:
        raise error

    async def main() -> None:
        one, other = [await Channel.open(sock) for sock in pair]
        one.send(Ping(1))
        with pytest.raises(type(error), match="ours") as raised:
            await other.listen(take)
        assert not isinstance(raised.value, PeerError)
        one.close()
        other.close()

    finish(main())


def test_garbage_is_blamed_on_the_peer(pair):
    async def main() -> None:
        channel = await Channel.open(pair[0])
        pair[1].sendall(b"x" * 64)
        with pytest.raises(PeerError):
            await channel.listen(print)
        pair[1].settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.to_thread(pair[1].recv, 1) == b"", "it is shown out, whoever listened does nothing for that"

    finish(main())


def test_finish_waits_for_a_slow_reader_and_not_for_one_that_never_reads(pair, monkeypatch: pytest.MonkeyPatch):
    async def main(reads: bool) -> bytes:
        one, other = socket.socketpair()
        channel = await Channel.open(one)
        channel.send(LARGE)
        taken: list[bytes] = []

        def read() -> None:
            while data := other.recv(1 << 12):
                taken.append(data)

        thread = threading.Thread(target=read)
        if reads:
            thread.start()
        await channel.finish()
        if reads:
            thread.join(30)
        else:
            channel._frames.transport.abort()
        other.close()
        return b"".join(taken)

    assert finish(main(reads=True)) == encode(LARGE)
    monkeypatch.setattr(module, "LAST_WORDS_SECONDS", 0.05)
    assert finish(main(reads=False)) == b""


def test_the_blocking_end_and_the_asyncio_end_understand_each_other(pair):
    def echo() -> None:
        channel = BlockingChannel(pair[1])
        while (message := channel.receive()) is not None:
            channel.send(message)

    async def main() -> None:
        thread = threading.Thread(target=echo)
        thread.start()
        channel = await Channel.open(pair[0])
        for message in (*MESSAGES, LARGE):
            channel.send(message)
        assert [await channel.receive() for _ in range(6)] == [*MESSAGES, LARGE]
        channel.close()
        await asyncio.to_thread(thread.join, 30)
        assert not thread.is_alive()

    finish(main())


def test_a_listener_is_told_what_came_before_it_and_what_comes_after_until_the_end(pair):
    async def main() -> None:
        one, other = [await Channel.open(sock) for sock in pair]
        for message in MESSAGES:
            one.send(message)
        while len(other._frames.inbox) < len(MESSAGES):
            await asyncio.sleep(0)
        told: list = []
        listening = asyncio.create_task(other.listen(told.append))
        await asyncio.sleep(0)
        for message in (*MESSAGES, LARGE):
            one.send(message)
        await one.finish()
        await listening
        assert told == [*MESSAGES, *MESSAGES, LARGE]
        other.close()

    finish(main())


def test_an_error_of_the_listener_is_raised_and_nothing_more_is_told(pair):
    async def main() -> None:
        one, other = [await Channel.open(sock) for sock in pair]
        told: list = []

        def take(message: object) -> None:
            told.append(message)
            raise ZeroDivisionError

        listening = asyncio.create_task(other.listen(take))
        await asyncio.sleep(0)
        for message in MESSAGES:
            one.send(message)
        with pytest.raises(ZeroDivisionError):
            await listening
        await asyncio.sleep(0.01)
        assert told == MESSAGES[:1]
        one.close()
        other.close()

    finish(main())


def test_a_listener_that_has_left_is_told_nothing(pair):
    async def main() -> None:
        one, other = [await Channel.open(sock) for sock in pair]
        told: list = []
        listening = asyncio.create_task(other.listen(told.append))
        await asyncio.sleep(0)
        listening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await listening
        one.send(Ping(1))
        assert await other.receive() == Ping(1)
        assert told == []
        one.close()
        other.close()

    finish(main())


def test_what_nobody_receives_is_left_in_the_socket(pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "INBOX_MAX", 4)

    async def main() -> None:
        one, other = [await Channel.open(sock) for sock in pair]
        for number in range(40):
            one.send(Ping(number))
            await asyncio.sleep(0.001)
        assert len(other._frames.inbox) <= 5
        assert [await other.receive() for _ in range(40)] == [Ping(number) for number in range(40)]
        one.close()
        other.close()

    finish(main())
