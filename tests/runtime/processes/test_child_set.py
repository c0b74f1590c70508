"""The table of children, carried out with real processes: who is started again, who ends whom, and that nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from chaos_server import Process, until
from run_loop import finish

from baton.core import child_silence
from baton.errors import EngineError, PeerError, Unavailable
from baton.protocol.codec import Message, encode
from baton.protocol.control import LoadProgress, Ping
from baton.runtime.processes.child import Child, Loss, RankSet
from baton.runtime.processes.child_set import ChildSet
from baton.runtime.processes.memory_kills import MemoryKillLog
from baton.runtime.processes.process_table import ENGINE_CHILDREN, SUPERVISOR_CHILDREN, ChildRow, Restart
from baton.runtime.up import up_children
from baton.runtime.wire.channel import Channel
from baton.runtime.wire.descriptors import send_descriptor

pytestmark = pytest.mark.usefixtures("child_path")


def row(name: str, restart: Restart = Restart.NEVER, **changes: Any) -> ChildRow[dict[str, Any]]:
    def orders(config: dict[str, Any], life: int) -> dict[str, Any]:
        return {"life": life, **config.get(name, {})}

    return ChildRow(name=name, module="set_child", config=orders, restart=restart, **changes)


class Rig:
    """A parent that notes what it is told."""

    def __init__(self, *rows: ChildRow[dict[str, Any]], restarts_max: int = 3, **orders: dict[str, Any]) -> None:
        self.orders = orders
        self.rows = rows
        self.children: ChildSet[dict[str, Any]] = ChildSet(
            rows, lambda: self.orders, self, restarts_max=restarts_max, backoff_seconds_max=0.1
        )
        self.lives: list[tuple[str, int]] = []
        self.lost: list[tuple[str, str]] = []
        self.over: list[BaseException] = []
        self.processes: list[Process] = []

    async def __aenter__(self) -> Rig:
        for child in self.rows:
            await self.children.start(child.name)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.children.end()
        await asyncio.sleep(0)
        for process in self.processes:
            until(lambda process=process: not process.alive, "no child outlives its parent", 20)

    def on_message(self, child: Child, message: Message) -> None:
        assert type(message) is LoadProgress
        self.lives.append((child.name, message.done))
        child.mark_ready()

    def on_descriptor(self, child: Child, message: Message, fd: int) -> None:
        os.close(fd)

    def on_started(self, child: Child) -> None:
        self.processes.append(Process(child.process.pid))

    def on_lost(self, child: Child, loss: Loss) -> None:
        self.lost.append((child.name, loss.text))

    def on_over(self, error: BaseException) -> None:
        self.over.append(error)

    async def until(self, question: Callable[[], object]) -> None:
        async with asyncio.timeout(40):
            while not question():
                await asyncio.sleep(0.01)

    async def up(self) -> Rig:
        await self.until(lambda: len(self.lives) == len(self.rows))
        self.children.start_is_over()
        return self

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        child = self.children.get(name)
        assert child is not None
        child.process.send_signal(number)


ENDS = {
    ("killed", Restart.ALWAYS),
    ("killed", Restart.IF_KILLED),
    ("exits", Restart.IF_FAILED),
    ("exits", Restart.ORDERED),
    ("fails", Restart.NEVER),
}
"""Every end and every rule, and rules by which that end would be followed by another start."""


@pytest.mark.parametrize(
    ("end", "restart"),
    [
        pytest.param(*pair, marks=() if pair in ENDS else pytest.mark.slow)
        for pair in itertools.product(("killed", "fails", "exits"), Restart)
    ],
)
def test_whatever_ends_before_the_start_is_over_ends_the_start(end: str, restart: Restart):
    orders = {"fails": {"fails": "no such model"}, "exits": {"exits": 3}}.get(end, {})

    async def main() -> None:
        async with Rig(row("a"), row("b", restart), b=orders) as rig:
            if end == "killed":
                await rig.until(lambda: ("b", 1) in rig.lives)
                rig.kill("b")
            await rig.until(lambda: rig.over)
            assert not rig.lost
            words = {"killed": "was killed by SIGKILL", "exits": "exited with status 3"}
            expected = "no such model" if end == "fails" else f"the b process {words[end]} before it was ready"
            assert str(rig.over[0]) == expected

    finish(main())


def test_one_that_is_always_started_again_never_ends_its_parent():
    async def main() -> None:
        async with Rig(row("a"), row("cache", Restart.ALWAYS, descriptors=True), restarts_max=1) as rig:
            await rig.up()
            for life in range(1, 5):
                await rig.until(lambda life=life: ("cache", life) in rig.lives)
                rig.kill("cache")
            await rig.until(lambda: ("cache", 5) in rig.lives)
            assert rig.lost == [("cache", "the cache process was killed by SIGKILL")] * 4
            rig.orders["cache"] = {"exits": 0}
            rig.kill("cache")
            await rig.until(lambda: ("cache", "the cache process exited with status 0") in rig.lost)
            rig.orders["cache"] = {}
            await rig.until(lambda: rig.children.get("cache") is not None)
            assert not rig.over

    finish(main())


@pytest.mark.parametrize("answers", [0, pytest.param(1, marks=pytest.mark.slow), 3])
def test_one_that_hangs_is_killed_and_started_again(monkeypatch: pytest.MonkeyPatch, answers: int):
    monkeypatch.setattr(child_silence, "STARTING", 2)

    async def main() -> None:
        watched = row("a", Restart.IF_KILLED, silent_seconds_max=1.5)
        async with Rig(watched, row("b"), restarts_max=1, a={"answers": answers}) as rig:
            await rig.up()
            await rig.until(lambda: rig.over)
            text = f"the a process said nothing for {1.5 if answers else 3:.0f} s and was killed"
            assert (rig.lost, str(rig.over[0])) == ([("a", text)], text), "it counts towards the end like any other loss"
            assert rig.children.hangs == {"a": 2}, "b is not pinged"

    finish(main())


def test_the_seconds_in_which_a_child_hung_are_not_seconds_in_which_it_was_ready():
    """Else a child that hangs as soon as it is ready would be started again for ever."""

    async def main() -> None:
        nothing: Any = None
        child = Child(row("a"), 1, nothing, nothing, None, nothing)
        child.mark_ready()
        child.silent_seconds = 30.0
        assert child.ready_seconds < 0.0

    finish(main())


def test_one_that_is_started_again_if_killed():
    async def main() -> None:
        async with Rig(row("a", Restart.IF_KILLED), restarts_max=2) as rig:
            await rig.up()
            for life in (1, 2, 3):
                await rig.until(lambda life=life: ("a", life) in rig.lives)
                rig.kill("a")
            await rig.until(lambda: rig.over)
            assert len(rig.lost) == 2
            assert str(rig.over[0]) == "the a process was killed by SIGKILL"

    finish(main())


def test_one_that_is_started_again_if_it_failed_however_often():
    """A router that was lost six times in a minute ended all instances of its cluster."""

    async def main() -> None:
        async with Rig(row("router", Restart.IF_FAILED), restarts_max=2) as rig:
            await rig.up()
            rig.orders["router"] = {"exits": 1}
            rig.kill("router")
            failed = ("router", "the router process exited with status 1")
            await rig.until(lambda: rig.lost.count(failed) == 4)
            assert not rig.over

    finish(main())


def test_one_that_ended_well_did_not_fail():
    async def main() -> None:
        async with Rig(row("router", Restart.IF_FAILED)) as rig:
            await rig.up()
            rig.orders["router"] = {"exits": 0}
            rig.kill("router")
            await rig.until(lambda: rig.over)
            assert [why for _, why in rig.lost] == ["the router process was killed by SIGKILL"]

    finish(main())


def test_the_router_of_a_cluster_is_started_again_if_it_failed():
    (*_, router) = up_children(["mixed-0"])
    assert (router.name, router.restart) == ("router", Restart.IF_FAILED)


def test_one_that_ended_by_itself_is_not():
    async def main() -> None:
        async with Rig(row("a", Restart.IF_KILLED)) as rig:
            await rig.up()
            rig.orders["a"] = {"exits": 1}
            rig.kill("a")
            await rig.until(lambda: rig.over)
            assert isinstance(rig.over[0], Unavailable)
            assert str(rig.over[0]) == "the a process exited with status 1"

    finish(main())


def test_an_ordered_one_is_the_machines_business_and_dead_before_the_next_lives():
    async def main() -> None:
        async with Rig(row("worker", Restart.ORDERED)) as rig:
            await rig.up()

            async def wanted() -> bool:
                assert not rig.processes[0].alive
                return True

            rig.children.replace("worker", 7, wanted)
            assert rig.children.get("worker") is None
            await rig.until(lambda: ("worker", 7) in rig.lives)
            assert not rig.lost
            rig.kill("worker")
            await rig.until(lambda: rig.lost)
            await asyncio.sleep(0.2)
            assert rig.children.get("worker") is None
            assert not rig.over

    finish(main())


def peers_row() -> ChildRow[dict[str, Any]]:
    return row("front", peers=("engine",), descriptors=True)


def test_a_peer_that_is_started_again_is_handed_over():
    """Both ends talk: what the engine sends to `front` comes back in capitals, before and after."""

    async def main() -> None:
        async with Rig(row("engine", Restart.IF_KILLED), peers_row()) as rig:
            await rig.up()
            front = Process(rig.children.get("front").process.pid)
            sockets, ours = front.fds, len(os.listdir("/proc/self/fd"))
            rig.kill("engine")
            await rig.until(lambda: ("engine", 2) in rig.lives)
            await rig.until(lambda: front.fds == sockets)  # the old one is closed, the new one is there
            assert len(os.listdir("/proc/self/fd")) == ours, "what was handed over is not kept"
            assert rig.children.get("front") is not None
            assert not rig.over

    finish(main())


def test_of_two_that_talk_to_each_other_the_one_that_did_not_end_well_is_to_blame():
    async def main() -> None:
        async with Rig(row("engine"), peers_row(), engine={"follows": True}) as rig:
            await rig.up()
            rig.kill("front", signal.SIGTERM)
            await rig.until(lambda: rig.over)
            assert str(rig.over[0]) == "the front process was killed by SIGTERM"
        async with Rig(row("engine"), peers_row(), front={"follows": True}) as rig:
            await rig.up()
            rig.kill("engine", signal.SIGTERM)
            await rig.until(lambda: rig.over)
            assert str(rig.over[0]) == "the engine process was killed by SIGTERM"

    finish(main())


def test_the_one_that_ended_well_is_not_blamed_for_being_seen_first():
    async def main() -> None:
        async with Rig(row("engine"), peers_row(), engine={"hangs_up": 3}, front={"follows": True}) as rig:
            await rig.up()
            rig.children.get("engine").control.send(Ping(1))
            await rig.until(lambda: rig.over)
            assert str(rig.over[0]) == "the engine process exited with status 3"

    finish(main())


def test_a_descriptor_is_handed_to_a_child():
    near, far = socket.socketpair()
    near.settimeout(20)

    async def main() -> None:
        async with Rig(row("cache", descriptors=True)) as rig:
            await rig.up()
            send_descriptor(rig.children.get("cache").descriptors, LoadProgress(0, 0), far.fileno())
            far.close()
            near.sendall(b"hello")
            assert await asyncio.to_thread(near.recv, 100) == b"HELLO"
        near.close()

    finish(main())


def test_a_child_that_sends_something_else_than_a_descriptor_is_ended():
    async def main() -> None:
        async with Rig(row("cache", Restart.ALWAYS, descriptors=True)) as rig:
            await rig.up()
            rig.orders["cache"] = {"garbage": True}
            rig.kill("cache")
            words = ("cache", "0 descriptors came where one was expected")
            await rig.until(lambda: words in rig.lost)
            rig.orders["cache"] = {}
            assert not rig.over

    finish(main())


def test_after_a_contradiction_of_ranks_no_message_of_any_of_them_is_taken():
    """What rank 0 has already sent may rest on the fault, and is read in the same turn of the loop."""

    async def main() -> None:
        rig = Rig(row("worker"))
        taken: list[int] = []

        def on_message(child: Child, message: Message) -> None:
            if child.rank:
                raise PeerError("ranks 0 and 1 computed different results of step 1")
            taken.append(message.done)  # type: ignore[union-attr]

        rig.on_message = on_message  # type: ignore[method-assign]
        pairs = [socket.socketpair() for _ in range(2)]
        processes = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
        channels = [await Channel.open(ours) for ours, _ in pairs]
        nothing: Any = None
        ranks = [Child(rig.rows[0], 1, processes[rank], channels[rank], None, MemoryKillLog(), rank) for rank in range(2)]
        RankSet(rig.rows[0], 1, ranks, nothing)
        watches = [asyncio.create_task(rig.children._watch(rank)) for rank in ranks]
        await asyncio.sleep(0)
        pairs[0][1].sendall(encode(LoadProgress(1, 9)))
        await rig.until(lambda: taken == [1])
        for rank in (1, 0):
            feed(channels[rank], LoadProgress(2, 9))
        await asyncio.gather(*watches)
        assert taken == [1]
        assert [process.poll() for process in processes] == [-signal.SIGKILL] * 2
        await rig.children.end()

    finish(main())


def feed(channel: Channel, message: Message) -> None:
    """As if its socket had become readable."""
    frames, content = channel._frames, encode(message)
    frames.get_buffer(len(content))[: len(content)] = content
    frames.buffer_updated(len(content))


def test_a_child_that_cannot_be_started_again_ends_the_parent(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        async with Rig(row("a", Restart.ALWAYS, descriptors=True)) as rig:
            await rig.up()
            monkeypatch.setattr("sys.executable", "/nowhere/python")
            rig.kill("a")
            await rig.until(lambda: rig.over)
            assert isinstance(rig.over[0], EngineError)
            assert "another cannot be started" in str(rig.over[0])

    finish(main())


def test_every_process_whose_parent_does_not_watch_its_work_is_pinged():
    tables = (SUPERVISOR_CHILDREN, ENGINE_CHILDREN, up_children(["d-0"]))
    limits = {entry.name: entry.silent_seconds_max for table in tables for entry in table}
    assert limits == {"engine": 30.0, "front": 30.0, "worker": None, "cache": None, "d-0": 30.0, "router": 30.0}


def test_every_name_in_the_tables_is_said_once_and_peers_come_first():
    for table in (SUPERVISOR_CHILDREN, ENGINE_CHILDREN):
        names = [entry.name for entry in table]
        assert len({*names}) == len(names)
        for place, entry in enumerate(table):
            assert {*entry.peers} <= {*names[:place]}
            assert entry.descriptors or not entry.peers, "a peer that is started again could not be handed over"
