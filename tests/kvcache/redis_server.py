"""A real redis-server (or valkey-server) for one test module, on a port of its own and a unix socket."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from time import monotonic, sleep

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options, self.port = folder, options, free_port()
        self.socket_path = str(folder / "redis.sock")
        self.start()

    def start(self) -> None:
        nothing_kept = ("--save", "", "--appendonly", "no", "--daemonize", "no", "--dir", str(self.folder))
        place = ("--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket_path)
        self.process = subprocess.Popen([SERVER, *place, *nothing_kept, *self.options], stdout=subprocess.DEVNULL)
        give_up = monotonic() + 30
        while monotonic() < give_up:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
                    link.sendall(b"PING\r\n")
                    link.recv(100)
                    return
            except OSError:
                sleep(0.02)
        raise AssertionError("redis-server does not answer")

    def ask(self, *words) -> bytes:
        """One command by a connection of its own; the raw reply."""
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as link:
            link.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts))
            return link.recv(65536)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
