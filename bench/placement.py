"""What a router's placement and heartbeats cost, by the number of instances: the search of the core beside a sort over all.

    python bench/placement.py                     100, 300 and 1,000 instances, pairs and mixed
    python bench/placement.py --instances 1000

Three states: `room` (a request arrives, instances have room: it is placed), `full` (no instance has room: a request at the head
of a full queue is looked at in vain), `prefill` (pairs only: decode has room, prefill instances are busy). A heartbeat is
handled with a full queue, and the placement pass that it may call for is timed by itself. There is no network: times are of
the CPU. Prompts have 2,000 tokens, half of them one of 20 shared prefixes; their keys are hashed before, once per request.

A row is measured in several rounds that do exactly the same work. `p50` is that of the best round and `p99` the median of the
rounds. `work p99` takes each request's fastest round first: what is left is what the search has to do, without interrupts and
caches that other processes emptied. A busy machine slows a core down even in processor time, so every round also times a
calibration loop. The columns under ESTIMATE are no measurement: they are p50 and work p99, scaled to a core on which that loop
takes --free-core seconds.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from random import Random
from statistics import median
from time import thread_time
from typing import NamedTuple

from baton.config import RouterConfig
from baton.core.cluster.closed import Closed
from baton.core.cluster.events import InstanceJoined, InstanceMessage, RunPass, Session, SubmitRequest
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.cluster.router import Router
from baton.protocol.control import InstanceReady
from baton.protocol.ids import Instant, RequestId
from baton.protocol.instance import Heartbeat, InstanceHello, Role
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.sim.cluster.naive_placement import NaivePlacement

SIZE, BLOCKS, SLOTS, PROMPT = 16, 8192, 64, 2000
NOW = Instant(1.0)
FIRST = (0, 0.0, 0)
"""An order that is ahead of all others."""
ROUNDS = 7


class Round(NamedTuple):
    times: list[float]
    calibration: float
    "Seconds of the calibration loop, timed beside."


class Bench:
    def __init__(self, instances: int, shape: str, seed: int = 1) -> None:
        self.rng = Random(seed)
        config = RouterConfig(queue_requests_max=100_000, queue_tokens_max=2**31 - 1)
        self.router = Router(config)
        self.placement = self.router._placement
        self.naive = NaivePlacement(config, self.router.membership, self.placement, self.router.coordinator.routed_requests)
        self.prefixes = [tuple(self.rng.randrange(30_000) for _ in range(PROMPT // 2)) for _ in range(20)]
        roles: tuple[Role, ...] = ("mixed",) if shape == "mixed" else ("prefill", "decode")
        for number in range(instances):
            ready = InstanceReady(BLOCKS, SIZE, SLOTS, 32_000, 65_536, identity=b"m")
            role = roles[number % len(roles)]
            hello = InstanceHello(f"i{number}", 1, role, ready, b"l", peers=(f"p{number}",), step_tokens=8192)
            self.router.handle(InstanceJoined(Session(number), hello), NOW)
        self.sessions = instances
        self.requests = 0

    def routed(self) -> RoutedRequest:
        self.requests += 1
        tail = tuple(self.rng.randrange(30_000) for _ in range(PROMPT // 2))
        prompt = self.rng.choice(self.prefixes) + tail
        request = GenerateRequest(id=RequestId(f"r{self.requests}"), prompt=prompt, sampling=SamplingParams(max_tokens=200))
        return RoutedRequest(request, (0, 0.0, self.requests), NOW)

    def beat(self, session: int, *, room: bool, blocks: int | None = None) -> InstanceMessage:
        available = self.rng.randrange(BLOCKS // 4, BLOCKS // 2) if room else self.rng.randrange(0, 40)
        waiting = self.rng.randrange(0, 20_000)
        return InstanceMessage(
            Session(session),
            Heartbeat(
                blocks_available=available if blocks is None else blocks,
                slots_free=SLOTS // 2 if room else 0,
                waiting_tokens=waiting,
                token_seconds=0.0001,
            ),
        )

    def begin(self, state: str) -> None:
        """The same state and the same chance in every round."""
        self.rng = Random(2)
        self.placement._turn = self.placement._stayed = 0
        self.all_beat(room=state != "full")
        for member in self.router.membership.instances.values():
            member.chosen = 0
            busy = state == "prefill"
            member.prompts, member.prompt_tokens = (100, 10**9) if busy else (0, 0)
            # as many wait there as may
            member.over_capacity = (
                dict.fromkeys(list(member.assigned)[:1] or [RequestId("x")], FIRST) if state == "full" else {}
            )
            self.placement.roster.touch(member)
        self.placement.roster.refresh(NOW)

    def all_beat(self, *, room: bool) -> None:
        for session in range(self.sessions):
            self.router.handle(self.beat(session, room=room), NOW)
        self.placement.roster.refresh(NOW)

    def warm(self, requests: int) -> None:
        """So that instances have something, and prefixes are known: at decode instances, and at prefill instances."""
        for _ in range(requests):
            request = self.routed().request
            self.router.handle(SubmitRequest(request), NOW)
            self.router.handle(RunPass(), NOW)
            routed = self.router.coordinator.routed_requests[request.id]
            for member in (routed.decoder, routed.prefill):
                if member is not None:
                    self.placement.remember(member, routed, request.prompt)
            if self.requests % 200 == 0:
                self.all_beat(room=True)

    def place(self, count: int, state: str) -> list[float]:
        """Times of the search."""
        times = []
        self.begin(state)
        for _ in range(count):
            routed = self.routed()
            self.placement.marks(routed)
            times.append(timed(lambda routed=routed: self.placement.place(routed, NOW, Closed())))
            times[-1] += timed(lambda: self.placement.roster.refresh(NOW))
        return times

    def sort(self, count: int) -> list[float]:
        """Times of the sort over all instances that chooses the same."""
        times = []
        for _ in range(count):
            routed = self.routed()
            self.placement.marks(routed)
            times.append(timed(lambda routed=routed: self.naive.choose(routed, NOW, Closed())))
        return times


def timed(act: Callable[[], object]) -> float:
    begin = thread_time()
    act()
    return thread_time() - begin


def calibration() -> float:
    """Seconds of 1,000,000 sets of a dict."""
    entries: dict[int, int] = {}
    begin = thread_time()
    for number in range(1_000_000):
        entries[number] = number
    return thread_time() - begin


def rounds(act: Callable[[], list[float]], count: int = ROUNDS) -> list[Round]:
    found = []
    for _ in range(count):
        before = calibration()
        gc.collect()
        gc.disable()
        times = act()
        gc.enable()
        found.append(Round(times, (before + calibration()) / 2))
    return found


def at(times: list[float], share: float) -> float:
    return sorted(times)[int(len(times) * share)] * 1e6


def show(name: str, new: list[Round], old: list[float], free_core: float) -> None:
    p50, p99 = min(at(each.times, 0.5) for each in new), median(at(each.times, 0.99) for each in new)
    work = at([min(times) for times in zip(*(each.times for each in new), strict=True)], 0.99)
    loop = min(each.calibration for each in new)
    sort = f"{at(old, 0.5):8.0f}" if old else f"{'':>8}"
    estimate = f"{p50 * free_core / loop:8.0f} {work * free_core / loop:8.0f}"
    print(f"{name:<38} {p50:8.1f} {p99:8.1f} {work:8.1f} {sort} {loop:11.3f} {estimate}", flush=True)


def measure(instances: int, shape: str, free_core: float) -> None:
    bench = Bench(instances, shape)
    bench.warm(2 * instances)
    states = ["room", "full", "prefill"] if shape == "pairs" else ["room", "full"]
    for state in states:
        new, old = rounds(lambda state=state: bench.place(600, state)), bench.sort(20)
        show(f"{instances:>9} {shape:>6} placement, {state}", new, old, free_core)
    heartbeats(bench, f"{instances:>9} {shape:>6}", free_core)


def heartbeats(bench: Bench, name: str, free_core: float) -> None:
    """With a full queue."""
    bench.begin("full")
    for _ in range(1000):
        bench.router.handle(SubmitRequest(bench.routed().request), NOW)
    bench.router.handle(RunPass(), NOW)
    passes: list[list[float]] = []

    def act() -> list[float]:
        beats = []
        passes.append([])
        bench.begin("full")
        for _ in range(1000):
            say = bench.beat(bench.rng.randrange(bench.sessions), room=False)
            beats.append(timed(lambda say=say: bench.router.handle(say, NOW)))
            passes[-1].append(timed(lambda: bench.router.handle(RunPass(), NOW)))
        return beats

    found = rounds(act)
    show(f"{name} a heartbeat", found, [], free_core)
    found = [each._replace(times=times) for each, times in zip(found, passes, strict=True)]
    show(f"{name} a pass, nothing fits", found, [], free_core)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[100, 300, 1000])
    parser.add_argument("--free-core", type=float, default=0.045, help="seconds of the calibration loop on a free core")
    arguments = parser.parse_args()
    print(f"{'microseconds':<38} {'search':>26} {'sort':>8} {'calibration':>11} {'ESTIMATE':>17}")
    print(f"{'instances':>9} {'':<28} {'p50':>8} {'p99':>8} {'work p99':>8} {'p50':>8} {'s':>11} {'p50':>8} {'work p99':>8}")
    for shape in ("mixed", "pairs"):
        for instances in arguments.instances:
            measure(instances, shape, arguments.free_core)


if __name__ == "__main__":
    main()
