"""How fast the simulator is where its proofs are off: `python bench/simulator.py`. One core.

Prints CPU seconds, events and tokens per second of 8 instances with batches of 32 and requests of 343 tokens, and of 100 small
ones. With --goals the exit status is 1 if the first takes more than 120 s, or simulates fewer than 15,000 events per second.
"""

from __future__ import annotations

import argparse
from random import Random
from time import process_time

from baton.sim.measure import MeasuredWorld
from baton.sim.scenario import VOCAB, Client, Cluster, InstanceSpec, Scenario


def cluster(instances: int, requests: int, prompt: int, outputs: int, slots: int, every: float) -> Scenario:
    rng = Random(1)
    clients = [
        Client(f"r{number}", every * number, [rng.randrange(VOCAB) for _ in range(prompt)], outputs, seed=number)
        for number in range(requests)
    ]
    spec = InstanceSpec("mixed", slots * (prompt + outputs) // 16 + slots + 8, slots, tokens_per_step=512)
    shape = Cluster([spec] * instances, policy="load", router_queue_max=requests, queue_seconds_max=1e6)
    return Scenario(seed=1, blocks=0, block_size=16, slots=0, tokens_per_step=0, clients=clients, cluster=shape)


SECONDS_MAX, EVENTS_PER_SECOND_MIN = 120.0, 15_000.0


def measure(what: str, scenario: Scenario) -> tuple[float, float]:
    """CPU seconds, and events per second of them."""
    begin = process_time()
    outcome = MeasuredWorld(scenario).run()
    seconds = process_time() - begin
    assert outcome.invariant is None, outcome.violation
    rates = f"{outcome.events / seconds:,.0f} events and {outcome.tokens / seconds:,.0f} tokens a second"
    print(f"{what}: {seconds:.1f} s of CPU, {outcome.virtual_seconds:,.0f} virtual s, {rates}", flush=True)
    return seconds, outcome.events / seconds


def missed(seconds: float, events_per_second: float) -> list[str]:
    """Goals that these figures miss."""
    slow = [f"{seconds:.1f} s of CPU; the goal is {SECONDS_MAX:.0f} s at most"] if seconds > SECONDS_MAX else []
    if events_per_second < EVENTS_PER_SECOND_MIN:
        slow.append(f"{events_per_second:,.0f} events per second; the goal is {EVENTS_PER_SECOND_MIN:,.0f} at least")
    return slow


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=12_000, help="to 8 instances")
    parser.add_argument("--goals", action="store_true", help="exit status 1 if the first misses its goals")
    options = parser.parse_args()
    requests = options.requests
    figures = measure(f"8 instances, {requests:,} requests of 43 + 300 tokens", cluster(8, requests, 43, 300, 32, 0.07))
    measure("100 instances, 1,000 requests of 12 + 12 tokens", cluster(100, 1_000, 12, 12, 4, 0.002))
    misses = missed(*figures) if options.goals else []
    for miss in misses:
        print(f"MISSED: {miss}", flush=True)
    return int(bool(misses))


if __name__ == "__main__":
    raise SystemExit(main())
