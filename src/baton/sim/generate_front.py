"""Scenarios of `baton serve` from seeds: an engine behind its front, a few clients with tiny prompts, one to four faults,
and in two of five seeds an order to sleep."""

from __future__ import annotations

from random import Random

from baton.sim.prompts import PromptTree, stream
from baton.sim.scenario import VOCAB, Client, Cluster, ClusterFault, InstanceSpec, Scenario


def generate_front(seed: int) -> Scenario:
    rng = stream(seed, "front")
    size = rng.choice((1, 2, 4, 8))
    tree = PromptTree(stream(seed, "front prompts"), size)
    clients = [_client(number, tree, rng) for number in range(rng.randint(2, 8))]
    worst = max(-(-(len(client.prompt) + client.max_tokens) // size) * client.n for client in clients)
    instance = InstanceSpec("mixed", worst * rng.choice((1, 2, 4)) + 2, rng.choice((3, 4, 8)), 256)
    scenario = Scenario(seed, 0, size, 0, 0, clients, steps_in_flight=rng.choice((1, 2, 3)), restart_seconds=0.05)
    faults = sorted(_fault(rng) for _ in range(rng.randint(1, 4))) if seed % 8 else []
    more = stream(seed, "front stops and workers")
    for client in clients:
        client.stop_string_at = more.randint(1, 6) if more.random() < 0.2 else None
    for _ in range(more.choice((0, 0, 1, 2)) if seed % 8 else 0):
        at, kind = more.uniform(0.0, 0.8), more.choice(("worker", "reload_worker", "worker_hang"))
        faults.append((at, 0, ClusterFault(kind, at=at, seconds=0.1, weights=more.choice((0, 1, 1)))))  # type: ignore[arg-type]
    sleeps = stream(seed, "front sleeps")
    for _ in range(sleeps.choice((0, 0, 0, 1, 2)) if seed % 8 else 0):
        at, seconds = sleeps.uniform(0.0, 0.8), sleeps.choice((0.05, 0.2, 1.0))
        kills = [fault for _, _, fault in faults if fault.kind in ("kill", "reload")]
        if kills and sleeps.random() < 0.5:  # as soon as there is an engine again: replays are on their way to it
            lost = sleeps.choice(kills)
            at = (lost.at or 0.0) + lost.seconds + sleeps.choice((0.0, 0.225)) + sleeps.uniform(0.0, 0.004)
        faults.append((at, 0, ClusterFault("sleep", at=at, seconds=seconds)))
    scenario.cluster = Cluster([instance], front=True, faults=[fault for _, _, fault in faults])
    return scenario


def _client(number: int, tree: PromptTree, rng: Random) -> Client:
    most = rng.randint(1, 30)
    client = Client(f"r{number}", rng.uniform(0.0, 0.3), tree.prompt(rng), most, seed=rng.randrange(1000))
    client.n = rng.choice((1, 1, 2, 3))
    client.stop = [rng.randrange(VOCAB)] if rng.random() < 0.2 else []
    client.timeout = rng.uniform(0.05, 2.0) if rng.random() < 0.15 else None
    client.logprobs, client.prompt_logprobs = rng.choice((None, None, 0, 2)), rng.choice((None, None, None, 0))
    client.abort_at = rng.uniform(0.0, 1.5) if rng.random() < 0.4 else None
    client.stop_last_at = rng.uniform(0.0, 1.0) if rng.random() < 0.3 else None
    return client


def _fault(rng: Random) -> tuple[float, int, ClusterFault]:
    at, kind = rng.uniform(0.0, 0.8), rng.choice(("kill", "kill", "reload", "freeze"))
    seconds = rng.choice((0.0, 0.1, 0.5))
    weights = rng.choice((0, 1, 1))
    return at, rng.randrange(1 << 30), ClusterFault(kind, at=at, seconds=seconds, weights=weights)  # type: ignore[arg-type]
