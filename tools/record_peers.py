"""Records the sessions of a small cluster of this build: router and instances, and one instance that reads another's KV pool.

    python tools/record_peers.py tests/data/peers

writes peers-VERSION.json there. tests/runtime/wire/test_recorded_peers.py plays such a recording against later builds: a
version of the wire protocol is supported for as long as its recording passes. Record once per version, before it is raised.

The cluster is real: `baton router`, a prefill and a decode instance with a tiny model, one request with a hand-off over TCP,
then a pause. Proxies between them read the frames, which are authenticated and not encrypted.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from baton.protocol.versions import VERSIONS

ROOT = Path(__file__).parent.parent
SECRET = "0123456789abcdef" * 4
GREETING, PROOF, SEAL, HEADER = 38, 32, 44, 8
BLOCKS_FOLLOW = 47
CHATTER = {18, 63, 64}
"""Kinds of heartbeats and stats. They come at any time, so a recording keeps one of each per session."""
PROMPT = "Pack my box with five dozen liquor jugs"
REQUEST = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": 3, "logprobs": 1, "ignore_eos": True, "stream": False}
START_SECONDS = 120.0


class Session:
    """One connection through a proxy."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.greeting = self.reply = b""
        self.kept: set[int] = set()


class Recorder:
    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.frames: list[tuple[Session, str, str, bytes]] = []
        "(session, sender, frame or bytes, content), in order of arrival."
        self.stopped = False

    def add(self, session: Session, sender: str, content: bytes) -> int:
        """Keep a sealed frame's content. Returns how many raw bytes follow it."""
        kinds = [kind for kind, _ in messages_of(content)]
        if not self.stopped and any(kind not in CHATTER or kind not in session.kept for kind in kinds):
            session.kept.update(kinds)
            self.frames.append((session, sender, "frame", content))
        return next((msgspec.msgpack.decode(body)[0] for kind, body in messages_of(content) if kind == BLOCKS_FOLLOW), 0)

    async def proxy(self, kind: str, target: int) -> int:
        """Listen on a free port for connections to `target`. Returns the port."""

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                there = await asyncio.open_connection("127.0.0.1", target)
            except OSError:
                writer.close()
                return
            session = Session(kind)
            ends = (self._from_listener(session, there[0], writer), self._from_dialler(session, reader, there[1]))
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*ends, return_exceptions=True)
            for end in (writer, there[1]):
                end.close()

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    async def _from_listener(self, session: Session, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        session.greeting = await passed(source, target, GREETING)
        await passed(source, target, PROOF)
        self.sessions.append(session)
        await self._frames(session, "listener", source, target)

    async def _from_dialler(self, session: Session, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        session.reply = (await passed(source, target, GREETING + PROOF))[:GREETING]
        await self._frames(session, "dialler", source, target)

    async def _frames(self, session: Session, sender: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while True:
            (length,) = struct.unpack_from("!I", seal := await source.readexactly(SEAL))
            content = await source.readexactly(length)
            follow = self.add(session, sender, content)
            target.write(seal + content)
            if follow:
                self.frames.append((session, sender, "bytes", await passed(source, target, follow)))

    def as_json(self) -> dict[str, Any]:
        sessions = [{"kind": one.kind, "greeting": one.greeting.hex(), "reply": one.reply.hex()} for one in self.sessions]
        places = {one: place for place, one in enumerate(self.sessions)}
        frames = [
            [places[session], sender, what, base64.b64encode(content).decode()]
            for session, sender, what, content in self.frames
            if session in places
        ]
        return {"version": VERSIONS.newest, "secret": SECRET, "request": REQUEST, "sessions": sessions, "frames": frames}


async def passed(source: asyncio.StreamReader, target: asyncio.StreamWriter, count: int) -> bytes:
    content = await source.readexactly(count)
    target.write(content)
    return content


def messages_of(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        _, _, kind, length = struct.unpack_from("!2sBBI", content, at)
        yield kind, content[at + HEADER : at + HEADER + length]
        at += HEADER + length


# The cluster


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running(*arguments: object) -> Iterator[None]:
    command = [sys.executable, "-m", "baton.cli.main", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def ask(port: int, path: str, body: Any = None) -> Any:
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", content, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


async def until(question: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            if await asyncio.to_thread(question):
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the cluster does not start")


async def record(folder: Path) -> Recorder:
    sys.path.append(str(ROOT / "tests" / "chaos"))
    from chaos_model import make_model

    model, secret, recorder = make_model(folder / "model"), folder / "secret", Recorder()
    secret.touch(0o600)
    secret.write_text(SECRET)
    port, cluster, transfer = free_port(), free_port(), free_port()
    router, reads = await recorder.proxy("link", cluster), await recorder.proxy("read", transfer)
    sizes = ("--threads", 1, "--kv-blocks", 64, "--block-size", 4, "--slots", 4, "--kv-cache-dtype", "float32")
    common = ("--cluster-secret", secret, "--served-model-name", "tiny")
    join = ("--router", f"tcp://127.0.0.1:{router}", *sizes, *common)
    handoff = ("--handoff", "always", "--handoff-tokens-min", 0)
    announce = ("--transfer-address", f"127.0.0.1:{transfer}", "--transfer-announce", f"127.0.0.1:{reads}")
    with ExitStack() as stack:
        stack.enter_context(running("router", model, "--port", port, "--cluster-port", cluster, *handoff, *common))
        stack.enter_context(
            running("serve", model, "--role", "prefill", "--name", "p0", "--port", free_port(), *announce, *join)
        )
        stack.enter_context(running("serve", model, "--role", "decode", "--name", "d0", "--port", free_port(), *join))
        await until(lambda: len(ask(port, "/v1/cluster")["instances"]) == 2)
        for instance in ask(port, "/v1/cluster")["instances"]:  # shared memory is preferred where it can be reached
            for address in " ".join(instance["peers"]).split():
                if address.startswith("unix:"):
                    Path(address.removeprefix("unix:")).unlink()
        answer = await asyncio.to_thread(ask, port, "/v1/completions", REQUEST)
        print(answer["choices"][0]["text"], answer["usage"])
        await asyncio.to_thread(ask, port, "/v1/pause", {"drain_seconds": 10})
        await asyncio.to_thread(ask, port, "/v1/resume", {})
        counters = ask(port, "/v1/cluster")["counters"]
        assert counters.get("handoff_adopted") == 1, counters
        recorder.stopped = True
    return recorder


def main() -> None:
    folder = Path(tempfile.gettempdir()) / "baton-recording"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        recorded = asyncio.run(record(folder)).as_json()
    finally:
        shutil.rmtree(folder)
    target = Path(sys.argv[1]) / f"peers-{VERSIONS.newest}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) for row in recorded.pop("frames")]
    head = json.dumps(recorded, indent=1).removesuffix("\n}")
    target.write_text(f'{head},\n "frames": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")
    print(f"{target}: {len(recorded['sessions'])} sessions, {len(lines)} frames, {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
