"""The engine on a real loop with real, if simple, worker processes: what it does when they stall, lie or die."""

from __future__ import annotations

import asyncio
import signal
from itertools import count
from typing import Any

import pytest
from engine_rig import Rig
from fake_worker import expected
from run_loop import finish

from baton.core.engine import idle_probe, progress_watch
from baton.core.events import Tick
from baton.core.instance import Instance
from baton.errors import EngineError, InvariantBroken
from baton.protocol import codec
from baton.protocol.control import AbortRequest, Ping, Pong
from baton.protocol.ids import RequestId
from baton.protocol.request import FinishReason, GenerateBatch, GenerateRequest, SamplingParams
from baton.runtime.processes.child import Child, Loss

pytestmark = pytest.mark.usefixtures("child_path")


def test_requests_are_served_and_the_end_of_the_front_ends_everything():
    async def main() -> None:
        async with Rig() as rig:
            assert await rig.answer("a") == expected(5, 12)
            assert await rig.answer("b", prompt=40) == expected(40, 12)
            rig.front.send(Ping(77))
            await rig.until(lambda: Pong(77) in rig.messages)
            await rig.until(lambda: rig.stats.requests_open == 0 and rig.stats.slots_taken == 0)
        assert rig.running.exception() is None
        assert len(rig.workers) == 1

    finish(main())


def test_an_idle_engine_checks_itself_and_ends_loudly_if_its_state_is_impossible(monkeypatch: pytest.MonkeyPatch):
    def broken(self: Instance) -> None:
        raise InvariantBroken("a block is lost", invariant=1)

    async def main() -> None:
        rig = Rig()
        async with rig:
            monkeypatch.setattr(Instance, "check_part", broken)
            rig.engine._machine._check_due = 0.0
            rig.ask("a")
            await asyncio.wait([rig.running], timeout=30)
            assert isinstance(rig.running.exception(), InvariantBroken)

    finish(main())


def test_the_end_of_the_supervisor_ends_it_too():
    async def main() -> None:
        async with Rig() as rig:
            rig.supervisor.close()
            await asyncio.wait_for(rig.running, 20)

    finish(main())


def test_a_healthy_worker_is_not_replaced_because_a_plan_would_be_too_large(monkeypatch: pytest.MonkeyPatch):
    """The plan was made, did not go in a frame, and the error was blamed on the worker."""
    monkeypatch.setattr(codec, "FRAME_BYTES_MAX", 1 << 15)
    words = ((7,) * 2000,)

    async def main() -> None:
        async with Rig(slots=64, tokens_per_step=256, new_bytes_max=1 << 14) as rig:
            rig.ask("first")
            for number in range(60):
                settings = SamplingParams(max_tokens=2, bad_words=words, seed=number)
                rig.front.send(GenerateRequest(id=RequestId(f"p{number}"), prompt=(1,) * 5, sampling=settings))
            await rig.until(lambda: len(rig.ended) == 61)
            assert all(rig.tokens[f"p{number}"] == expected(5, 2) for number in range(60))
            assert rig.stats.worker_losses == 0
            assert len(rig.workers) == 1

    finish(main())


def test_a_batch_of_requests_is_served_like_each_of_them():
    requests = [
        GenerateRequest(id=RequestId(f"p{number}"), prompt=(1,) * (number + 1), sampling=SamplingParams(max_tokens=number + 1))
        for number in range(8)
    ]

    async def main() -> None:
        async with Rig() as rig:
            rig.front.send(GenerateBatch.of(requests))
            await rig.until(lambda: len(rig.ended) == 8)
            assert [rig.tokens[f"p{number}"] for number in range(8)] == [
                expected(number + 1, number + 1) for number in range(8)
            ]

    finish(main())


@pytest.mark.parametrize("fault", ["stalls_at", "garbage_at"])
def test_a_worker_that_stalls_or_talks_nonsense_is_replaced(fault: str):
    async def main() -> None:
        async with Rig({fault: 4, "in_epochs": [1]}, step_seconds_max=1.0) as rig:
            assert await rig.answer("a") == expected(5, 12)
            assert rig.ended["a"].reason is FinishReason.LENGTH
            await rig.until(lambda: rig.stats.worker_losses == 1)
            assert len(rig.workers) == 2
            assert not rig.workers[0].alive

    finish(main())


