"""What a router process makes of its settings."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from run_loop import finish

from baton.config import RouterConfig, ServeConfig
from baton.config.router_process import RouterProcessConfig
from baton.runtime.router import process as module
from baton.runtime.router.process import RouterProcess
from baton.runtime.wire.channel import Channel
from baton.trust.secret import create_secret


class Enough(Exception):
    pass


def test_as_many_instances_as_were_asked_for_may_have_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """1,024 was the most, whatever the settings said."""
    create_secret(tmp_path / "secret")
    made: dict[str, Any] = {}

    def link_server(sock: socket.socket, *rest: object, **given: Any) -> None:
        sock.close()
        made.update(given)
        raise Enough

    monkeypatch.setattr(module, "LinkServer", link_server)
    monkeypatch.setattr(module, "listen_on", lambda serve: [])
    config = RouterProcessConfig(
        serve=ServeConfig(wire={"session_handshakes_max": 7}),
        router=RouterConfig(instances_max=3000),
        listen=f"unix:{tmp_path}/router.sock",
        cluster_secret=str(tmp_path / "secret"),
    )

    async def main() -> None:
        ours, theirs = socket.socketpair()
        channel = await Channel.open(ours)
        with theirs, pytest.raises(Enough):
            await RouterProcess(config, channel).run()
        channel.close()
        await asyncio.sleep(0)

    finish(main())
    assert made["sessions_max"] > 3000
    assert made["wire"].session_handshakes_max == 7
