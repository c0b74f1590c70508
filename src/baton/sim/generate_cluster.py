"""Clusters from seeds. As for a plain instance (sim/generate.py): a swarm of features, few kinds of faults, tiny sizes.

A seed in eight has no fault at all; the others have one to three kinds, of which each strikes a few times: at a stage of a
hand-off (so that short stages are hit too) or at any time. Every second seed has a pair of kinds in addition (pairs.py). In 1
of 32 a few long requests are hunted from one instance to the next. In 1 of 6, beside all else, weights change: the files of an
instance, or of all, are replaced, or a stray dials. In 1 of 8 with faults, every worker is a set of ranks.
"""

from __future__ import annotations

from random import Random
from typing import get_args

from baton.sim.generate import drafts, long_prompts, step_faults, stop_last, stop_repetitions, storage_wants_tokens
from baton.sim.pairs import pair_of, strike_cluster
from baton.sim.prompts import PromptTree, stream
from baton.sim.scenario import (
    VOCAB,
    WEIGHTS_FAULTS,
    CacheFault,
    CacheFaultKind,
    Client,
    Cluster,
    ClusterFault,
    ClusterFaultKind,
    Digests,
    InstanceRole,
    InstanceSpec,
    Scenario,
    Stage,
    StepFault,
    StepFaultKind,
)

KINDS: tuple[ClusterFaultKind, ...] = tuple(
    kind for kind in get_args(ClusterFaultKind) if kind not in (*WEIGHTS_FAULTS, "sleep")
)
STAGES: tuple[Stage, ...] = get_args(Stage)
STEP_FAULTS = ("slow", "crash", "late", "repeat", "ghost", "garble", "hang", "lose_result", "lose_plan")
CLIENT_FAULTS = ("poison", "nan", "stop_string", "abort")
FEATURES = ("n", "priority", "stop", "min", "timeout", "salt", "burst", "logprobs")
RANK_FAULTS: tuple[StepFaultKind, ...] = ("rank_dies", "rank_hangs", "rank_late", "rank_differs")
HUNTED = 1 / 16
QUIET = 1 / 7
"""Shares of the seeds without a pair of faults: every second one."""
UNEQUAL = 1 / 6
SMALL_BOUNDS = 1 / 4
STOP_LAST = 1 / 6
OTHER_WEIGHTS = 1 / 6
RELOADS: tuple[ClusterFaultKind, ...] = ("reload", "reload_worker")
DIGESTS: tuple[Digests, ...] = ("true", "true", "true", "true", "true", "none", "no removals", "made up")
LONG_ENOUGH = 2.5
"""Seconds of silence after which both sides end a session."""


def generate_cluster(seed: int) -> Scenario:
    rng = stream(seed, "cluster")
    scenario = Scenario(
        seed=seed,
        blocks=0,
        block_size=rng.choice((1, 2, 3, 4, 4, 8, 16)),
        slots=0,
        tokens_per_step=0,
        clients=[],
        steps_in_flight=rng.choice((1, 2, 2, 3)),
        order="priority" if rng.random() < 0.8 else "arrival",
        prefix_caching=rng.random() < 0.8,
        eviction="lru" if rng.random() < 0.7 else "lfu",
        reserve_start=rng.choice((0.0, 0.05, 0.4)),
        worker_restarts_max=rng.choice((1, 5, 5)),
        noise=rng.choice((0.0, 0.5, 2.0)),
        restart_seconds=rng.choice((0.05, 0.5, 1.5)),
        step_seconds_max=rng.choice((1.0, 5.0)),
    )
    scenario.clients = _clients(seed, scenario, rng)
    long_prompts(scenario, stream(seed, "long prompts"))
    scenario.cluster = _cluster(scenario, rng)
    pair = pair_of(seed, "cluster")
    kinds = [] if not pair and stream(seed, "quiet").random() < QUIET else _chosen(rng)
    slow = scenario.cluster.delay * (1 + scenario.cluster.jitter) > 0.01
    if not kinds or slow:  # a hand-off takes several messages and must have the time
        scenario.cluster.lease_seconds = scenario.cluster.handing_seconds_max = 10.0
    _faults(scenario, scenario.cluster, [kind for kind in KINDS if kind in kinds], stream(seed, "cluster faults"))
    _node_faults(scenario, scenario.cluster, kinds, stream(seed, "node faults"))
    _client_faults(scenario, kinds, stream(seed, "client faults"))
    last = max(client.at for client in scenario.clients)
    if pair:
        strike_cluster(scenario, pair, last, stream(seed, "pair"))
    _unequal(scenario, scenario.cluster, stream(seed, "unequal"))
    _small_bounds(scenario.cluster, stream(seed, "router bounds"))
    scenario.cluster.handoff_room_seconds = stream(seed, "handoff room").choice((5.0, 0.05, 0.3))
    stop_last(scenario.clients, STOP_LAST, stream(seed, "stop last"))
    hunt = stream(seed, "hunted")
    if not pair and hunt.random() < HUNTED:
        _repeatedly_disturbed(scenario, scenario.cluster, hunt)
    weights = stream(seed, "weights")
    if weights.random() < OTHER_WEIGHTS:
        _other_weights(scenario, scenario.cluster, weights)
    _sleeps(scenario.cluster, max(client.at for client in scenario.clients) + 1.0, stream(seed, "sleeps"))
    scenario.storage_tokens = storage_wants_tokens(scenario)
    bounds = stream(seed, "bounds")
    if bounds.random() < 0.2:
        scenario.bound = bounds.choice((1, 2, 4))
    chunks = stream(seed, "handoff chunks")
    if chunks.random() < 0.25:
        scenario.handoff_chunk_tokens_min = chunks.choice((1, 2, 4, 8))
    gap = stream(seed, "decode gap")
    if gap.random() < 0.1:
        scenario.decode_gap_seconds, scenario.token_seconds = gap.choice((0.005, 0.02, 0.05)), gap.choice((0.001, 0.01))
    if longest_step(scenario) > scenario.step_seconds_max:
        scenario.token_seconds = 0.001
    stop_repetitions(scenario.clients, stream(seed, "repetitions"))
    drafts(scenario, stream(seed, "drafts"))
    scenario.digests = stream(seed, "digests").choice(DIGESTS)
    if kinds or pair:
        _ranks(scenario, scenario.cluster, stream(seed, "ranks"))
    return scenario