def test_a_worker_that_dies_while_another_request_waits():
    async def main() -> None:
        async with Rig() as rig:
            for number in range(8):
                rig.ask(f"r{number}", max_tokens=60)
            await rig.until(lambda: len(rig.tokens.get("r0", ())) > 3)
            rig.engine._worker.process.kill()
            await rig.until(lambda: len(rig.ended) == 8)
            assert all(rig.tokens[f"r{number}"] == expected(5, 60) for number in range(8))

    finish(main())


def test_a_stuck_worker_beyond_the_limit_is_killed_and_the_engine_ends():
    async def main() -> None:
        async with Rig({"stalls_at": 2}, step_seconds_max=0.3, worker_restarts_max=0) as rig:
            rig.ask("a")
            await rig.until(lambda: "a" in rig.ended)
            assert rig.ended["a"].reason is FinishReason.ERROR
            await asyncio.wait([rig.running], timeout=40)
            assert "lost 1 time(s) in a row" in str(rig.running.exception())
            assert len(rig.workers) == 1
            assert not rig.workers[0].alive

    finish(main())


def test_losing_a_worker_does_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch):
    """A killed process may take long to be gone. Requests are taken, and answered, in the meantime."""
    end = Child.end

    async def slow_end(self: Child, grace_seconds: float = 0.0) -> Loss:
        await asyncio.sleep(0.3)
        return await end(self, grace_seconds)

    async def main() -> None:
        async with Rig({"stalls_at": 2, "in_epochs": [1]}, step_seconds_max=0.3) as rig:
            monkeypatch.setattr(Child, "end", slow_end)
            rig.ask("a")
            rig.ask("never", prompt=400)
            await rig.until(lambda: rig.refused.get("never") == "never_fits")
            await rig.until(lambda: "a" in rig.ended)
            assert rig.tokens["a"] == expected(5, 12)

    finish(main())


def test_a_worker_that_does_not_die_ends_the_engine(monkeypatch: pytest.MonkeyPatch):
    async def never(process: Any, seconds: float, unless: Any = None) -> bool:
        return False

    async def main() -> None:
        async with Rig({"stalls_at": 2}, step_seconds_max=0.2) as rig:
            with monkeypatch.context() as patched:
                patched.setattr("baton.runtime.processes.child.has_ended", never)
                rig.ask("a")
                with pytest.raises(EngineError, match="still there"):
                    await asyncio.wait_for(rig.running, 20)

    finish(main())


def test_numbers_are_told_after_a_deadline_too():
    """The worker says nothing: only the clock can end the request, and the gauges must show it."""

    async def main() -> None:
        async with Rig({"stalls_at": 1}) as rig:
            rig.ask("a", timeout_seconds=0.5)
            await rig.until(lambda: rig.stats.requests_open == 1)
            await rig.until(lambda: "a" in rig.ended)
            assert rig.ended["a"].reason is FinishReason.TIMEOUT
            await rig.until(lambda: rig.stats.requests_open == 0)

    finish(main())


def test_what_fails_when_a_deadline_comes_ends_the_engine():
    """The loop would only log it and go on, with a state that is known to be broken."""

    async def main() -> None:
        async with Rig({"stalls_at": 1}) as rig:

            def broken(event: Tick) -> None:
                raise InvariantBroken("on purpose")

            rig.engine._instance._handlers[Tick] = broken
            rig.ask("a", timeout_seconds=0.1)
            with pytest.raises(InvariantBroken, match="on purpose"):
                await asyncio.wait_for(rig.running, 20)

    finish(main())


