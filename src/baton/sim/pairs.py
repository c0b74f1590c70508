"""Pairs of fault kinds: each must happen in one run, in a campaign that is large enough.

Two faults that are drawn apart meet seldom. So every second seed has a pair of its own, by its number: 2 * n seeds in a row
have each of the n pairs once, however the rest of the scenario is drawn. The pair comes in addition to the faults of the swarm.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations
from random import Random
from typing import Final, Literal, get_args

from baton.sim.scenario import (
    CacheFault,
    CacheFaultKind,
    Client,
    ClusterFault,
    ClusterFaultKind,
    Nudge,
    NudgeKind,
    Scenario,
    StepFault,
    StepFaultKind,
)

Kind = Literal["instance", "cluster", "front"]
COPY: Final = "copy "
"""Before the kind of a cache fault."""
NUDGES: Final[tuple[NudgeKind, ...]] = get_args(NudgeKind)
STEPS: Final[tuple[StepFaultKind, ...]] = get_args(StepFaultKind)
COPIES: Final[tuple[CacheFaultKind, ...]] = get_args(CacheFaultKind)
OF_RANKS: Final = ("rank_dies", "rank_hangs", "rank_late", "rank_differs", "rank_hello", "copy short")
OF_TIERS: Final = ("cache_crash", "cache_hang", "clear", *(COPY + kind for kind in COPIES))
UNPAIRED: Final[dict[str, str]] = {
    "leave": "a client that leaves is no fault of a process",
    "stray": "it counts when a router accepts it, and that takes a moment without any instance",
}
"""Kinds of a cluster that need not meet every other one, and why."""
OF_CLUSTERS: Final[tuple[ClusterFaultKind, ...]] = tuple(kind for kind in get_args(ClusterFaultKind) if kind not in UNPAIRED)
STEPS_OF_CLUSTERS: Final = tuple(kind for kind in STEPS if kind not in ("oom", "plod") and kind not in OF_RANKS)
COPIES_OF_CLUSTERS: Final = ("slow", "error", "repeat", "silent")

FAULTS: Final[dict[Kind, tuple[str, ...]]] = {
    "instance": (*NUDGES, *STEPS, "poison", *(COPY + kind for kind in COPIES)),
    "cluster": (*OF_CLUSTERS, *STEPS_OF_CLUSTERS, "poison", *(COPY + kind for kind in COPIES_OF_CLUSTERS)),
    "front": ("kill", "reload", "freeze", "worker", "reload_worker", "worker_hang", "sleep"),
}
"""Kinds of faults as they are counted when they happen, by kind of scenario."""

AMOUNTS: Final[dict[str, tuple[float, ...]]] = {
    "preempt": (1, 4), "evict": (2, 10_000), "clock": (-3.0, 3.0), "pause": (0.05, 0.5), "restart_fails": (1, 2),
    "freeze": (0.1, 2.0), "crash_loop": (1, 3), "cache_crash": (0.2, 0.8), "reload": (0, 1, 2), "rank_hello": (0, 1, 2, 3),
    "sleep": (0.2, 1.0),
}  # fmt: skip
SECONDS: Final[dict[str, tuple[float, ...]]] = {
    "slow": (0.05, 0.3), "late": (0.02, 0.1), "repeat": (0.02, 0.1), "garble": (0, 1, 2, 3, 4), "oom": (0.3, 1.5),
    "rank_late": (0.0, 0.05), COPY + "slow": (0.1, 0.4), COPY + "repeat": (0.1, 0.4),
}  # fmt: skip


@cache
def pairs(kind: Kind) -> tuple[tuple[str, str], ...]:
    return tuple(combinations(sorted(FAULTS[kind]), 2))


def pair_of(seed: int, kind: Kind) -> tuple[str, ...]:
    """The pair of a seed; every second seed has none."""
    every = pairs(kind)
    turn, number = divmod(seed, len(every))
    return every[number] if (turn + number) % 2 == 0 else ()


def seeds_for_pairs(kind: Kind) -> int:
    """Seeds in a row that have each pair at least once."""
    return 2 * len(pairs(kind))


def strike_instance(scenario: Scenario, pair: tuple[str, ...], last: float, rng: Random) -> None:
    """Add faults of these kinds to a plain instance. `last`: arrival of its last client."""
    _add_late_clients(scenario, (last, last + 3.0, last + 10.0))
    if any(kind in OF_RANKS for kind in pair):
        scenario.ranks = max(2, scenario.ranks)
    if any(kind in OF_TIERS for kind in pair):
        scenario.prefix_caching, scenario.storage = True, True
        scenario.host_blocks = scenario.host_blocks or max(1, scenario.blocks)
    for place, kind in enumerate(pair):
        if kind in AMOUNTS or kind in NUDGES:
            times = [rng.uniform(0.0, last + 0.2) for _ in range(2)]
            scenario.nudges += [Nudge(at, kind, rng.choice(AMOUNTS.get(kind, (1,)))) for at in times]  # type: ignore[arg-type]
            if kind == "pause":
                scenario.nudges.append(Nudge(max(times) + 0.6, "resume"))
        else:
            _strike(scenario, scenario.steps, scenario.cache_faults, kind, place, rng)
    scenario.nudges.sort(key=lambda nudge: nudge.at)


def strike_cluster(scenario: Scenario, pair: tuple[str, ...], last: float, rng: Random) -> None:
    """Add faults of these kinds to a cluster."""
    assert scenario.cluster is not None
    cluster = scenario.cluster
    _add_late_clients(scenario, (last, last + 1.0, last + 3.0))  # soon enough that what they meet is excused by the faults
    if any(kind.startswith(COPY) for kind in pair):
        scenario.prefix_caching = True
        for instance in cluster.instances:
            instance.host_blocks = instance.host_blocks or 8
    for place, kind in enumerate(pair):
        target = rng.randrange(len(cluster.instances))
        if kind in OF_CLUSTERS:
            seconds = rng.randint(1, 20) if kind in ("preempt", "evict") else rng.choice((0.0, 0.2, 1.0))
            at = rng.uniform(0.0, last + 0.2)
            fault = ClusterFault(kind, at=at, target=target, router=rng.randrange(cluster.routers))
            fault.seconds = seconds
            cluster.faults.append(fault)
            continue
        for instance in cluster.instances:
            _strike(scenario, instance.steps, instance.cache_faults, kind, place, rng)


def _add_late_clients(scenario: Scenario, times: tuple[float, ...]) -> None:
    """Clients of the size of the first: there are steps after a kind has struck and is repaired. No worker is given up: the
    other kind could not strike any more."""
    scenario.worker_restarts_max = 5
    first = scenario.clients[0]
    for number, at in enumerate(times):
        scenario.clients.append(Client(f"late{number}", at, first.prompt, first.max_tokens, seed=number))


def _strike(scenario: Scenario, steps: list[StepFault], copies: list[CacheFault], kind: str, place: int, rng: Random) -> None:
    """Early steps and moves, as short runs have few. `place`: of the kind in its pair; the other has the steps between."""
    numbers = [2 * turn + place + 1 for turn in (0, rng.randint(1, 4))]
    seconds = rng.choice(SECONDS.get(kind, (0.0,)))
    if kind == "poison":
        for client in (scenario.clients[0], scenario.clients[-1], *rng.sample(scenario.clients, min(2, len(scenario.clients)))):
            client.poison_at = 0
    elif kind.startswith(COPY):
        taken = {fault.move for fault in copies}
        moves = [number for number in (*numbers, place + 11) if number not in taken]
        copies += [CacheFault(move, kind.removeprefix(COPY), seconds) for move in dict.fromkeys(moves)]  # type: ignore[arg-type]
    else:
        seconds = 1.5 * scenario.step_seconds_max if kind == "plod" else seconds
        steps += [StepFault(step, kind, seconds) for step in numbers]  # type: ignore[arg-type]
