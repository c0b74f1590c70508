"""Connects to a name that may have several addresses, some of which may not answer.

RFC 8305 in short: the addresses are tried in the resolver's order, IPv6 and IPv4 in turn, each 250 ms after the one before or
as soon as that has failed. The first connection wins, the others are closed. So an address that drops packets costs 250 ms and
not the whole deadline, which the caller sets.

Names are looked up by separate threads that do not delay the end of the process: with a silent name server a thread of the
loop's executor would be blocked for many seconds, and the end of the process with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from itertools import chain, zip_longest
from typing import Any, Final

from baton.addresses import Address

NEXT_SECONDS: Final = 0.25
LOOKUPS_MAX: Final = 16
"""Maximum of threads that look up names at once. Each ends when its name server answers, or the resolver gives up."""
LOOKUP: Final = "baton-lookup"

Place = tuple[int, object]
"""Family and address, as in the socket module."""


async def connected(address: Address) -> socket.socket:
    """Connect to the first address that answers. Raises OSError if none does."""
    if address.path:
        return await _connect((socket.AF_UNIX, address.path))
    places = in_turn(await resolved(address))
    if not places:
        raise OSError(f"{address.host} has no address")
    return await _first_of(places)


def in_turn(places: list[Place]) -> list[Place]:
    """The addresses with alternating families, the first one's first."""
    first = [place for place in places if place[0] == places[0][0]]
    other = [place for place in places if place[0] != places[0][0]]
    return [place for place in chain.from_iterable(zip_longest(first, other)) if place is not None]


async def _first_of(places: list[Place]) -> socket.socket:
    """Connect to all places, each NEXT_SECONDS after the one before. Returns the first connection and closes the others; raises
    the last error."""
    trying: dict[asyncio.Task[socket.socket], None] = {}
    failed: OSError = OSError("no address")
    waiting = iter(places)
    place = next(waiting, None)
    try:
        while place is not None or trying:
            if place is not None:
                trying[asyncio.create_task(_connect(place))] = None
                place = next(waiting, None)
            await asyncio.wait(trying, timeout=None if place is None else NEXT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in trying if task.done()]:
                del trying[task]
                if (error := task.exception()) is None:
                    return task.result()
                if not isinstance(error, OSError):
                    raise error
                failed = error
    finally:
        for task in trying:
            task.cancel()
            task.add_done_callback(_close)
    raise failed


def _close(task: asyncio.Task[socket.socket]) -> None:
    """Close a connection that lost the race."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _connect(place: Place) -> socket.socket:
    family, where = place
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, where)  # type: ignore[arg-type]
    except BaseException:
        sock.close()
        raise
    return sock


async def resolved(address: Address) -> list[Place]:
    """Families and addresses of a host and port."""
    try:
        found: list[Any] = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        found = await _resolve(address)
    return [(family, place) for family, _, _, _, place in found]


async def _resolve(address: Address) -> list[Any]:
    """Look the host up in a daemon thread: getaddrinfo has no deadline, and a silent name server must not hold the loop's
    threads."""
    if sum(thread.name == LOOKUP for thread in threading.enumerate()) >= LOOKUPS_MAX:
        raise OSError(f"{address.host}: {LOOKUPS_MAX} names are being looked up already, and no name server answers")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Any]] = loop.create_future()

    def settle(found: list[Any], error: OSError | None) -> None:
        if not answer.done():
            answer.set_result(found) if error is None else answer.set_exception(error)

    def resolve() -> None:
        found: list[Any] = []
        failed: OSError | None = None
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            failed = error
        except UnicodeError:
            failed = OSError(f"{address.host} is no name")
        with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits
            loop.call_soon_threadsafe(settle, found, failed)

    threading.Thread(target=resolve, name=LOOKUP, daemon=True).start()
    return await answer
