"""Plays one side of a recorded session (tools/record_peers.py) against the real other side.

Nothing of the product is used here: handshake, seal and frames are written out as they were when the recording was made, so a
change of the product that an older build would not understand shows.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import struct
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

GREETING, PROOF = 38, 32
SIDES = {"link": ("router", "instance"), "read": ("peer", "reader")}
"""Listener and dialler, by the kind of session."""
CHATTER = {18, 63, 64}
"""Stats and heartbeats come at any time."""


class Entry(NamedTuple):
    session: int
    sender: str
    "dialler or listener"
    what: str
    "frame, or bytes"
    content: bytes

    @property
    def messages(self) -> list[tuple[int, Any]]:
        return [(kind, body) for _, kind, body in messages_of(self.content)]


class Recording:
    def __init__(self, path: Path) -> None:
        read = json.loads(path.read_text())
        self.version: int = read["version"]
        self.secret: bytes = read["secret"].encode()
        self.sessions: list[dict[str, str]] = read["sessions"]
        self.entries = [Entry(*row[:3], base64.b64decode(row[3])) for row in read["frames"]]

    def of_kind(self, kind: str) -> list[int]:
        return [place for place, session in enumerate(self.sessions) if session["kind"] == kind]

    def entries_of(self, *sessions: int) -> list[Entry]:
        return [entry for entry in self.entries if entry.session in sessions]

    def messages(self, wanted: int) -> list[Any]:
        """The bodies of all messages of a kind."""
        frames = [entry for entry in self.entries if entry.what == "frame"]
        return [body for entry in frames for kind, body in entry.messages if kind == wanted]


def messages_of(content: bytes) -> Iterator[tuple[int, int, Any]]:
    """Version, kind and body of each message."""
    at = 0
    while at < len(content):
        magic, version, kind, length = struct.unpack_from("!2sBBI", content, at)
        assert magic == b"BT"
        yield version, kind, msgspec.msgpack.decode(content[at + 8 : at + 8 + length])
        at += 8 + length


class RecordedPeer:
    """One end of a connection. `side`: dialler or listener, the one that is played."""

    def __init__(
        self, recording: Recording, session: int, side: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.recording, self.session, self.side = recording, session, side
        self._reader, self._writer = reader, writer
        self._kind = recording.sessions[session]["kind"]
        self._received: deque[tuple[int, Any]] = deque()
        self._counters = [0, 0]

    async def shake_hands(self) -> None:
        recorded, listener = self.recording.sessions[self.session], self.side == "listener"
        mine = bytes.fromhex(recorded["greeting" if listener else "reply"])
        if listener:
            self._writer.write(mine)
            answer = await self._reader.readexactly(GREETING + PROOF)
            self._exchanged, theirs = mine + answer[:GREETING], answer
            assert answer[GREETING:] == self._derived("proof of the", 1), "the dialler's proof is not the recorded build's"
            self._writer.write(self._derived("proof of the", 0))
        else:
            theirs = await self._reader.readexactly(GREETING)
            self._exchanged = theirs + mine
            self._writer.write(mine + self._derived("proof of the", 1))
            assert await self._reader.readexactly(PROOF) == self._derived("proof of the", 0)
        _, _, newest, oldest = struct.unpack_from("!4sBBB", theirs)
        assert oldest <= self.recording.version <= newest
        keys = [self._derived("key of the", side) for side in (0, 1)]
        self._ours, self._theirs = keys if listener else reversed(keys)

    def _derived(self, what: str, side: int) -> bytes:
        text = f"baton {self._kind}: {what} {SIDES[self._kind][side]}".encode()
        return hmac.digest(self.recording.secret, text + b"\0" + self._exchanged, "sha256")

    def send(self, content: bytes) -> None:
        prefix = struct.pack("!IQ", len(content), self._counters[0])
        self._counters[0] += 1
        self._writer.write(prefix + hmac.digest(self._ours, prefix + content, "sha256") + content)

    def send_bytes(self, content: bytes) -> None:
        self._writer.write(content)

    async def receive_bytes(self, count: int) -> bytes:
        return await self._reader.readexactly(count)

    async def receive(self) -> tuple[int, Any]:
        """Kind and body of the next message that is no chatter."""
        while not self._received:
            prefix, mac = await self._reader.readexactly(12), await self._reader.readexactly(32)
            length, counter = struct.unpack("!IQ", prefix)
            content = await self._reader.readexactly(length)
            assert (mac, counter) == (hmac.digest(self._theirs, prefix + content, "sha256"), self._counters[1])
            self._counters[1] += 1
            for version, kind, body in messages_of(content):
                assert version == self.recording.version, "a message in a version that the recorded build does not read"
                if kind not in CHATTER:
                    self._received.append((kind, body))
        return self._received.popleft()

    def close(self) -> None:
        self._writer.close()


async def dialled(recording: Recording, session: int, port: int) -> RecordedPeer:
    peer = RecordedPeer(recording, session, "dialler", *await asyncio.open_connection("127.0.0.1", port))
    await peer.shake_hands()
    return peer


class Listening:
    """Waits for one connection, and plays the listener of that session."""

    def __init__(self, recording: Recording, session: int) -> None:
        self._recording, self._session = recording, session
        self._came: asyncio.Future[RecordedPeer] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Listening:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        if self._came.done():
            self._came.result().close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._came.set_result(RecordedPeer(self._recording, self._session, "listener", reader, writer))

    async def peer(self) -> RecordedPeer:
        peer = await self._came
        await peer.shake_hands()
        return peer


Compare = Callable[[int, Any, Any], None]


async def play(entries: list[Entry], peers: dict[int, RecordedPeer], before: Callable[[int], Any], same: Compare) -> None:
    """Send what the recorded sides sent, in the recorded order, and wait for what they received. `before(kind)` is awaited
    before a message is waited for, `same(kind, recorded, received)` compares."""
    for entry in entries:
        peer = peers[entry.session]
        if entry.sender == peer.side:
            (peer.send if entry.what == "frame" else peer.send_bytes)(entry.content)
        elif entry.what == "bytes":
            assert await peer.receive_bytes(len(entry.content)) == entry.content
        else:
            for kind, recorded in entry.messages:
                if kind not in CHATTER:
                    await before(kind)
                    received_kind, received = await peer.receive()
                    assert received_kind == kind, (kind, recorded, received_kind, received)
                    same(kind, recorded, received)


def includes(received: Any, recorded: Any, at: str = "") -> list[str]:
    """Where a message that was received does not say what the recorded one said. A later build may append fields."""
    if isinstance(recorded, dict) and isinstance(received, dict):
        missing = [f"{at}.{key} is missing" for key in recorded if key not in received]
        return missing + [
            text for key in recorded if key in received for text in includes(received[key], recorded[key], f"{at}.{key}")
        ]
    if isinstance(recorded, list) and isinstance(received, list):
        short = [f"{at} has {len(received)} of {len(recorded)} fields"] if len(received) < len(recorded) else []
        pairs = enumerate(zip(received, recorded, strict=False))
        return short + [text for place, (mine, its) in pairs for text in includes(mine, its, f"{at}[{place}]")]
    return [] if received == recorded else [f"{at} is {received!r}, not {recorded!r}"]


def same_form(received: Any, recorded: Any, at: str = "") -> list[str]:
    """Where a message that was received has other types than the recorded one, in the recorded fields."""
    if isinstance(recorded, list) and isinstance(received, list) and at.count("[") < 2:
        short = [f"{at} has {len(received)} of {len(recorded)} fields"] if len(received) < len(recorded) else []
        pairs = enumerate(zip(received, recorded, strict=False))
        return short + [text for place, (mine, its) in pairs for text in same_form(mine, its, f"{at}[{place}]")]
    alike = type(received) is type(recorded) or {type(received), type(recorded)} == {int, float}
    return [] if alike else [f"{at} is a {type(received).__name__}, not a {type(recorded).__name__}"]
