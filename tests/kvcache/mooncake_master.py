"""A real `mooncake_master` for one test module, on ports of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

from redis_server import free_port

MASTER = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


def why_not() -> str | None:
    """The reason to skip, if there is one."""
    from baton.errors import InvalidConfig
    from baton.kvcache.storage.mooncake_store import store_class

    try:
        store_class()
    except InvalidConfig as error:
        return str(error)
    return None if MASTER else "mooncake_master is not on the PATH"


class MooncakeMaster:
    def __init__(self, folder: Path, lease_ms: int = 200) -> None:
        self.folder, self.lease_ms, self.port, self.metrics_port = folder, lease_ms, free_port(), free_port()
        self.start()

    def start(self) -> None:
        rpc = ("-rpc_address=127.0.0.1", f"-rpc_port={self.port}")
        metrics = ("-metrics_host=127.0.0.1", f"-metrics_port={self.metrics_port}")
        with open(self.folder / "master.log", "ab") as log:
            command = [MASTER, *rpc, *metrics, f"-default_kv_lease_ttl={self.lease_ms}"]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
        give_up = monotonic() + 60
        while monotonic() < give_up:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                sleep(0.05)
        raise AssertionError("mooncake_master does not listen")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
