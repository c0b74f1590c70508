"""What a router's placement and heartbeats cost, by the number of instances: the search of the core beside a sort over all.

    python bench/placement.py                     100, 300 and 1,000 instances, pairs and mixed
    python bench/placement.py --instances 1000

Three states: `room` (a request arrives, instances have room: it is placed), `full` (no instance has room: a request at the head
of a full queue is looked at in vain), `prefill` (pairs only: decode has room, prefill instances are busy). A heartbeat is
handled with a full queue, and the placement pass that it may call for is timed by itself. There is no network: times are of
the CPU. Prompts have 2,000 tokens, half of them one of 20 shared prefixes; their keys are hashed before.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from random import Random
from time import thread_time

from baton.config import RouterConfig
from baton.core.cluster.closed import Closed
from baton.core.cluster.events import Arrive, Join, RunPass, Say, Session
from baton.core.cluster.router import Router
from baton.core.cluster.trip import Trip
from baton.protocol.control import InstanceReady
from baton.protocol.ids import Instant, RequestId
from baton.protocol.node import Beat, NodeHello, Role
from baton.protocol.request import GenerateRequest, SamplingParams
from baton.sim.cluster.naive_placement import NaivePlacement

SIZE, BLOCKS, SLOTS, PROMPT = 16, 8192, 64, 2000
NOW = Instant(1.0)


class Bench:
    def __init__(self, instances: int, shape: str, seed: int = 1) -> None:
        self.rng = Random(seed)
        config = RouterConfig(queue_requests_max=100_000, queue_tokens_max=2**31 - 1)
        self.router = Router(config, Random(seed))
        self.placement = self.router._placement
        self.naive = NaivePlacement(config, self.router.membership, self.placement)
        self.prefixes = [tuple(self.rng.randrange(30_000) for _ in range(PROMPT // 2)) for _ in range(20)]
        roles: tuple[Role, ...] = ("mixed",) if shape == "mixed" else ("prefill", "decode")
        for number in range(instances):
            ready = InstanceReady(BLOCKS, SIZE, SLOTS, 32_000, 65_536, identity=b"m")
            role = roles[number % len(roles)]
            hello = NodeHello(f"i{number}", 1, role, ready, b"l", peers=(f"p{number}",), step_tokens=8192)
            self.router.handle(Join(Session(number), hello), NOW)
        self.sessions = instances
        self.requests = 0

    def trip(self) -> Trip:
        self.requests += 1
        tail = tuple(self.rng.randrange(30_000) for _ in range(PROMPT // 2))
        prompt = self.rng.choice(self.prefixes) + tail
        request = GenerateRequest(id=RequestId(f"r{self.requests}"), prompt=prompt, sampling=SamplingParams(max_tokens=200))
        return Trip(request, (0, 0.0, self.requests), NOW)

    def beat(self, session: int, *, room: bool, blocks: int | None = None) -> Say:
        available = self.rng.randrange(BLOCKS // 4, BLOCKS // 2) if room else self.rng.randrange(0, 40)
        waiting = self.rng.randrange(0, 20_000)
        return Say(
            Session(session),
            Beat(
                blocks_available=available if blocks is None else blocks,
                slots_free=SLOTS // 2 if room else 0,
                waiting_tokens=waiting,
                token_seconds=0.0001,
            ),
        )

    def all_beat(self, *, room: bool) -> None:
        for session in range(self.sessions):
            self.router.handle(self.beat(session, room=room), NOW)
        self.placement.roster.refresh(NOW)

    def warm(self, requests: int) -> None:
        """So that prefixes are known."""
        for _ in range(requests):
            self.router.handle(Arrive(self.trip().request), NOW)
            self.router.handle(RunPass(), NOW)
            if self.requests % 200 == 0:
                self.all_beat(room=True)

    def place(self, count: int, naive: int) -> tuple[list[float], list[float]]:
        """Times of the search, and of the sort of the same."""
        new, old = [], []
        for number in range(count):
            trip = self.trip()
            self.placement.keys(trip)
            if number < naive:
                old.append(timed(lambda trip=trip: self.naive.choose(trip, NOW, Closed(), self.rng)))
            new.append(timed(lambda trip=trip: self.placement.place(trip, NOW, Closed())))
            new[-1] += timed(lambda: self.placement.roster.refresh(NOW))
        return new, old


def timed(act: Callable[[], object]) -> float:
    begin = thread_time()
    act()
    return thread_time() - begin


def spread(times: list[float]) -> str:
    if not times:
        return f"{'':>10} {'':>10}"
    ordered = sorted(times)
    return f"{ordered[len(ordered) // 2] * 1e6:10.1f} {ordered[int(len(ordered) * 0.99)] * 1e6:10.1f}"


def measure(instances: int, shape: str) -> None:
    bench = Bench(instances, shape)
    bench.warm(2 * instances)
    states = ["room", "full", "prefill"] if shape == "pairs" else ["room", "full"]
    for state in states:
        bench.all_beat(room=state != "full")
        if state == "full":
            for member in bench.router.membership.members.values():  # as many wait there as may
                member.overdrawn = {RequestId("x"): (0, 0.0, 0)}
                bench.placement.roster.touch(member)
            bench.placement.roster.refresh(NOW)
        if state == "prefill":
            for member in bench.router.membership.members.values():
                member.prompts, member.prompt_tokens = 100, 10**9
                bench.placement.roster.touch(member)
            bench.placement.roster.refresh(NOW)
        gc.collect()
        gc.disable()
        new, old = bench.place(2000, 60)
        gc.enable()
        print(f"{instances:>9} {shape:>6} placement, {state:<10} {spread(new)} {spread(old)}", flush=True)
        for member in bench.router.membership.members.values():
            member.overdrawn, member.prompts, member.prompt_tokens = {}, 0, 0
            bench.placement.roster.touch(member)
    heartbeats(bench, instances, shape)


def heartbeats(bench: Bench, instances: int, shape: str) -> None:
    """With a full queue."""
    bench.all_beat(room=False)
    for member in bench.router.membership.members.values():
        member.overdrawn = dict.fromkeys(list(member.legs)[:1], (0, 0.0, 0))
        bench.placement.roster.touch(member)
    for _ in range(1000):
        bench.router.handle(Arrive(bench.trip().request), NOW)
    bench.router.handle(RunPass(), NOW)
    beats, passes = [], []
    gc.collect()
    gc.disable()
    for _ in range(4000):
        say = bench.beat(bench.rng.randrange(instances), room=False)
        beats.append(timed(lambda say=say: bench.router.handle(say, NOW)))
        passes.append(timed(lambda: bench.router.handle(RunPass(), NOW)))
    gc.enable()
    print(f"{instances:>9} {shape:>6} {'a heartbeat':<21} {spread(beats)}")
    print(f"{instances:>9} {shape:>6} {'a pass, nothing fits':<21} {spread(passes)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, nargs="+", default=[100, 300, 1000])
    arguments = parser.parse_args()
    print(f"{'':>38} {'search':>21} {'sort of all':>21}")
    print(f"{'instances':>9} {'':>6} {'microseconds':<21} {'p50':>10} {'p99':>10} {'p50':>10} {'p99':>10}")
    for shape in ("mixed", "pairs"):
        for instances in arguments.instances:
            measure(instances, shape)


if __name__ == "__main__":
    main()