def test_a_successor_has_the_pool_of_the_first():
    """It is told the number of blocks, so it has as many or fails; never a different number unseen."""

    async def main() -> None:
        async with Rig({"hello": {"blocks": 48}, "in_epochs": [1]}) as rig:
            rig.ask("a", max_tokens=100)
            await rig.until(lambda: len(rig.tokens.get("a", ())) > 3)
            rig.engine._worker.process.kill()
            await rig.until(lambda: "a" in rig.ended)
            assert rig.engine.config.worker.blocks == 48
            assert rig.stats.blocks_total == 48

    finish(main())


def test_every_worker_tells_how_many_plans_it_begins():
    """Requests of all of them are suspects if it is lost."""

    async def main() -> None:
        async with Rig({"hello": {"steps_ahead": 2}}) as rig:
            rig.ask("a", max_tokens=100)
            await rig.until(lambda: len(rig.tokens.get("a", ())) > 3)
            suspects = rig.engine._instance._suspects
            assert suspects.steps_ahead == 2
            suspects.steps_ahead = 1
            rig.engine._worker.process.kill()
            await rig.until(lambda: suspects.steps_ahead == 2)  # "a" may have ended before the kill
            await rig.until(lambda: "a" in rig.ended)

    finish(main())


def test_aborts_of_anything_leave_nothing():
    async def main() -> None:
        async with Rig() as rig:
            for number in range(20):
                rig.ask(f"r{number}", max_tokens=200)
                rig.front.send(AbortRequest(RequestId(f"r{number // 2}")))
                rig.front.send(AbortRequest(RequestId("nobody")))
            for number in range(20):
                rig.front.send(AbortRequest(RequestId(f"r{number}")))
            await rig.until(lambda: len(rig.ended) == 20)
            await rig.until(lambda: not (rig.stats.requests_open or rig.stats.slots_taken or rig.stats.blocks_held))
            assert await rig.answer("after") == expected(5, 12)

    finish(main())


def test_the_root_of_keys_is_what_the_worker_has_loaded():
    """Not a path: the worker alone knows what it computes with. Another one with other weights shares nothing with it."""

    async def main() -> None:
        async with Rig({"identities": ["first", "second"]}) as rig:
            await rig.answer("a")
            assert rig.engine._instance.fingerprint == b"first"
            await rig.until(lambda: rig.stats.blocks_cached > 0)
            rig.ask("b", max_tokens=100)
            await rig.until(lambda: len(rig.tokens.get("b", ())) > 3)
            rig.engine._worker.process.kill()
            await rig.until(lambda: "b" in rig.ended)
            assert rig.engine._instance.fingerprint == b"second"

    finish(main())


# Health: never behind plans


async def pinged(rig: Rig, number: int) -> str | None:
    """What is wrong; None: no answer within the time that the front would wait."""
    rig.front.send(Ping(number))
    for _ in range(200):
        for message in rig.messages:
            if type(message) is Pong and message.number == number:
                return message.fault
        await asyncio.sleep(0.01)
    return None


async def until_health_is(rig: Rig, text: str) -> None:
    async with asyncio.timeout(40):
        for number in count(1000):
            fault = await pinged(rig, number)
            if fault is not None and text in fault and bool(text) == bool(fault):
                return


def test_health_is_green_through_a_long_honest_step_and_does_not_wait_for_it(tmp_path, monkeypatch):
    """The answer comes while the step still runs. It used to wait behind it."""
    monkeypatch.setattr(progress_watch, "STALL_SECONDS", 3.0)  # beside busy neighbours the worker may get no turn for a while

    async def main() -> None:
        done = tmp_path / "done"
        async with Rig({"works_at": 3, "done": str(done)}) as rig:
            rig.ask("a")
            await rig.until(lambda: len(rig.tokens.get("a", ())) == 2)
            begun = asyncio.get_running_loop().time()
            for number in range(8):
                assert await pinged(rig, number) == ""
                await asyncio.sleep(0.5)
            assert asyncio.get_running_loop().time() - begun > 3.0
            assert len(rig.tokens["a"]) == 2, "the step is still under way"
            done.touch()
            await rig.until(lambda: "a" in rig.ended)
            assert rig.tokens["a"] == expected(5, 12)

    finish(main())


