"""The router's door when the machine or somebody on it makes trouble: descriptors run out, others on the same host."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from itertools import pairwise
from pathlib import Path

import pytest
from link_rig import Door, heard, read_all
from run_loop import finish

from baton.protocol.codec import encode
from baton.protocol.control import Pong, RefusedRequest
from baton.protocol.ids import RequestId
from baton.protocol.request import Refused
from baton.runtime.wire import link
from baton.trust import acceptor, seal
from baton.trust.handshake import GREETING_BYTES


def test_a_connection_that_cannot_be_accepted_keeps_nobody_else_out(monkeypatch: pytest.MonkeyPatch):
    """Without descriptors, say: it waits and goes on, and says so."""
    monkeypatch.setattr(acceptor, "PAUSE_SECONDS", 0.01)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        accept, failures = loop.sock_accept, [OSError(errno.EMFILE, os.strerror(errno.EMFILE)) for _ in range(3)]

        async def sometimes(sock):
            if failures:
                raise failures.pop()
            return await accept(sock)

        monkeypatch.setattr(loop, "sock_accept", sometimes)
        async with Door() as door:
            instance, _ = await door.session()
            assert door.server.counts == {"accept": 3, "opened": 1}
            instance.close()

    finish(main())


def test_only_our_user_may_connect_to_a_socket_file(tmp_path: Path):
    async def main() -> None:
        umask = os.umask(0)
        try:
            async with Door(str(tmp_path / "door")):
                assert stat.S_IMODE((tmp_path / "door").stat().st_mode) == 0o600
        finally:
            os.umask(umask)

    finish(main())


def test_when_all_places_are_taken_the_one_held_longest_is_given_away():
    """Who comes last may be an honest instance, which needs milliseconds."""

    async def main() -> None:
        async with Door(session_handshakes_max=2) as door:
            silent = []
            for place in range(3):
                silent.append(door.connect())
                if place < 2:
                    await door.until(lambda place=place: door.server.handshakes == place + 1)
            assert len(await read_all(silent[0])) == GREETING_BYTES, "greeted, and closed"
            for sock in silent[1:]:
                assert len(await asyncio.get_running_loop().sock_recv(sock, 1000)) == GREETING_BYTES
                with pytest.raises(BlockingIOError):  # open, and nothing to read
                    sock.recv(1)
            assert door.server.counts == {"crowded": 1}
            for sock in silent:
                sock.close()

    finish(main())


def test_messages_of_one_turn_that_do_not_fit_into_one_frame_go_in_two(monkeypatch: pytest.MonkeyPatch):
    """A peer refuses a larger one, and the session would be over."""
    large = RefusedRequest(RequestId("r" * 1900), Refused("no_room"))
    for module in (link, seal):
        monkeypatch.setattr(module, "CONTENT_BYTES_MAX", len(encode(large)))

    async def main() -> None:
        async with Door() as door:
            instance, router = await door.session()
            messages = [Pong(1), large, Pong(2)]
            for message in messages:
                instance.send(message)
            instance.close()
            assert await heard(router) == messages

    finish(main())


def test_a_row_of_connections_does_not_hold_up_the_loop():
    """All that wait in the backlog were accepted in one turn, and streams waited for it."""

    async def main() -> None:
        async with Door() as door:
            for _ in range(3):
                await asyncio.sleep(0)
            accepted: list[int] = []
            waiting = [door.connect() for _ in range(40)]
            while not accepted or accepted[-1] < 40:
                accepted.append(door.server.handshakes)
                await asyncio.sleep(0)
            steps = [after - before for before, after in pairwise(accepted)]
            assert max(steps) <= 2, "so many in one turn of the loop"
            for sock in waiting:
                sock.close()

    finish(main())
