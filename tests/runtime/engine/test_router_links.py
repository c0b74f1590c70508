"""An engine and its routers: real sessions over TCP, a real engine on this loop, worker processes without a model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_rig import Rig
from fake_router import FakeRouter, Visit
from fake_worker import expected
from link_rig import SECRET
from run_loop import finish

from baton.addresses import reachable_url
from baton.config import EngineConfig, WireConfig
from baton.core import redial_times
from baton.core.kv.marks import KEY_BYTES
from baton.protocol.codec import encode
from baton.protocol.control import (
    AbortRequest,
    ClearCache,
    InstanceStats,
    ModeReport,
    OrderAnswer,
    PauseInstance,
    Ping,
    ResumeInstance,
    SleepInstance,
    WakeInstance,
)
from baton.protocol.ids import RequestId
from baton.protocol.instance import CachedKeys, InstanceHello
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest, SamplingParams
from baton.protocol.versions import CACHED_KEYS
from baton.runtime.engine import router_links
from baton.runtime.engine.process import Engine
from baton.trust.seal import Sealer

pytestmark = pytest.mark.usefixtures("child_path")


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET.key)
    return path


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redial_times, "REFUSED_SECONDS", 0.5)
    monkeypatch.setattr(redial_times, "RETRY_SECONDS_MAX", 0.5)


def rig_of(secret_file: Path, *routers: FakeRouter | str, **changes: Any) -> Rig:
    addresses = tuple(router if isinstance(router, str) else str(router.address) for router in routers)
    member = {"routers": addresses, "cluster_secret": str(secret_file), "name": "node-1", "drain_seconds_max": 0.1}
    return Rig(changes.pop("orders", None), engine={**member, **changes.pop("engine", {})}, **changes)


def test_an_instance_registers_beats_and_serves(secret_file: Path):
    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router, engine={"health_url": "http://me"}) as rig:
            visit = await router.visit()
            hello = visit.hello
            assert isinstance(hello, InstanceHello)
            assert (hello.name, hello.role, hello.health_url, hello.layout) == ("node-1", "mixed", "http://me", b"fake")
            assert hello.ready == rig.engine._reporting.ready
            visit.ask("a")
            await rig.until(lambda: "a" in visit.ended)
            assert visit.tokens["a"] == expected(5, 12)
            visit.ask("never", prompt=4000)
            await rig.until(lambda: visit.refused.get("never") == "never_fits")
            visit.link.send(Ping(7))
            await rig.until(lambda: visit.pong(7) is not None)
            assert visit.pong(7).fault == ""
            seen = len(visit.beats)
            await rig.until(lambda: len(visit.beats) >= seen + 3)
            beat = visit.beats[-1]
            assert beat.fault == ""
            assert (beat.blocks_available, beat.slots_free, beat.decoding) == (64, 4, 0)
            assert beat.token_seconds > 0
            await rig.until(lambda: visit.stats.output_tokens == 12)
            assert not rig.tokens, "the front hears nothing of it"
            assert rig.stats.output_tokens == 12, "but its numbers"
        assert rig.running.exception() is None

    finish(main())


def keys_at(visit: Visit) -> list[bytes]:
    """What the router knows of the cache."""
    known: dict[bytes, None] = {}
    for message in visit.all(CachedKeys):
        if message.whole:
            known.clear()
        removed, added = [
            [part[at : at + KEY_BYTES] for at in range(0, len(part), KEY_BYTES)] for part in (message.removed, message.added)
        ]
        for key in removed:
            known.pop(key, None)
        known.update(dict.fromkeys(added))
    return list(known)


def test_routers_that_ask_for_digests_are_sent_what_is_cached(secret_file: Path):
    """The first message is the whole list, then changes follow the heartbeats. A router of an earlier build gets none."""

    async def main() -> None:
        async with FakeRouter(SECRET) as router, FakeRouter(SECRET, name="old") as old:
            router.capabilities = (CACHED_KEYS,)
            async with rig_of(secret_file, router, old) as rig:
                visit, other = await router.visit(), await old.visit()
                assert CACHED_KEYS in visit.hello.capabilities
                await rig.until(lambda: visit.all(CachedKeys) == [CachedKeys(True)])
                visit.ask("a", prompt=40)
                await rig.until(lambda: "a" in visit.ended and len(keys_at(visit)) >= 4)
                digest = rig.engine._instance.board.digest
                await rig.until(lambda: sorted(keys_at(visit)) == sorted(digest.keys()))
                visit.link.send(ClearCache(1))
                await rig.until(lambda: visit.answer(1) is not None and not keys_at(visit))
                assert not other.all(CachedKeys)
                visit.link.close()
                again = await router.visit(lambda later: bool(later.all(CachedKeys)) and later is not visit)
                assert again.all(CachedKeys)[0].whole
        assert rig.running.exception() is None

    finish(main())


def test_the_front_knows_at_once_whether_a_session_is_open(secret_file: Path):
    """/ready of an instance shows it, and no request may have come by then."""

    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router) as rig:
            visit = await router.visit()
            await rig.until(lambda: rig.stats.routers == 1)
            router.greets = False
            visit.link.close()
            await rig.until(lambda: rig.stats.routers == 0)
            router.greets = True
            await rig.until(lambda: rig.stats.routers == 1)

    finish(main())


def test_an_engine_needs_no_front(secret_file: Path):
    async def main() -> None:
        async with FakeRouter(SECRET) as router:
            rig = rig_of(secret_file, router)
            rig.has_front = False
            async with rig:
                visit = await router.visit()
                visit.ask("a")
                await rig.until(lambda: "a" in visit.ended)
                assert visit.tokens["a"] == expected(5, 12)
            assert rig.running.exception() is None

    finish(main())


def test_the_front_is_served_beside_routers(secret_file: Path):
    """With the same ids and the same numbers, at the same time."""

    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router) as rig:
            visit = await router.visit()
            rig.ask("a", prompt=5)
            visit.ask("a", prompt=9)
            rig.front.send(Ping(1))
            visit.link.send(Ping(1))
            await rig.until(lambda: "a" in visit.ended and "a" in rig.ended and visit.pong(1) is not None)
            assert rig.tokens["a"] == expected(5, 12)
            assert visit.tokens["a"] == expected(9, 12)

    finish(main())


def test_a_batch_and_an_abort_over_a_session(secret_file: Path):
    requests = [
        GenerateRequest(id=RequestId(f"p{number}"), prompt=(1,) * (number + 1), sampling=SamplingParams(max_tokens=number + 1))
        for number in range(4)
    ]

    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router, orders={"stalls_at": 30}) as rig:
            visit = await router.visit()
            visit.link.send(GenerateBatch.of(requests))
            await rig.until(lambda: len(visit.ended) == 4)
            assert [visit.tokens[f"p{n}"] for n in range(4)] == [expected(n + 1, n + 1) for n in range(4)]
            visit.ask("long", max_tokens=200)
            visit.link.send(AbortRequest(RequestId("nobody")))
            visit.link.send(AbortRequest(RequestId("long")))
            await rig.until(lambda: "long" in visit.ended)
            assert visit.ended["long"].reason is FinishReason.ABORT

    finish(main())


def test_one_whose_name_may_be_that_of_its_earlier_life_dials_when_the_router_says(
    secret_file: Path, monkeypatch: pytest.MonkeyPatch
):
    """It waited as long as one that does not fit, though the router would have let it in after a second."""
    monkeypatch.setattr(redial_times, "REFUSED_SECONDS", 30.0)

    async def main() -> None:
        async with FakeRouter(SECRET, refusal="another instance named node-1") as router:
            router.retry_seconds = 0.2
            async with rig_of(secret_file, router) as rig, asyncio.timeout(12):
                await rig.until(lambda: rig.engine.stats().router_refusal)
                router.refusal = ""
                await router.visit()

    finish(main())


def test_one_that_is_refused_says_why_and_tries_again(secret_file: Path, caplog: pytest.LogCaptureFixture):
    async def main() -> None:
        async with FakeRouter(SECRET, refusal="another model") as router, rig_of(secret_file, router) as rig:
            await rig.until(lambda: len(router.visits) >= 2)
            assert all(not visit.beats for visit in router.visits)
            await rig.until(lambda: rig.engine.stats().router_sessions.get("refused", 0) >= 1)
            await rig.until(lambda: rig.stats.router_refusal == "another model")
            router.refusal = ""
            visit = await router.visit()
            await rig.until(lambda: rig.stats.router_refusal == "")
            told = [each.hello.refused for each in router.visits if each.hello is not None]
            assert (told[0], told[-1]) == (False, True), "a router that is started again lets others say what fits"
            assert visit.hello is not None
            visit.ask("a")
            await rig.until(lambda: "a" in visit.ended)
        assert [record for record in caplog.records if "refuses us: another model" in record.getMessage()]

    finish(main())


def test_a_router_that_comes_later_or_has_another_secret_is_dialled_forever(secret_file: Path, tmp_path: Path):
    async def main() -> None:
        async with FakeRouter(type(SECRET)(b"other" * 10)) as stranger, FakeRouter(SECRET) as router:
            with _closed_port() as port:
                rig = rig_of(secret_file, f"127.0.0.1:{port}", stranger, router)
                async with rig:
                    await rig.until(lambda: stranger.server.counts["secret"] >= 3)
                    assert not stranger.visits
                    visit = await router.visit()  # the others do not hold it up
                    visit.ask("a")
                    await rig.until(lambda: "a" in visit.ended)
                    stats = rig.engine.stats()
                    assert (stats.routers, stats.router_sessions["opened"]) == (1, 1)
                    assert stats.router_sessions["unreachable"] >= 4

    finish(main())


@contextmanager
def _closed_port() -> Iterator[int]:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


# The end of a session


def test_what_a_session_asked_for_ends_with_it_and_nothing_of_another(secret_file: Path):
    """The worker stands still, so that all of it is under way when the session is cut."""

    async def main() -> None:
        orders = {"works_at": 8, "done": str(secret_file.parent / "done")}
        async with FakeRouter(SECRET) as one, FakeRouter(SECRET) as other:  # noqa: SIM117
            async with rig_of(secret_file, one, other, orders=orders) as rig:
                first, second = await one.visit(), await other.visit()
                for number in range(6):  # four run, two wait
                    first.ask(f"r{number}", max_tokens=100)
                second.ask("r0", max_tokens=40)  # the same id, and it is another request
                await rig.until(lambda: rig.stats.requests_open == 7)
                first.link.send(PauseInstance(5, 30.0))
                first.link.close()
                await rig.until(lambda: rig.engine.open_requests() == ["2|r0"] or rig.engine.open_requests() == ["3|r0"])
                (secret_file.parent / "done").touch()
                second.link.send(ResumeInstance(5))
                await rig.until(lambda: "r0" in second.ended)
                assert second.tokens["r0"] == expected(5, 40)
                assert list(second.tokens) == ["r0"]
                assert second.answer(5) == OrderAnswer(5, "done")
                await rig.until(lambda: not (rig.stats.requests_open or rig.stats.slots_taken or rig.stats.blocks_held))
                again = await one.visit()  # it has dialled again
                assert again is not first
                again.ask("r0", attempt=2)
                await rig.until(lambda: "r0" in again.ended)
                assert again.tokens["r0"] == expected(5, 12)
                assert not again.all(OrderAnswer), "the order was of another session"

    finish(main())


def test_a_router_that_goes_silent_lapses_and_one_that_beats_does_not(secret_file: Path):
    async def main() -> None:
        async with FakeRouter(SECRET, lapse_seconds=0.6) as silent, FakeRouter(SECRET, lapse_seconds=0.6) as steady:  # noqa: SIM117
            async with rig_of(secret_file, silent, steady) as rig:
                first, other = await silent.visit(), await steady.visit()
                first.ask("a", max_tokens=400)
                silent.beats = False
                await rig.until(lambda: first.over)
                silent.beats = True
                assert await silent.visit() is not first
                assert not other.over
                await rig.until(lambda: rig.stats.requests_open == 0)
                assert rig.engine.stats().router_sessions["lapsed"] == 1

    finish(main())


def test_no_router_is_given_up_for_a_silence_in_which_we_stood_still(secret_file: Path):
    """On a machine that had no time for anybody every session ended, and all that was under way with them."""

    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router) as rig:
            await router.visit()
            links = rig.engine._links
            (session,) = links._sessions
            for stood_still in (True, False):
                links._timer.cancel()
                now = links._loop.time()
                session.received_at = now - 60
                links._ticked = now - (60 if stood_still else 0)
                links._tick()
                assert bool(session.over) is not stood_still

    finish(main())


def test_a_router_that_is_stopped_lapses_and_is_joined_again_when_it_goes_on(secret_file: Path):
    """Its kernel still takes what we send: only silence tells."""

    async def main() -> None:
        with router_process(secret_file) as (process, port):
            async with rig_of(secret_file, f"127.0.0.1:{port}") as rig:
                links = rig.engine._links
                await rig.until(lambda: links.open_sessions == 1)
                process.send_signal(signal.SIGSTOP)
                await rig.until(lambda: links.open_sessions == 0)
                process.send_signal(signal.SIGCONT)
                await rig.until(lambda: links.open_sessions == 1)
                process.kill()
                await rig.until(lambda: links.open_sessions == 0)
                assert not rig.running.done()

    finish(main())


@contextmanager
def router_process(secret_file: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    command = [sys.executable, "-m", "fake_router", str(secret_file)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ)
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_a_router_that_says_no_hello_is_given_up(secret_file: Path):
    async def main() -> None:
        async with FakeRouter(SECRET) as router:
            router.greets = False  # but it beats
            async with rig_of(secret_file, router, engine={"wire": WireConfig(session_hello_seconds=0.4)}) as rig:
                await rig.until(lambda: len(router.visits) >= 3)
                links = rig.engine._links
                assert links is not None
                links._wire = WireConfig(session_hello_seconds=30.0)
                router.greets = True
                for visit in router.open:
                    visit.link.close()  # it asked while nobody answered
                await router.visit()

    finish(main())


@pytest.mark.parametrize("garbage", ["request before hello", "broken seal"])
def test_a_router_that_breaks_the_protocol_is_hung_up_on(secret_file: Path, garbage: str):
    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router) as rig:
            visit = await router.visit()
            if garbage == "broken seal":
                visit.link._frames.transport.write(Sealer(b"x" * 32).seal([encode(Ping(1))]))
            else:
                router.greets = False
                visit.link.close()
                visit = await router.visit(lambda visit: visit.hello is not None)
                visit.ask("early")
            await rig.until(lambda: visit.over)
            router.greets = True
            again = await router.visit()
            again.ask("a")
            await rig.until(lambda: "a" in again.ended)
            assert not rig.running.done()

    finish(main())


# Orders and faults


async def ordered(rig: Rig, visit: Visit, order: Any) -> OrderAnswer:
    visit.link.send(order)
    await rig.until(lambda: visit.answer(order.number) is not None)
    answer = visit.answer(order.number)
    assert answer is not None
    return answer


def test_orders_of_two_routers_with_equal_numbers_are_each_answered(secret_file: Path):
    async def main() -> None:
        async with FakeRouter(SECRET) as one, FakeRouter(SECRET) as other, rig_of(secret_file, one, other) as rig:
            first, second = await one.visit(), await other.visit()
            assert (await ordered(rig, first, PauseInstance(1))).outcome == "done"
            await rig.until(lambda: second.beats[-1].fault == "it is paused")
            assert ModeReport("paused") in second.messages
            second.ask("a")
            await rig.until(lambda: second.refused.get("a") == "paused")
            assert second.answer(1) is None
            assert (await ordered(rig, second, ClearCache(1))).outcome == "done"
            assert (await ordered(rig, second, SleepInstance(2))).outcome == "done"
            assert (await ordered(rig, first, ResumeInstance(2))).outcome == "refused"
            assert (await ordered(rig, first, WakeInstance(3))).outcome == "done"
            assert (await ordered(rig, second, ResumeInstance(3))).outcome == "done"
            await rig.until(lambda: first.beats[-1].fault == "")
            first.ask("b")
            await rig.until(lambda: "b" in first.ended)
            assert len(first.all(OrderAnswer)) == len(second.all(OrderAnswer)) == 3

    finish(main())


def test_each_router_hears_heartbeats_as_often_as_it_asks_for(secret_file: Path):
    async def main() -> None:
        often, rarely = FakeRouter(SECRET, lapse_seconds=60.0), FakeRouter(SECRET, lapse_seconds=60.0)
        often.beat_seconds, rarely.beat_seconds = 0.02, 1.5
        async with often, rarely, rig_of(secret_file, often, rarely) as rig:
            eager, calm = await often.visit(), await rarely.visit()
            await rig.until(lambda: bool(calm.beats))
            seen = len(eager.beats)
            await rig.until(lambda: len(calm.beats) > 1)
            assert len(eager.beats) - seen >= 10, "75 of them are due between two of the other's"
            assert any(type(message).__name__ == "InstanceStats" for message in eager.messages)

    finish(main())


def test_a_request_of_one_router_is_reported_to_the_others_early(secret_file: Path, monkeypatch: pytest.MonkeyPatch):
    """Not with the next regular heartbeat, a minute later; with their digest and stats only then."""
    monkeypatch.setattr(router_links, "BEAT_SECONDS", 60.0)

    async def main() -> None:
        asking, other = FakeRouter(SECRET, lapse_seconds=90.0), FakeRouter(SECRET, lapse_seconds=90.0)
        asking.beat_seconds = other.beat_seconds = 60.0
        async with asking, other, rig_of(secret_file, asking, other) as rig:
            first, second = await asking.visit(), await other.visit()
            await rig.until(lambda: bool(second.all(InstanceStats)))
            free, seen, stats = second.beats[-1].slots_free, len(first.beats), len(second.all(InstanceStats))
            first.ask("a", max_tokens=200)
            await rig.until(lambda: second.beats[-1].slots_free < free or second.beats[-1].waiting_tokens > 0)
            assert len(first.beats) == seen, "the router that sent the request has counted it itself"
            assert len(second.all(InstanceStats)) == stats
            await rig.until(lambda: "a" in first.ended)

    finish(main())


def test_sessions_that_announced_less_meet_their_router_again(secret_file: Path, monkeypatch: pytest.MonkeyPatch):
    """A router of this machine was reached first; then one to which our pool has an address."""
    said: list[str] = []
    monkeypatch.setattr(router_links.Link, "own_host", property(lambda link: "10.0.0.2" if len(said) == 1 else ""))

    def reached(engine: Engine, host: str) -> bool:
        said.append(host)
        return host == "10.0.0.2"

    monkeypatch.setattr(Engine, "reached", reached)

    async def main() -> None:
        async with FakeRouter(SECRET) as near, FakeRouter(SECRET) as far, rig_of(secret_file, near, far) as rig:
            await rig.until(lambda: len(near.visits) + len(far.visits) >= 3)
            assert said[:2] == ["", "10.0.0.2"]
            await rig.until(lambda: len(near.open) == len(far.open) == 1)

    finish(main())


@pytest.mark.parametrize(
    ("url", "host", "told"),
    [
        ("http://0.0.0.0:8001", "10.0.0.2", "http://10.0.0.2:8001"),
        ("https://[::]:8001", "2001:db8::2", "https://[2001:db8::2]:8001"),
        ("http://0.0.0.0:8001", "", "http://127.0.0.1:8001"),
        ("http://127.0.0.1:8001", "127.0.0.1", "http://127.0.0.1:8001"),
        ("http://127.0.0.1:8001", "", "http://127.0.0.1:8001"),
        ("http://127.0.0.1:8001", "10.0.0.2", ""),
        ("http://node-7:8001", "10.0.0.2", "http://node-7:8001"),
        ("", "10.0.0.2", ""),
    ],
)
def test_the_url_of_an_instance_is_one_that_its_router_reaches(url: str, host: str, told: str):
    assert reachable_url(url, host) == told


def test_a_router_is_sent_a_url_that_it_reaches(secret_file: Path):
    async def main() -> None:
        anywhere = {"health_url": "http://0.0.0.0:8001"}
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router, engine=anywhere):
            visit = await router.visit()
            assert isinstance(visit.hello, InstanceHello)
            assert visit.hello.health_url == "http://127.0.0.1:8001"

    finish(main())


def test_routers_hear_at_once_that_the_worker_is_lost_and_that_it_is_back(secret_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router_links, "BEAT_SECONDS", 10.0)  # not with the next beat: now

    async def main() -> None:
        router = FakeRouter(SECRET, lapse_seconds=60.0)
        router.beat_seconds = 10.0
        async with router, rig_of(secret_file, router) as rig:
            visit = await router.visit()
            assert visit.beats[-1].fault == ""
            visit.ask("a", max_tokens=200)
            await rig.until(lambda: len(visit.tokens.get("a", ())) > 3)
            rig.engine._worker.process.kill()
            await rig.until(lambda: "lost" in visit.beats[-1].fault)
            await rig.until(lambda: visit.beats[-1].fault == "")
            await rig.until(lambda: "a" in visit.ended)
            assert visit.tokens["a"] == expected(5, 200)

    finish(main())


def test_routers_hear_of_a_worker_that_was_stopped_while_it_had_nothing_to_do(secret_file: Path):
    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router) as rig:
            visit = await router.visit()
            rig.engine._worker.process.send_signal(signal.SIGSTOP)
            await rig.until(lambda: "has not answered" in visit.beats[-1].fault)
            rig.engine._worker.process.send_signal(signal.SIGCONT)
            await rig.until(lambda: visit.beats[-1].fault == "")
            visit.ask("a")
            await rig.until(lambda: "a" in visit.ended)

    finish(main())


def test_an_instance_that_computes_with_other_weights_meets_its_routers_anew(secret_file: Path):
    """It told them its identity when it came; other instances' blocks may not be mixed with its own."""

    async def main() -> None:
        orders = {"identities": ["first", "second"]}
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router, orders=orders) as rig:
            visit = await router.visit()
            assert visit.hello.ready.identity == b"first"
            visit.ask("a", max_tokens=100)
            await rig.until(lambda: len(visit.tokens.get("a", ())) > 3)
            rig.engine._worker.process.kill()
            await rig.until(lambda: visit.over)
            again = await router.visit()
            assert again.hello.ready.identity == b"second"
            assert again.hello.incarnation == visit.hello.incarnation

    finish(main())


def test_what_fails_in_a_beat_ends_the_engine(secret_file: Path):
    """The loop would only log it, and every router would give us up, one after the other."""

    def fails() -> None:
        raise ValueError("on purpose")

    async def main() -> None:
        async with FakeRouter(SECRET) as router, rig_of(secret_file, router) as rig:
            await router.visit()
            rig.engine.beat = fails  # type: ignore[method-assign, assignment]
            await asyncio.wait([rig.running], timeout=20)
            assert isinstance(rig.running.exception(), ValueError)

    finish(main())


def test_a_secret_that_others_can_read_ends_the_start(secret_file: Path):
    secret_file.chmod(0o644)

    async def main() -> None:
        with pytest.raises(Exception, match="chmod 600"):
            async with rig_of(secret_file, "127.0.0.1:1"):
                pass

    finish(main())


def test_the_secret_is_in_no_configuration(secret_file: Path):
    config = EngineConfig(routers=("127.0.0.1:1",), cluster_secret=str(secret_file))
    assert SECRET.key.decode() not in repr(config)
