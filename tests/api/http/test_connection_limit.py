"""Many at once come in a few at a time: connections, requests, pieces of bodies. Handshakes are bounded in number."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections import Counter
from collections.abc import Iterator
from typing import NoReturn

import pytest

from baton.api.http.connection_limit import ACCEPTS_PER_TURN, RESERVE, ConnectionLimit, Connections
from baton.api.http.layers import Paced, RequestPacing
from baton.api.limits import Limits

SECONDS_MAX = 20.0


@contextlib.contextmanager
def listening(limits: Limits, *, tls: bool = False) -> Iterator[tuple[ConnectionLimit, Connections]]:
    connections = Connections(limits)
    plain = socket.create_server(("127.0.0.1", 0), backlog=512)
    with ConnectionLimit(plain, connections, tls=tls) as door:
        door.settimeout(SECONDS_MAX)
        yield door, connections


def knock(door: ConnectionLimit) -> socket.socket:
    return socket.create_connection(door.getsockname(), SECONDS_MAX)


def is_closed(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False


class Turns:
    """Which turn of the loop it is: a call in each."""

    def __init__(self) -> None:
        self.now = 0
        self._loop = asyncio.get_running_loop()
        self._count()

    def _count(self) -> None:
        self.now += 1
        self._loop.call_soon(self._count)


def test_a_server_that_may_open_no_file_says_so_once_a_second(monkeypatch):
    """And not two thousand times: asyncio tries as often as its backlog is long. Found by an audit, with `ulimit -n 64`."""
    complaints: list[str] = []

    def accept(self: socket.socket) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files")

    async def serve(door: ConnectionLimit) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: complaints.append(context["message"]))
        async with await loop.create_server(asyncio.Protocol, sock=door, backlog=512):
            await asyncio.sleep(0.5)

    with listening(Limits()) as (door, _), knock(door):
        monkeypatch.setattr(socket.socket, "accept", accept)
        asyncio.run(serve(door))
    assert complaints == ["socket.accept() out of system resource"]


def test_no_turn_of_the_loop_takes_more_than_a_few_connections():
    """They all wait when the server begins: asyncio alone would take them in one turn."""
    made: Counter[int] = Counter()

    async def serve(door: ConnectionLimit) -> None:
        turns, done = Turns(), asyncio.Event()

        class Protocol(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made[turns.now] += 1
                transport.close()
                if made.total() == 100:
                    done.set()

        server = await asyncio.get_running_loop().create_server(Protocol, sock=door, backlog=512)
        async with server:
            await asyncio.wait_for(done.wait(), SECONDS_MAX)

    with listening(Limits()) as (door, _):
        clients = [knock(door) for _ in range(100)]
        asyncio.run(serve(door))
        assert max(made.values()) <= ACCEPTS_PER_TURN
        for client in clients:
            client.close()


def test_a_connection_counts_until_its_socket_is_closed():
    with listening(Limits()) as (door, connections), knock(door) as client:
        accepted, peer = door.accept()
        assert peer == client.getsockname()
        assert connections.total == 1
        accepted.close()
        accepted.close()  # twice is harmless
        assert connections.total == 0


def test_far_over_the_bound_nothing_is_kept_of_a_connection():
    with listening(Limits(connections=1)) as (door, connections):
        clients = [knock(door) for _ in range(2 + RESERVE)]
        accepted = []
        for _ in range(2 * len(clients)):
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # the end of a turn; one too many
                accepted.append(door.accept())
            if sum(map(is_closed, clients)) == 1:
                break
        refusals = [connections.begin_requests(peer) for _, peer in accepted]
        assert refusals[0] is None
        assert [refusal.http_status for refusal in refusals[1:] if refusal] == [503] * RESERVE
        assert connections.total == 1 + RESERVE
        for sock in [*clients, *(sock for sock, _ in accepted)]:
            sock.close()


def test_a_refusal_ends_with_its_connection():
    """The next one of the same address and port is judged anew."""
    connections = Connections(Limits(connections=1))
    first, second = ("10.0.0.1", 1000), ("10.0.0.2", 1000)
    assert connections.admit(first)
    assert connections.admit(second)
    assert connections.begin_requests(second) is not None
    connections.close(first)
    connections.close(second)
    assert connections.admit(second)
    assert connections.begin_requests(second) is None


def test_of_too_many_handshakes_the_oldest_is_closed():
    with listening(Limits(handshakes=2), tls=True) as (door, connections):
        clients = [knock(door) for _ in range(3)]
        accepted = [door.accept() for _ in clients]
        assert connections.shaking == 2
        assert clients[0].recv(1) == b"", "the oldest is closed"
        clients[1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            clients[1].recv(1)
        connections.begin_requests(accepted[1][1])
        assert connections.shaking == 1, "one that is done with it makes room"
        for sock in [*clients, *(sock for sock, _ in accepted)]:
            sock.close()
        assert (connections.shaking, connections.total) == (0, 0)


def test_a_turnstile_lets_a_few_through_per_turn_in_the_order_of_coming():
    async def run() -> None:
        turnstile, turns = RequestPacing(3), Turns()
        through: list[tuple[int, int]] = []

        async def enter(number: int) -> None:
            await turnstile.enter()
            through.append((number, turns.now))

        tasks = [asyncio.create_task(enter(number)) for number in range(20)]
        await asyncio.sleep(0)
        tasks[10].cancel()  # it leaves the line, and nobody waits for it
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SECONDS_MAX)
        assert [number for number, _ in through] == [number for number in range(20) if number != 10]
        assert max(Counter(turn for _, turn in through).values()) <= 3

    asyncio.run(run())


def test_idle_pacing_does_nothing():
    async def run() -> None:
        turnstile = RequestPacing()
        await turnstile.enter()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not turnstile._scheduled

    asyncio.run(run())


def test_requests_and_pieces_of_bodies_take_turns():
    """30 requests with bodies of three pieces, all of them there: no turn begins or reads more than a few."""
    events: Counter[int] = Counter()

    async def run() -> None:
        turns = Turns()

        async def app(scope, receive, send):
            events[turns.now] += 1
            more = True
            while more:
                more = (await receive())["more_body"]
                events[turns.now] += 1

        paced = Paced(app)

        async def request() -> None:
            pieces = iter([True, True, False])

            async def receive():
                return {"type": "http.request", "body": b"x", "more_body": next(pieces)}

            await paced({"type": "http"}, receive, None)

        await asyncio.wait_for(asyncio.gather(*(request() for _ in range(30))), SECONDS_MAX)

    asyncio.run(run())
    assert events.total() == 30 * 4
    assert max(events.values()) <= 2 * 4, "four enter in a turn; who begins reads its first piece at once"