def longest_step(scenario: Scenario) -> float:
    """Seconds of the longest step without a fault. One that is late is a worker's loss, and its requests are poison."""
    assert scenario.cluster is not None
    steps = (
        (scenario.step_seconds + scenario.token_seconds * instance.tokens_per_step) * instance.speed
        for instance in scenario.cluster.instances
    )
    return max(steps) * (1.0 + scenario.noise)


def _chosen(rng: Random) -> list[str]:
    everything = (*KINDS, *STEP_FAULTS, *CLIENT_FAULTS, "move")
    roll = rng.random()
    if roll < 0.125:
        return []
    if roll < 0.2:
        return [kind for kind in everything if rng.random() < 0.3]
    if roll < 0.8:
        return rng.sample(KINDS, rng.randint(1, 3))
    return rng.sample(everything, rng.randint(1, 3))


def _clients(seed: int, scenario: Scenario, swarm: Random) -> list[Client]:
    features = {name: swarm.random() < 0.4 for name in FEATURES}
    spread = 0.0 if features["burst"] else 10 ** swarm.uniform(-2.5, -0.5)
    long_output = swarm.choice((2, 4, 12, 30))
    tree = PromptTree(stream(seed, "prompts"), scenario.block_size)
    clients: list[Client] = []
    at = 0.0
    for number in range(swarm.choice((6, 20, 48, 72, 96, 120))):
        rng = stream(seed, f"client {number}")
        at += rng.expovariate(1.0) * spread
        most = rng.randint(1, long_output)
        client = Client(f"r{number}", at, tree.prompt(rng), most, seed=rng.choice((0, rng.randrange(1000))))
        client.n = rng.choice((1, 1, 2, 3)) if features["n"] else 1
        client.priority = rng.choice((-1, 0, 0, 5)) if features["priority"] else 0
        client.min_tokens = min(most, rng.randint(0, 3)) if features["min"] else 0
        client.stop = [rng.randrange(VOCAB)] if features["stop"] else []
        client.timeout = rng.uniform(0.01, 4.0) if features["timeout"] and rng.random() < 0.3 else None
        client.salt = rng.choice(("", "a")) if features["salt"] else ""
        if features["logprobs"]:
            client.logprobs, client.prompt_logprobs = rng.choice((None, 0, 2)), rng.choice((None, None, 0))
        clients.append(client)
    return clients