def test_a_worker_that_is_slow_is_not_killed_for_it(tmp_path):
    """A large step of a large model on few cores may take longer than step_seconds_max. Progress shows that it is no hang."""

    async def main() -> None:
        done = tmp_path / "done"
        async with Rig({"works_at": 3, "done": str(done)}, step_seconds_max=1.0) as rig:
            rig.ask("a")
            await rig.until(lambda: len(rig.tokens.get("a", ())) == 2)
            await asyncio.sleep(3.0)
            assert rig.stats.worker_losses == 0
            done.touch()
            await rig.until(lambda: "a" in rig.ended)
            assert rig.tokens["a"] == expected(5, 12)
            assert len(rig.workers) == 1

    finish(main())


def test_health_is_red_while_the_worker_is_stopped_and_green_again_after(tmp_path):
    async def main() -> None:
        async with Rig({"works_at": 3, "done": str(tmp_path / "done")}) as rig:
            rig.ask("a")
            await rig.until(lambda: len(rig.tokens.get("a", ())) == 2)
            rig.engine._worker.process.send_signal(signal.SIGSTOP)
            await until_health_is(rig, "no progress")
            rig.engine._worker.process.send_signal(signal.SIGCONT)
            await until_health_is(rig, "")
            (tmp_path / "done").touch()
            await rig.until(lambda: "a" in rig.ended)
            assert rig.tokens["a"] == expected(5, 12)

    finish(main())


def test_a_worker_that_was_stopped_while_idle_is_noticed():
    async def main() -> None:
        async with Rig() as rig:
            await rig.answer("a")
            assert await pinged(rig, 1) == ""
            await rig.until(lambda: not rig.engine._instance.in_flight)  # a ping of a busy one is answered by its progress
            rig.engine._worker.process.send_signal(signal.SIGSTOP)
            assert await pinged(rig, 2) != ""
            rig.engine._worker.process.send_signal(signal.SIGCONT)
            await until_health_is(rig, "")

    finish(main())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_hangs_while_it_has_no_work_is_replaced(ranks: int):
    """Though nobody asks anything: behind a load balancer or a router no request comes while it is at fault."""

    async def main() -> None:
        async with Rig(ranks=ranks, step_seconds_max=1.0) as rig:
            await rig.answer("a")
            rig.engine._worker.ranks[-1].process.send_signal(signal.SIGSTOP)
            await rig.until(lambda: rig.engine._instance.worker.epoch == 2)
            assert await rig.answer("b") == expected(5, 12)
            await until_health_is(rig, "")
            assert rig.stats.worker_losses == 1

    finish(main())


def test_an_error_in_the_watch_of_an_idle_worker_ends_the_engine(monkeypatch: pytest.MonkeyPatch):
    """A callback of the loop: asyncio would only log the error, and nobody would watch any more."""

    def broken(*_: object, **__: object) -> str:
        raise InvariantBroken("the probe is broken")

    async def main() -> None:
        async with Rig() as rig:
            await rig.answer("a")
            monkeypatch.setattr(idle_probe.IdleProbe, "observe", broken)
            async with asyncio.timeout(20):
                await asyncio.wait([rig.running])
            assert "the probe is broken" in str(rig.running.exception())

    finish(main())


def test_health_is_red_while_the_worker_is_being_replaced():
    async def main() -> None:
        async with Rig({"stalls_at": 1, "in_epochs": [1]}) as rig:
            rig.ask("a")
            await rig.until(lambda: bool(rig.stats.steps_in_flight))
            rig.engine._worker.process.kill()
            await rig.until(lambda: rig.engine._instance.worker.epoch == 2)
            rig.front.send(Ping(5))
            await rig.until(lambda: any(type(m) is Pong and m.number == 5 for m in rig.messages))
            answer = next(m for m in rig.messages if type(m) is Pong)
            assert answer.fault in ("the worker was lost and is being started again", "")  # "": it was quick
            await rig.until(lambda: "a" in rig.ended)
            await until_health_is(rig, "")

    finish(main())
