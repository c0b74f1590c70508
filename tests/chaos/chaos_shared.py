"""Servers that several files of tests ask: the undisturbed run. Starting one takes more than most of the questions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos_server import ON_DEVICE, Server


class SharedServers:
    """Who disturbs one waits until it is as before. One that a test has ended is started again for the next."""

    def __init__(self, make_folder: Callable[[str], Path]) -> None:
        self._make_folder = make_folder
        self._servers: dict[str, Server] = {}

    def of(self, model: Path, **settings: Any) -> Server:
        key = json.dumps([str(model), {**ON_DEVICE, **settings}])
        if key not in self._servers or self._servers[key].popen.poll() is not None:
            self._servers[key] = Server(model, self._make_folder("shared"), **settings).wait_ready()
        return self._servers[key]

    def end(self) -> None:
        for server in self._servers.values():
            server.__exit__(None, None, None)