def _cluster(scenario: Scenario, rng: Random) -> Cluster:
    counts: dict[InstanceRole, int] = {
        "prefill": rng.randint(1, 3),
        "decode": rng.randint(1, 3),
        "mixed": rng.choice((0, 0, 0, 1, 2)),
    }
    if rng.random() < 0.05:
        counts["prefill" if rng.random() < 0.5 else "decode"] = 0
    worst = max(-(-(len(c.prompt) + c.max_tokens - 1) // scenario.block_size) for c in scenario.clients)
    tiers = scenario.prefix_caching and rng.random() < 0.3
    if tiers:
        scenario.storage = rng.random() < 0.6
        scenario.write = rng.choice(("through", "through", "selective", "back"))
        scenario.preempted = rng.choice(("host", "drop"))
    instances = [_node(role, worst, tiers, rng) for role, count in counts.items() for _ in range(count)]
    if not instances:
        instances = [_node("mixed", worst, tiers, rng)]
    return Cluster(
        instances,
        routers=rng.choice((1, 1, 2)),
        delay=10 ** rng.uniform(-4.0, -1.7),
        jitter=rng.choice((0.0, 1.0, 5.0)),
        remote=rng.random() < 0.3,
        skew=rng.random() < 0.5,
        measured=rng.random() < 0.2,
        policy=rng.choice(("prefix", "prefix", "load", "prefix", "load")),
        handoff_tokens_min=rng.choice((0, 0, 0, 0, 4, 12)),
        waiting_prompts_max=rng.choice((0, 1, 1, 3)),
        migrations_max=rng.choice((0, 1, 3, 3, 3)),
        router_queue_max=rng.choice((4, 1024, 1024, 1024)),
        lease_seconds=rng.choice((0.5, 10.0, 10.0)),
        handing_seconds_max=rng.choice((0.3, 10.0, 10.0)),
    )


def _node(role: InstanceRole, worst: int, tiers: bool, rng: Random) -> InstanceSpec:
    slots = rng.choice((1, 2, 4, 8))
    factor = rng.choice((1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0))
    blocks = max(1, round(worst * factor) + rng.choice((0, 0, 1)))
    if rng.random() < 0.05:
        blocks = max(1, blocks // 2)
    return InstanceSpec(
        role,
        blocks,
        slots,
        tokens_per_step=slots + rng.choice((0, 1, 5, 16, 64)),
        chunk_tokens_max=rng.choice((None, None, 1, 3, 7, 16)),
        host_blocks=rng.choice((0, 4, 16, 2 * blocks)) if tiers else 0,
        speed=rng.choice((0.3, 1.0, 1.0, 3.0)),
    )


def _unequal(scenario: Scenario, cluster: Cluster, rng: Random) -> None:
    """Make some instances too small for some requests; one decode or mixed instance holds all. Now and then that instance
    restarts."""
    decoders = [number for number, instance in enumerate(cluster.instances) if instance.role != "prefill"]
    if rng.random() >= UNEQUAL or len(decoders) < 2:
        return
    worst = max(-(-(len(c.prompt) + c.max_tokens - 1) // scenario.block_size) for c in scenario.clients)
    large = rng.choice(decoders)
    for number, instance in enumerate(cluster.instances):
        if number == large:
            instance.blocks = max(instance.blocks, worst + 1)
        elif rng.random() < 0.7:
            instance.blocks = max(1, round(worst * rng.uniform(0.3, 0.8)))
    if rng.random() < 0.4:
        at = rng.uniform(0.0, max(client.at for client in scenario.clients) + 0.5)
        cluster.faults.append(ClusterFault("kill", at=at, target=large, seconds=rng.choice((0.1, 0.5, 1.0))))


def _small_bounds(cluster: Cluster, rng: Random) -> None:
    """Draw small bounds, which nothing reaches with their defaults."""
    if rng.random() >= SMALL_BOUNDS:
        return
    cluster.silence_seconds_max = rng.choice((600.0, 1.0, 3.0))
    cluster.prefill_seconds_max = rng.choice((600.0, 1.0, 3.0))
    cluster.queue_seconds_max = rng.choice((300.0, 2.0, 6.0))
    cluster.overdrawn_max = rng.choice((8, 1, 2))
    cluster.handoff_retry_interval = rng.choice((32, 1, 3))
    cluster.prefix_keys_max = rng.choice((1_000_000, 1, 20, 100))


def _faults(scenario: Scenario, cluster: Cluster, kinds: list[ClusterFaultKind], rng: Random) -> None:
    end = max(client.at for client in scenario.clients) + 1.0
    for kind in kinds:
        for _ in range(rng.choice((1, 1, 2, 4))):
            seconds = rng.choice((rng.uniform(0.0, 0.2), rng.uniform(0.2, LONG_ENOUGH), rng.uniform(LONG_ENOUGH, 5.0)))
            if kind == "cut":
                seconds = rng.choice((0.0, 0.001, 0.02, 0.5))
            elif kind in ("preempt", "evict"):
                seconds = rng.randint(1, 20)
            fault = ClusterFault(kind, seconds=seconds, unseen=rng.random() < 0.3)
            if kind == "leave" or rng.random() < 0.7:
                fault.stage, fault.nth = rng.choice(STAGES), rng.choice((1, 1, 2, 3, rng.randint(1, 20)))
                fault.party = rng.choice(("prefill", "decode", "router") if rng.random() < 0.4 else ("prefill", "decode"))
            else:
                fault.at, fault.router = rng.uniform(0.0, end), rng.randrange(cluster.routers)
                fault.target = rng.randrange(len(cluster.instances) + (cluster.routers if rng.random() < 0.3 else 0))
            cluster.faults.append(fault)
    if "kill" in kinds and rng.random() < 0.1:  # no instance for longer than a request waits for one
        at = rng.uniform(0.0, end)
        cluster.faults += [
            ClusterFault("kill", at=at, target=instance, seconds=12.0) for instance in range(len(cluster.instances))
        ]


def _node_faults(scenario: Scenario, cluster: Cluster, kinds: list[str], rng: Random) -> None:
    for instance in cluster.instances:
        chosen = [kind for kind in kinds if kind in STEP_FAULTS]
        if chosen and rng.random() < 0.7:
            instance.steps = step_faults(chosen, scenario.step_seconds_max, rng)
        if "move" in kinds:
            faults: tuple[CacheFaultKind, ...] = ("slow", "error", "repeat")
            rate = 10 ** rng.uniform(-1.5, -0.2)
            moves = [move for move in range(1, 200) if rng.random() < rate]
            instance.cache_faults = [CacheFault(move, rng.choice(faults), rng.uniform(0.0, 0.4)) for move in moves]


def _client_faults(scenario: Scenario, kinds: list[str], rng: Random) -> None:
    for client in scenario.clients:
        if "abort" in kinds and rng.random() < 0.4:
            client.abort_at = client.at + 10 ** rng.uniform(-3.0, 0.3)
        if "stop_string" in kinds and rng.random() < 0.4:
            client.stop_string_at = rng.randint(1, 6)
        if "poison" in kinds and rng.random() < 0.1:
            client.poison_at = rng.randint(0, 3)
        if "nan" in kinds and rng.random() < 0.1:
            client.nan_at = rng.randint(0, 3)


def _repeatedly_disturbed(scenario: Scenario, cluster: Cluster, rng: Random) -> None:
    """Instance after instance preempts its requests, is late to resume them, and loses its session: a request has been at
    several instances, with room everywhere, when it is placed once more."""
    scenario.clients = scenario.clients[: rng.randint(2, 6)]
    for number, client in enumerate(scenario.clients):
        client.at, client.max_tokens, client.n, client.stop, client.timeout = 0.05 * number, rng.randint(100, 250), 1, [], None
        client.min_tokens, client.abort_at, client.stop_string_at, client.poison_at, client.nan_at = 0, None, None, None, None
    worst = max(-(-(len(c.prompt) + c.max_tokens) // scenario.block_size) for c in scenario.clients)
    roles: tuple[InstanceRole, ...] = rng.choice((("mixed",) * 4, ("mixed",) * 5, ("prefill", *("decode",) * 4)))
    cluster.instances = [InstanceSpec(role, 8 * worst, 8, tokens_per_step=rng.choice((16, 64))) for role in roles]
    cluster.routers, cluster.measured, cluster.migrations_max, cluster.router_queue_max = 1, False, 3, 1024
    cluster.lease_seconds = cluster.handing_seconds_max = 10.0
    cluster.faults = []
    order = [number for number, role in enumerate(roles) if role != "prefill"]
    rng.shuffle(order)
    for turn, instance in enumerate(order):
        at = 0.3 + turn * 0.8
        cluster.faults += [
            ClusterFault("preempt", at=at, target=instance, seconds=20),
            ClusterFault("worker_freeze", at=at, target=instance, seconds=0.4),
            ClusterFault("cut", at=at + rng.uniform(0.25, 0.45), target=instance, seconds=0.0),
        ]


def _other_weights(scenario: Scenario, cluster: Cluster, rng: Random) -> None:
    end = max(client.at for client in scenario.clients) + 1.0
    at = rng.uniform(0.0, end)
    for client in scenario.clients:  # long enough to be struck in the middle
        if rng.random() < 0.3 and not client.stop:
            client.max_tokens = max(client.max_tokens, rng.randint(4, 12))
    plot = rng.choice(("some", "all", "stray", "stray", "stray"))
    if plot == "all":  # their common disk has other files, and they come back with them one after the other
        spread, kind = rng.choice((0.0, 0.2, 3.0)), rng.choice((*RELOADS, None))
        for instance in range(len(cluster.instances)):
            cluster.faults.append(_reload(rng, at + rng.uniform(0.0, spread), instance, kind))
    elif plot == "some":
        for _ in range(rng.choice((1, 1, 2, 3))):
            fault = _reload(rng, rng.uniform(0.0, end), rng.randrange(len(cluster.instances)), None)
            fault.weights = rng.choice((1, 1, 2, 0))
            if rng.random() < 0.5:
                fault.at, fault.stage, fault.nth = None, rng.choice(STAGES), rng.choice((1, 2, 5))
                fault.party = rng.choice(("prefill", "decode"))
            cluster.faults.append(fault)
    if plot == "stray" or rng.random() < 0.2:
        _strays(cluster, at, rng)


def _sleeps(cluster: Cluster, end: float, rng: Random) -> None:
    """Let instances sleep and wake in a tenth of the seeds, beside all else. Some storages never return from a call."""
    if rng.random() < 0.1:
        for _ in range(rng.choice((1, 1, 2, 4))):
            seconds, target = rng.choice((0.2, 1.0, 4.0)), rng.randrange(len(cluster.instances))
            cluster.faults.append(ClusterFault("sleep", at=rng.uniform(0.0, end), target=target, seconds=seconds))
    for instance in cluster.instances if rng.random() < 0.1 else ():
        if instance.host_blocks:
            taken = {fault.move for fault in instance.cache_faults}
            moves = [move for move in sorted(rng.sample(range(1, 60), rng.choice((1, 3)))) if move not in taken]
            instance.cache_faults += [CacheFault(move, "silent") for move in moves]


def _ranks(scenario: Scenario, cluster: Cluster, rng: Random) -> None:
    """Give all workers several ranks in an eighth of the seeds. One may die, hang, be late or differ in a step, or pull or move
    less than the others."""
    if rng.random() >= 1 / 8:
        return
    scenario.ranks = rng.choice((2, 2, 3))
    for instance in cluster.instances:
        steps = sorted(rng.sample(range(1, 60), rng.choice((0, 0, 1, 2))))
        instance.steps += [StepFault(step, rng.choice(RANK_FAULTS), rng.uniform(0.0, 0.05)) for step in steps]
        taken = {fault.move for fault in instance.cache_faults}
        moves = [move for move in sorted(rng.sample(range(1, 40), rng.choice((0, 2, 8)))) if move not in taken]
        instance.cache_faults += [CacheFault(move, "short") for move in moves]


def _reload(rng: Random, at: float, instance: int, kind: ClusterFaultKind | None) -> ClusterFault:
    chosen: ClusterFaultKind = rng.choice(RELOADS) if kind is None else kind
    return ClusterFault(chosen, at=at, target=instance, seconds=rng.choice((0.0, 0.05, rng.uniform(0.0, 3.0))))


def _strays(cluster: Cluster, at: float, rng: Random) -> None:
    """Add strays and, in most seeds, a moment in which a router has no instance: it is killed, cut off or stalled, or all
    instances are killed."""
    instances = len(cluster.instances)
    for _ in range(rng.choice((1, 1, 2))):
        begins, seconds = max(0.0, at + rng.uniform(-2.0, 1.0)), rng.choice((0.5, 4.0, 15.0, 30.0))
        weights, alias = rng.choice((1, 1, 2)), rng.random() < 0.4
        stray = ClusterFault("stray", at=begins, target=rng.randrange(instances), seconds=seconds, weights=weights, alias=alias)
        cluster.faults.append(stray)
    router = instances + rng.randrange(cluster.routers)
    match rng.choice(("nothing", "kill", "cut", "instances", "stall")):
        case "kill":
            cluster.faults.append(ClusterFault("kill", at=at, target=router, seconds=rng.choice((0.0, 0.3, 2.0))))
        case "cut":
            cluster.faults.append(ClusterFault("cut", at=at, target=router, seconds=0.0, unseen=rng.random() < 0.5))
        case "stall":
            cluster.faults.append(ClusterFault("stall", at=at, target=router, seconds=rng.uniform(LONG_ENOUGH, 4.0)))
        case "instances":
            down = rng.choice((0.1, 1.0, 12.0))
            cluster.faults += [ClusterFault("kill", at=at, target=instance, seconds=down) for instance in range(instances)]
