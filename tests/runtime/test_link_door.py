"""The router's door when the machine or somebody on it makes trouble: descriptors run out, others on the same host."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path

import pytest
from link_rig import Door
from run_loop import finish

from baton.runtime import link_server


def test_a_connection_that_cannot_be_accepted_keeps_nobody_else_out(monkeypatch: pytest.MonkeyPatch):
    """Without descriptors, say: it waits and goes on, and says so."""
    monkeypatch.setattr(link_server, "ACCEPT_RETRY_SECONDS", 0.01)

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
