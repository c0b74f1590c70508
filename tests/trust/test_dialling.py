"""A name with several addresses, of which some are silent, refuse, or take long to be found."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from run_loop import finish

from baton.addresses import Address
from baton.trust import dialling
from baton.trust.dialling import connected, in_turn

V4, V6 = socket.AF_INET, socket.AF_INET6


@contextmanager
def silent() -> Iterator[tuple[int, object]]:
    """Takes no connection and refuses none: its backlog is full, so packets are dropped."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        held = []
        for _ in range(8):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
            held.append(sock)
        try:
            yield V4, listener.getsockname()
        finally:
            for sock in held:
                sock.close()


def found_at(monkeypatch: pytest.MonkeyPatch, *places: tuple[int, object]) -> None:
    async def resolved(address: Address) -> list[tuple[int, object]]:
        return list(places)

    monkeypatch.setattr(dialling, "resolved", resolved)


def test_a_first_address_that_is_silent_does_not_eat_the_deadline(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        with silent() as nobody, socket.create_server(("127.0.0.1", 0)) as listener:
            found_at(monkeypatch, nobody, nobody, (V4, listener.getsockname()))
            before = len(os.listdir("/proc/self/fd"))
            async with asyncio.timeout(5.0):  # as much as a handshake has
                sock = await connected(Address(host="router.example", port=1))
            assert sock.getpeername() == listener.getsockname()
            sock.close()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/fd")) == before, "those that lost are closed"

    finish(main())


def test_one_that_refuses_is_followed_at_once_and_the_last_error_is_told(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        monkeypatch.setattr(dialling, "NEXT_SECONDS", 600.0)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            nobody = closed.getsockname()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            found_at(monkeypatch, (V4, nobody), (V4, listener.getsockname()))
            (await connected(Address(host="router.example", port=1))).close()
        found_at(monkeypatch, (V4, nobody), (V4, nobody))
        with pytest.raises(ConnectionRefusedError):
            await connected(Address(host="router.example", port=1))
        found_at(monkeypatch)
        with pytest.raises(OSError, match="has no address"):
            await connected(Address(host="router.example", port=1))

    finish(main())


def test_families_take_turns():
    places: list[tuple[int, object]] = [(V6, 1), (V6, 2), (V6, 3), (V4, 4)]
    assert in_turn(places) == [(V6, 1), (V4, 4), (V6, 2), (V6, 3)]
    assert in_turn([]) == []


def test_addresses_of_the_other_family_are_not_dialled_last(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        dialled: list[object] = []

        async def refused(place: tuple[int, object]) -> socket.socket:
            dialled.append(place[1])
            raise ConnectionRefusedError

        monkeypatch.setattr(dialling, "_connect", refused)
        found_at(monkeypatch, (V6, 1), (V6, 2), (V6, 3), (V4, 4))
        with pytest.raises(ConnectionRefusedError):
            await connected(Address(host="router.example", port=1))
        assert dialled == [1, 4, 2, 3]

    finish(main())


def test_names_are_looked_up_beside_the_loop_and_not_without_a_bound(monkeypatch: pytest.MonkeyPatch):
    gate = threading.Event()
    real = socket.getaddrinfo

    def slow(host: str, *rest: Any, **given: Any) -> Any:
        if host != "slow.example" or given.get("flags"):
            return real(host, *rest, **given)
        gate.wait(20)
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr(dialling, "LOOKUPS_MAX", 2)

    async def main() -> None:
        address = Address(host="slow.example", port=1)
        waiting = [asyncio.create_task(connected(address)) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(OSError, match="no name server answers"):
            await connected(address)
        gate.set()
        for task in waiting:
            with pytest.raises(OSError, match="no such name"):
                await task

    finish(main())


def test_a_name_server_that_is_silent_does_not_hold_up_the_end_of_the_process():
    program = """
import asyncio, socket, time
from baton.addresses import Address
from baton.trust.dialling import connected

def never(*given, **rest):
    if rest.get("flags"):
        raise OSError
    time.sleep(60)

socket.getaddrinfo = never

async def main():
    try:
        async with asyncio.timeout(0.1):
            await connected(Address(host="router.example", port=1))
    except TimeoutError:
        print("given up")

asyncio.run(main())
"""
    begun = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=50, check=True)
    assert ended.stdout == b"given up\n"
    assert time.monotonic() - begun < 45, "it did not wait for the thread"
