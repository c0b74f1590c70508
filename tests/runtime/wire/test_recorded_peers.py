"""Peers of an earlier build, as recorded, talk to this one: router and instances, and the two ends of a KV transfer.

The same again in a process whose build speaks one version more: a build of version n + 1 talks to one of version n.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from recorded_peer import Entry, Listening, Recording, dialled, includes, play, same_form
from run_loop import finish

from baton.addresses import Address
from baton.config import RouterConfig, WireConfig
from baton.core.cluster.router import Router
from baton.kvcache.storage.backend import Deadline
from baton.kvcache.tcp import Tcp
from baton.kvpool.copies import CopySpan
from baton.kvpool.layout import KVLayout
from baton.kvpool.pool import KVPool
from baton.protocol.codec import MESSAGES
from baton.protocol.control import InstanceReady, InstanceStats
from baton.protocol.ids import PoolIncarnation, RequestId
from baton.protocol.instance import Heartbeat, InstanceHello
from baton.protocol.output import Delta
from baton.protocol.request import GenerateRequest
from baton.protocol.versions import VERSIONS
from baton.runtime.engine.callers import Caller
from baton.runtime.engine.router_links import RouterLinks
from baton.runtime.router.router_client import RouterClient
from baton.runtime.wire.link_server import LinkServer, listen_at
from baton.trust.secret import Secret

DATA = Path(__file__).parents[2] / "data" / "peers"
RECORDINGS = [Recording(path) for path in sorted(DATA.glob("peers-*.json"))]
RAISED = Path(__file__).with_name("raised_version.py")
KINDS = {message.__name__: kind for kind, message in MESSAGES.items()}
TIMES = ("[0].timeout_seconds is", "[0].age_seconds is")
CHANGING = {KINDS["RouterHello"]: ("[2]", "[4]"), KINDS["Reserve"]: TIMES, KINDS["Prefill"]: TIMES}
"""Fields that differ between runs, by kind: lapse_seconds (longer here, for slow machines), the build, measured times."""

recorded = pytest.mark.parametrize("recording", RECORDINGS, ids=lambda recording: f"version {recording.version}")


def test_every_version_that_this_build_reads_is_recorded():
    """tools/record_peers.py records the present one. A version whose recording fails is one that this build does not read:
    raise `oldest`, and the note in the changelog with it."""
    assert {recording.version for recording in RECORDINGS} >= set(range(VERSIONS.oldest, VERSIONS.newest + 1)) - {RAISED_TO}


RAISED_TO = VERSIONS.newest if "raised_version" in sys.modules else 0


def test_the_next_build_talks_to_the_recorded_ones():
    """The whole module again, with VERSIONS raised before anything else is imported."""
    if RAISED_TO:
        pytest.skip("this is the next build")
    command = [sys.executable, str(RAISED), __file__]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"speaks {VERSIONS.oldest} to {VERSIONS.newest + 1}" in ran.stdout


def require_same(kind: int, before: Any, now: Any) -> None:
    differing = [text for text in includes(now, before) if not text.startswith(CHANGING.get(kind, ()))]
    assert not differing, (MESSAGES[kind].__name__, differing)


# Recorded instances and the router of this build


def request_of(recording: Recording) -> tuple[str, GenerateRequest]:
    """The router's name, and the client's request."""
    request = msgspec.convert(recording.messages(KINDS["Reserve"])[0][0], GenerateRequest)
    router, _, name = request.id.partition(".")
    return router, msgspec.structs.replace(request, id=RequestId(name))


def tokens_of(recording: Recording) -> list[int]:
    return [token for emit in recording.messages(KINDS["Emit"]) for *_, token in emit[0]]


@recorded
def test_recorded_instances_serve_a_request_of_this_router(recording: Recording):
    """A prompt is handed over from one to the other, and both are paused and resumed."""
    given: list[Delta] = []

    async def main() -> None:
        name, request = request_of(recording)
        patient = {"lapse_seconds": 100.0, "suspect_seconds": 50.0, "lease_seconds": 10.0}
        config = RouterConfig(handoff="always", handoff_tokens_min=0, **patient)
        client = RouterClient(Router(config), config, name=name)
        sock = listen_at(Address(host="127.0.0.1"))
        tasks: list[asyncio.Task[None]] = []
        secret = Secret(recording.secret)
        server = LinkServer(sock, secret, lambda link, _: tasks.append(asyncio.create_task(client.serve_instance(link))))
        tasks.append(asyncio.create_task(server.serve()))
        await asyncio.sleep(0)  # it listens
        port = sock.getsockname()[1]
        peers = {session: await dialled(recording, session, port) for session in recording.of_kind("link")}
        done: dict[int, asyncio.Task[None]] = {}

        async def before(kind: int) -> None:
            """Do what a client or an administrator did in the recording."""
            if kind == KINDS["Reserve"] and kind not in done:
                while not all(instance.stats.blocks_total for instance in client.sessions):
                    await asyncio.sleep(0.001)
                done[kind] = asyncio.create_task(client.generate(request, given.append))
            elif kind == KINDS["PauseInstance"] and kind not in done:
                await done[KINDS["Reserve"]]
                done[kind] = asyncio.create_task(client.pause(10.0))
            elif kind == KINDS["ResumeInstance"] and kind not in done:
                await done[KINDS["PauseInstance"]]
                done[kind] = asyncio.create_task(client.resume())

        await play(recording.entries_of(*peers), peers, before, require_same)
        await asyncio.gather(*done.values())
        assert client.view().counters["handoff_adopted"] == 1
        for peer in peers.values():
            peer.close()
        client.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    finish(main())
    assert [token for delta in given for token in delta.tokens] == tokens_of(recording)
    assert [delta.ended.reason for delta in given if delta.ended is not None] == ["length"]


# A recorded router and an instance of this build


class Facts:
    """The engine that the router's messages are for."""

    def __init__(self, hello: InstanceHello) -> None:
        self._hello = hello
        self.received: list[Any] = []

    def reached(self, host: str) -> bool:
        return False

    def hello(self) -> InstanceHello:
        return self._hello

    def beat(self) -> Heartbeat:
        return Heartbeat(blocks_available=64, slots_free=4)

    def stats(self) -> InstanceStats:
        return InstanceStats(blocks_total=64)

    # In the place of Callers

    def add(self, send: Any) -> Caller:
        return Caller("", send)

    def remove(self, caller: Caller) -> None:
        pass

    def on_message(self, caller: Caller, message: Any) -> None:
        self.received.append(message)


@recorded
def test_an_instance_of_this_build_understands_a_recorded_router(recording: Recording):
    """What it dials with has the recorded form; every order and request arrives as the recorded router meant it."""
    session = recording.of_kind("link")[-1]
    entries = [entry for entry in recording.entries_of(session) if entry.sender == "listener"]
    meant = [(kind, body) for entry in entries for kind, body in entry.messages if kind not in (KINDS["RouterHello"], 63, 64)]
    theirs = next(body for body in recording.messages(KINDS["InstanceHello"]) if body[2] == "decode")
    ready = InstanceReady(64, 4, 4, 258, 256, 512, {"top_p": 0.5}, b"i" * 32, {"role": "decode"}, {"weights": "12"})
    facts = Facts(InstanceHello("d0", 2**62, "decode", ready, b"l" * 32, ("unix:/p",), "http://h", 7, 9.0, "/model"))

    async def main() -> None:
        async with Listening(recording, session) as listening:
            links = RouterLinks((f"tcp://127.0.0.1:{listening.port}",), Secret(recording.secret), facts, facts)  # type: ignore[arg-type]
            running = asyncio.create_task(links.run())
            peer = await listening.peer()
            kind, hello = await peer.receive()
            assert kind == KINDS["InstanceHello"]
            assert not same_form(hello, theirs)
            for entry in entries:
                peer.send(entry.content)
            while len(facts.received) < len(meant):
                assert not running.done()
                await asyncio.sleep(0.001)
            assert links.counts["opened"] == 1
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    finish(main())
    for message, (kind, body) in zip(facts.received, meant, strict=True):
        assert type(message) is MESSAGES[kind]
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
        assert not includes(again, body)


# The two ends of a transfer


class Transfer:
    """The recorded pool, with the blocks that were read. A later build may name layouts otherwise."""

    def __init__(self, recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
        (self.session,) = recording.of_kind("read")
        self.entries: list[Entry] = recording.entries_of(self.session)
        self.incarnation, self.fingerprint, *_ = recording.messages(KINDS["ReadPool"])[0]
        self.blocks: int = recording.messages(KINDS["PoolReady"])[0][2]
        self.runs = [run for body in recording.messages(KINDS["ReadBlocks"]) for run in body[0]]
        content = b"".join(entry.content for entry in self.entries if entry.what == "bytes")
        layout = KVLayout(layers=2, kv_heads=2, head_dim=8, block_size=4, dtype="float32")
        assert len(content) == sum(count for _, count in self.runs) * layout.block_bytes
        self.content = np.frombuffer(content, np.float32).reshape(-1, layout.block_numbers)
        monkeypatch.setattr(KVLayout, "fingerprint", lambda layout: self.fingerprint)
        self.layout = layout

    def places(self) -> list[int]:
        return [first + place for first, count in self.runs for place in range(count)]


@recorded
def test_a_recorded_reader_reads_from_this_build(recording: Recording, monkeypatch: pytest.MonkeyPatch):
    transfer = Transfer(recording, monkeypatch)
    pool = KVPool.create(transfer.layout, transfer.blocks)
    pool.incarnation = PoolIncarnation(transfer.incarnation)
    pool.data[transfer.places()] = transfer.content

    async def main() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        tcp = Tcp(Secret(recording.secret), wire=WireConfig())
        tcp.listen(listener)
        tcp.attach(pool)
        peer = await dialled(recording, transfer.session, listener.getsockname()[1])

        async def nothing(kind: int) -> None:
            pass

        await play(transfer.entries, {transfer.session: peer}, nothing, require_same)
        peer.close()
        tcp.close()
        await asyncio.sleep(0.01)

    finish(main())
    pool.close()


@recorded
def test_this_build_reads_from_a_recorded_peer(recording: Recording, monkeypatch: pytest.MonkeyPatch):
    transfer = Transfer(recording, monkeypatch)
    pool = KVPool.create(transfer.layout, transfer.blocks)
    spans, at = [], 3
    for first, count in transfer.runs:
        spans.append(CopySpan(first, at, count))
        at += count

    async def main() -> int:
        async with Listening(recording, transfer.session) as listening:
            tcp = Tcp(Secret(recording.secret), wire=WireConfig())
            tcp.attach(pool)
            playing = asyncio.create_task(played(listening))
            address, incarnation = f"tcp://127.0.0.1:{listening.port}", PoolIncarnation(transfer.incarnation)
            peer = await tcp.open(address, incarnation, transfer.fingerprint, lambda: None)
            read = await peer.read(spans, pool, Deadline.after(60), lambda: True)
            await playing
            peer.close()
            tcp.close()
            return read.blocks

    async def played(listening: Listening) -> None:
        async def nothing(kind: int) -> None:
            pass

        await play(transfer.entries, {transfer.session: await listening.peer()}, nothing, require_same)

    assert finish(main()) == len(transfer.content)
    assert (pool.data[3 : 3 + len(transfer.content)] == transfer.content).all()
    pool.close()
