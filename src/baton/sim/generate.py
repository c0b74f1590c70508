"""Scenarios from seeds. They form a swarm: each feature is on in about half of the seeds, each kind of fault in some.

70 % of the seeds have one to three kinds of faults, 5 % about half of all kinds, 5 % none; 10 % are long (500 requests and
more, at most two kinds), 10 % have a pool so tight that requests are preempted, and no fault at all. A seed in 500 is a burst
of 10,000 requests at once. Every second seed has a pair of kinds in addition (pairs.py), but no tight or burst one.

Every part draws from a stream of its own, named by the seed and what it is for, so that taking one part out does not re-roll
the others. Sizes are tiny on purpose, so that collisions, evictions and preemptions are frequent.
"""

from __future__ import annotations

from random import Random
from typing import Literal, get_args

from baton.protocol.repetition import RepetitionStop
from baton.sim.pairs import pair_of, strike_instance
from baton.sim.prompts import PromptTree, stream
from baton.sim.scenario import (
    VOCAB,
    Abortable,
    CacheFault,
    CacheFaultKind,
    Client,
    Nudge,
    NudgeKind,
    Scenario,
    StepFault,
    StepFaultKind,
)

FAULTS = ("slow", "stall", "crash", "late", "repeat", "ghost", "garble", "abort", "preempt", "evict", "clock", "pause",
          "poison", "nan", "restart_fails", "again", "stop_string", "hang", "lose_result", "restart_hangs", "lose_plan",
          "freeze", "oom", "crash_loop")  # fmt: skip
CACHE_FAULTS: tuple[CacheFaultKind, ...] = tuple(
    kind for kind in get_args(CacheFaultKind) if kind not in ("full", "silent", "short")
)
"""Kinds drawn independently. Storage stays full for a while (`_full_and_cleared`), and is silent by `_silent_and_bounded`;
ranks move fewer blocks than others by `_ranks`."""
PHASES: tuple[Abortable, ...] = ("held", "waiting", "loading", "prefill", "decode", "preempting", "closing", "end")


Kind = Literal["swarm", "long", "tight", "burst"]
BURST_EVERY = 500
BURST = 10_000


def kind_of(seed: int) -> Kind:
    if seed % BURST_EVERY == BURST_EVERY - 1:
        return "burst"
    roll = stream(seed, "kind").random()
    return "long" if roll < 0.1 else "tight" if roll < 0.3 and not pair_of(seed, "instance") else "swarm"


def generate(seed: int) -> Scenario:
    kind, rng = kind_of(seed), stream(seed, "swarm")
    scenario = _instance(seed, rng)
    scenario.prefill_tokens_beside_decodes = stream(seed, "beside decodes").choice((None, None, None, 1, 2, 5, 16))
    faults = _chosen_faults(kind, rng)
    if kind == "burst":
        scenario.slots, scenario.tokens_per_step, scenario.chunk_tokens_max = 256, 2048, None
        scenario.queue_requests_max, scenario.queue_tokens_max = BURST, 1_000_000
        scenario.clients = _burst(seed)
        scenario.blocks = 2048
        return scenario
    scenario.clients = _clients(seed, scenario, kind, rng)
    if kind != "long":
        long_prompts(scenario, stream(seed, "long prompts"))
        _plan_bounds(scenario, stream(seed, "plan bounds"))
    _size_pool(scenario, kind, rng)
    last = max(client.at for client in scenario.clients)
    _client_faults(scenario, faults, stream(seed, "client faults"))
    kills = stream(seed, "kills")
    scenario.worker_kills_max, scenario.poison_unseen = kills.choice((1, 2, 5, 5)), kills.random() < 0.3
    scenario.steps += step_faults(faults, scenario.step_seconds_max, stream(seed, "step faults"))
    _plods(scenario, kind, stream(seed, "plods"))
    _nudges(scenario, faults, last, stream(seed, "nudges"))
    if kind != "tight":
        _tiers(scenario, last, stream(seed, "tiers"))
    _full_and_cleared(scenario, last, stream(seed, "full and cleared"))
    _silent_and_bounded(scenario, stream(seed, "silent and bounded"))
    if kind != "tight":
        _other_weights(scenario, last, stream(seed, "weights"))
    scenario.storage_tokens = storage_wants_tokens(scenario)
    stop_repetitions(scenario.clients, stream(seed, "repetitions"))
    drafts(scenario, stream(seed, "drafts"), faults=kind != "tight")
    if pair := pair_of(seed, "instance"):
        strike_instance(scenario, pair, last, stream(seed, "pair"))
    elif kind != "tight":
        _sleeps(scenario, last, stream(seed, "sleeps"))
    if kind == "swarm" and faults:
        _ranks(scenario, stream(seed, "ranks"))
        _silent_rank(scenario, stream(seed, "silent rank"))
        stop_last(scenario.clients, 1 / 8, stream(seed, "stop last"))
    return scenario


def _ranks(scenario: Scenario, rng: Random) -> None:
    """Give the worker several ranks in an eighth of the seeds. One may die, hang, be late or differ, in a step or in its
    hello."""
    if rng.random() >= 1 / 8:
        return
    scenario.ranks = rng.choice((2, 2, 3, 8))
    kinds: tuple[StepFaultKind, ...] = ("rank_dies", "rank_hangs", "rank_late", "rank_late", "rank_differs")
    steps = sorted(rng.sample(range(1, 60), rng.choice((0, 1, 2, 5))))
    scenario.steps += [StepFault(step, rng.choice(kinds), rng.uniform(0.0, 0.05)) for step in steps]
    if scenario.host_blocks:
        taken = {fault.move for fault in scenario.cache_faults}
        moves = [move for move in sorted(rng.sample(range(1, 60), rng.choice((2, 8)))) if move not in taken]
        scenario.cache_faults += [CacheFault(move, "short") for move in moves]
    for _ in range(rng.choice((0, 0, 1, 3))):  # the worker is killed, and the ranks of the next one contradict each other
        at = rng.uniform(0.0, 1.0)
        scenario.nudges += [Nudge(at, "rank_hello", rng.randrange(4)), Nudge(at, "crash")]
    scenario.nudges.sort(key=lambda nudge: nudge.at)


def _silent_rank(scenario: Scenario, rng: Random) -> None:
    """Let a rank send no digest any more in some of these seeds."""
    if scenario.ranks > 1 and rng.random() < 1 / 6:
        scenario.steps.append(StepFault(rng.randint(1, 40), "rank_late", every=True))


def drafts(scenario: Scenario, rng: Random, *, faults: bool = True) -> None:
    """Let workers draft in a quarter of the seeds, from never right to always right, and some requests allow few drafts or
    none. With `faults`, some workers answer a token more than they drafted, or none."""
    if rng.random() < 0.25:
        scenario.drafts_max, scenario.draft_truth = rng.choice((1, 2, 3, 8, 16)), rng.choice((0.0, 0.3, 0.7, 0.9, 1.0))
        more = rng.choice((0, 0, 3, 16, 64))
        if scenario.decode_gap_seconds is None:  # prompts have a bound of their own (_plan_bounds)
            scenario.tokens_per_step += more
        if faults and rng.random() < 0.1:
            steps = scenario.steps if scenario.cluster is None else rng.choice(scenario.cluster.instances).steps
            steps.append(StepFault(rng.randint(2, 40), "garble", rng.choice((5, 6))))
        for client in scenario.clients:
            if rng.random() < 0.2:
                client.drafts_max = rng.choice((0, 1, 2, 100))


def stop_last(clients: list[Client], share: float, rng: Random) -> None:
    """Let fronts end the last of several sequences, and keep the others, in some seeds."""
    if rng.random() < share:
        for client in clients:
            if rng.random() < 0.5 and client.stop_string_at is None:
                client.n = rng.choice((2, 2, 3))
                client.stop_last_at = client.at + 10 ** rng.uniform(-3.0, 0.3)


def stop_repetitions(clients: list[Client], rng: Random) -> None:
    """End some answers when they repeat themselves, in a quarter of the seeds. Small vocabularies make that frequent."""
    if rng.random() < 0.25:
        for client in clients:
            if rng.random() < 0.6:
                low, high = sorted((rng.choice((1, 1, 2)), rng.choice((1, 2, 3, 8))))
                count, tokens = rng.choice((2, 2, 2, 3)), rng.choice((0, 2, 5, 8))
                client.repetition = RepetitionStop(pattern_min=low, pattern_max=high, count_min=count, tokens_min=tokens)
                client.vocab, client.min_tokens = rng.choice((1, 2, 2, 3, VOCAB)), rng.choice((client.min_tokens, 0, 4, 8))
                client.min_tokens = min(client.min_tokens, client.max_tokens)


def long_prompts(scenario: Scenario, rng: Random) -> None:
    """Give some prompts many steps, in one of eight seeds; most are of clients that are not urgent."""
    scenario.prompts_at_once = rng.choice((1, 2, 4, 4))
    if rng.random() < 1 / 8:
        _lengthen(scenario.clients, rng)


def _lengthen(clients: list[Client], rng: Random) -> None:
    for client in clients:
        if rng.random() < (0.05 if client.priority < 0 else 0.3):
            client.prompt = client.prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(40, 200))]


def _plan_bounds(scenario: Scenario, rng: Random) -> None:
    """Draw bounds of plans: a goal for the gap between tokens, small plans, refusal of requests too large for a plan."""
    if rng.random() < 0.15:
        scenario.decode_gap_seconds, scenario.token_seconds = rng.choice((0.005, 0.02, 0.05)), rng.choice((0.001, 0.01))
        scenario.tokens_per_step, scenario.prefill_tokens_beside_decodes = scenario.slots + 64, None
        _lengthen(scenario.clients, rng)
    if rng.random() < 0.2:
        scenario.new_bytes_max = rng.choice((100, 1000, 2000))
    if rng.random() < 0.05:
        scenario.plan_bytes_max = rng.choice((900, 1200))


def _full_and_cleared(scenario: Scenario, last: float, rng: Random) -> None:
    """Draw, with lower tiers: storage that is full for a while, caches that are cleared."""
    if scenario.storage and rng.random() < 0.25:
        begin, taken = rng.randint(1, 80), {fault.move for fault in scenario.cache_faults}
        moves = [move for move in range(begin, begin + rng.randint(10, 80)) if move not in taken]
        scenario.cache_faults += [CacheFault(move, "full", rng.uniform(0.0, 0.3)) for move in moves]
    if scenario.host_blocks and rng.random() < 0.25:
        scenario.nudges += [Nudge(rng.uniform(0.0, last + 0.5), "clear") for _ in range(rng.choice((2, 8, 20)))]
        scenario.nudges.sort(key=lambda nudge: nudge.at)


def _silent_and_bounded(scenario: Scenario, rng: Random) -> None:
    """Draw, with lower tiers: storage calls that never return, small bounds."""
    if scenario.storage and rng.random() < 0.25:
        taken = {fault.move for fault in scenario.cache_faults}
        moves = [move for move in sorted(rng.sample(range(1, 80), rng.choice((1, 3, 9)))) if move not in taken]
        scenario.cache_faults += [CacheFault(move, "silent") for move in moves]
    if scenario.host_blocks and rng.random() < 0.3:
        scenario.bound = rng.choice((1, 2, 4))


def _other_weights(scenario: Scenario, last: float, rng: Random) -> None:
    """Replace the model's files in one of sixteen seeds, once or several times, also by earlier ones."""
    if rng.random() < 1 / 16:
        for _ in range(rng.choice((1, 1, 2, 4))):
            scenario.nudges.append(Nudge(rng.uniform(0.0, last + 0.3), "reload", rng.choice((1, 1, 2, 0))))
        scenario.nudges.sort(key=lambda nudge: nudge.at)


def _sleeps(scenario: Scenario, last: float, rng: Random) -> None:
    """In one of sixteen seeds, none with a pair, the instance sleeps and is woken, in some by a worker that does not start at
    once."""
    if rng.random() >= 1 / 8:
        return
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, seconds = rng.uniform(0.0, last + 0.3), rng.choice((0.05, 0.2, 1.0, 4.0))
        scenario.nudges.append(Nudge(at, "sleep", seconds))
        if rng.random() < 0.3:
            scenario.nudges.append(Nudge(at, rng.choice(("restart_hangs", "restart_fails"))))
    scenario.nudges.sort(key=lambda nudge: nudge.at)


def storage_wants_tokens(scenario: Scenario) -> bool:
    """Whether storage finds blocks by token ids, in a third of the seeds."""
    return scenario.storage and stream(scenario.seed, "storage tokens").random() < 0.33


def _chosen_faults(kind: Kind, rng: Random) -> list[str]:
    """Choose a few kinds of faults: more of them would hide each other."""
    roll = rng.random()
    if kind in ("tight", "burst") or roll < 0.06:
        return []
    if kind == "long":
        return rng.sample(FAULTS, rng.randint(0, 2))
    if roll < 0.12:
        return [fault for fault in FAULTS if rng.random() < 0.5]
    return rng.sample(FAULTS, rng.randint(1, 3))


def _instance(seed: int, rng: Random) -> Scenario:
    def on(chance: float = 0.5) -> bool:
        return rng.random() < chance

    slots = rng.choice((1, 2, 3, 4, 8, 8, 16, 32))
    return Scenario(
        seed=seed,
        blocks=0,
        block_size=rng.choice((1, 2, 3, 4, 4, 8, 16)),
        slots=slots,
        tokens_per_step=slots + rng.choice((0, 1, 5, 16, 64)),
        chunk_tokens_max=rng.choice((1, 2, 3, 7, 16)) if on() else None,
        clients=[],
        steps_in_flight=rng.choice((1, 2, 2, 3)),
        order="priority" if on(0.8) else "arrival",
        prefix_caching=on(0.8),
        eviction="lru" if on(0.7) else "lfu",
        reserve_start=rng.choice((0.0, 0.05, 0.4, 1.0)),
        reserve_learning=rng.choice((0.0, 0.0625, 0.25, 1.0)),
        queue_requests_max=rng.randint(4, 24) if on(0.3) else 10_000,
        queue_tokens_max=rng.randint(20, 800) if on(0.2) else 1_000_000,
        worker_restarts_max=rng.choice((1, 5, 5, 5)),
        pool_kept=on(0.3),
        noise=rng.choice((0.0, 0.5, 2.0)),
    )


def _clients(seed: int, scenario: Scenario, kind: Kind, swarm: Random) -> list[Client]:
    """Draw clients: prompts from a small tree, so that they share prefixes; arrivals from one burst to a slow trickle."""
    features = {name: swarm.random() < 0.5 for name in ("n", "priority", "stop", "min", "timeout", "salt", "burst", "logprobs")}
    if kind == "tight":
        features["timeout"] = False
    spread = 0.0 if features["burst"] else 10 ** swarm.uniform(-3, -0.5)
    long_output = swarm.choice((4, 12, 40))
    count = swarm.choice((3, 8, 15, 30, 60, 120))
    if kind == "long":
        count, long_output, spread = swarm.randint(500, 700), min(long_output, 12), min(spread, 0.03)
    tree = PromptTree(stream(seed, "prompts"), scenario.block_size)
    clients: list[Client] = []
    at = 0.0
    for number in range(count):
        rng = stream(seed, f"client {number}")
        at += rng.expovariate(1.0) * spread
        clients.append(
            Client(
                id=f"r{number}",
                at=at,
                prompt=tree.prompt(rng),
                max_tokens=rng.randint(1, long_output),
                seed=rng.choice((0, 0, rng.randrange(1000))),
                n=rng.choice((1, 1, 2, 4)) if features["n"] else 1,
                priority=rng.choice((-1, 0, 0, 5)) if features["priority"] else 0,
                min_tokens=rng.randint(0, 3) if features["min"] else 0,
                stop=[rng.randrange(VOCAB)] if features["stop"] else [],
                timeout=rng.uniform(0.01, 2.0) if features["timeout"] and rng.random() < 0.3 else None,
                salt=rng.choice(("", "a", "b")) if features["salt"] else "",
                logprobs=rng.choice((None, 0, 2)) if features["logprobs"] else None,
                prompt_logprobs=rng.choice((None, None, 0)) if features["logprobs"] else None,
            )
        )
    for client in clients:
        client.min_tokens = min(client.min_tokens, client.max_tokens)
    return clients


def _burst(seed: int) -> list[Client]:
    """Draw clients of a burst: all at once, small and alike."""
    rng = stream(seed, "burst")
    return [
        Client(f"r{number}", 0.0, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))], rng.randint(1, 2))
        for number in range(BURST)
    ]


def _size_pool(scenario: Scenario, kind: Kind, rng: Random) -> None:
    """Size the pool: from 'the largest request just fits, alone' to roomy; now and then some are too large for it."""
    worst = max(-(-(len(c.prompt) + c.max_tokens - 1) // scenario.block_size) for c in scenario.clients)
    factor = rng.choice((1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 40.0) if kind != "tight" else (1.0, 1.2, 1.5, 2.0))
    scenario.blocks = max(1, round(worst * factor))
    if rng.random() < 0.1 and kind != "tight":
        scenario.blocks = max(1, scenario.blocks // 2)


def _client_faults(scenario: Scenario, faults: list[str], rng: Random) -> None:
    for client in scenario.clients:
        if "abort" in faults and rng.random() < 0.4:
            if rng.random() < 0.5:
                client.abort_at = max(0.0, client.at + rng.uniform(-0.1, 0.5))
            else:
                client.abort_in = rng.choice(PHASES)
        if "again" in faults and rng.random() < 0.2:
            client.again_at = client.at + 10 ** rng.uniform(-2.0, 0.5)
        if "stop_string" in faults and rng.random() < 0.2:
            client.stop_string_at = rng.randint(1, 6)
        if "poison" in faults and rng.random() < 0.05:
            client.poison_at = rng.randint(0, 3)
        if "nan" in faults and rng.random() < 0.1:
            client.nan_at = rng.randint(0, 3)


def step_faults(faults: list[str], long: float, rng: Random) -> list[StepFault]:
    """Draw faults of the first 399 steps, with a rate per kind. `long`: `step_seconds_max`."""
    rates = {fault: 10 ** rng.uniform(-2.5, -0.7) for fault in FAULTS}
    steps: list[StepFault] = []
    for step in range(1, 400):
        for fault in faults:
            if rng.random() >= rates[fault]:
                continue
            match fault:
                case "slow":
                    steps.append(StepFault(step, "slow", rng.uniform(0.0, 0.3)))
                case "late" | "repeat":
                    steps.append(StepFault(step, fault, rng.uniform(0.0, 0.1)))
                case "ghost":
                    steps.append(StepFault(step, "ghost"))
                case "stall" if rng.random() < 0.2:
                    steps.append(StepFault(step, "slow", long * rng.uniform(1.01, 3.0)))
                case "garble" if rng.random() < 0.2:
                    steps.append(StepFault(step, "garble", rng.randrange(5)))
                case "hang" | "lose_result" | "lose_plan" if rng.random() < 0.05:
                    steps.append(StepFault(step, fault))
                case "oom" if rng.random() < 0.1:
                    steps.append(StepFault(step, "oom", rng.choice((0.0, 0.3, 1.5))))
                case "crash" if rng.random() < 0.4:
                    kinds: tuple[StepFaultKind, ...] = ("crash_before", "crash_amid", "crash_after")
                    steps.append(StepFault(step, rng.choice(kinds)))
    return steps


def _plods(scenario: Scenario, kind: Kind, rng: Random) -> None:
    """Draw steps that take longer than they may and show progress: most of them end in time, some never would."""
    if kind == "swarm" and rng.random() < 0.05:
        for step in rng.sample(range(1, 60), rng.randint(1, 4)):
            scenario.steps.append(StepFault(step, "plod", scenario.step_seconds_max * rng.choice((1.5, 3.0, 12.0, 19.0, 40.0))))


def _nudges(scenario: Scenario, faults: list[str], last: float, rng: Random) -> None:
    end = last + 2.0

    def some(kind: NudgeKind, most: int, low: float, high: float) -> None:
        for _ in range(rng.randint(1, most)):
            scenario.nudges.append(Nudge(rng.uniform(0.0, end), kind, rng.uniform(low, high)))

    if "preempt" in faults:
        some("preempt", 12, 1, 4)
    if "evict" in faults:
        some("evict", 12, 1, 8)
    if "crash" in faults and rng.random() < 0.3:
        some("crash", 2, 1, 1)
    if "restart_hangs" in faults:
        some("restart_hangs", 2, 1, 1)
    if "restart_fails" in faults:
        some("restart_fails", 2, 1, 2)
    if "crash_loop" in faults:
        some("crash_loop", 1, 1, 9)
    if "freeze" in faults:
        some("freeze", 3, 0.05, 3 * scenario.step_seconds_max)
    if "clock" in faults:
        some("clock", 3, -5.0, 5.0)
    if "pause" in faults:
        for _ in range(rng.randint(1, 2)):
            begin = rng.uniform(0.0, end)
            scenario.nudges.append(Nudge(begin, "pause", rng.choice((0.0, 0.05, 0.5, 100.0))))
            scenario.nudges.append(Nudge(begin + rng.uniform(0.0, 1.0), "resume"))
    scenario.nudges.sort(key=lambda nudge: nudge.at)


def _tiers(scenario: Scenario, last: float, rng: Random) -> None:
    """Draw lower tiers: a third of the seeds have a cache service; half of those have storage, and some of its faults."""
    if rng.random() >= 0.33 or not scenario.prefix_caching:
        return
    if rng.random() < 0.4:  # a pool so tight that blocks are reused at once
        worst = max(-(-(len(c.prompt) + c.max_tokens - 1) // scenario.block_size) for c in scenario.clients)
        scenario.blocks = max(1, round(worst * rng.choice((1.0, 1.2, 1.5, 2.0))))
    scenario.host_blocks = max(1, round(scenario.blocks * rng.choice((0.2, 0.5, 1.0, 2.0, 4.0))))
    scenario.storage = rng.random() < 0.5
    if scenario.storage and rng.random() < 0.7:  # hardly more blocks than are in transit
        scenario.host_blocks = rng.choice((2, 4, 8, 16))
    scenario.write = rng.choice(("through", "through", "selective", "back"))
    scenario.write_outputs = rng.random() < 0.7
    parked: list[Literal["storage", "host", "drop"]] = ["host", "drop", *(("storage",) if scenario.storage else ())]
    scenario.preempted = rng.choice(parked)
    for _ in range(rng.choice((0, 2, 6, 20))):  # the lower tiers hold what the device evicts
        scenario.nudges.append(Nudge(rng.uniform(0.0, last + 0.5), "evict", 10_000))
    for _ in range(rng.choice((0, 0, 2, 6))):
        scenario.nudges.append(Nudge(rng.uniform(0.0, last + 0.5), "preempt", rng.uniform(1, 4)))
    scenario.nudges.sort(key=lambda nudge: nudge.at)
    if scenario.storage and rng.random() < 0.5:
        scenario.storage_warm, scenario.storage_rot = True, rng.choice((0, 0, 2, 3, 7))
    if rng.random() < 0.3:
        return
    _tier_faults(scenario, last, rng)


def _tier_faults(scenario: Scenario, last: float, rng: Random) -> None:
    kinds: list[CacheFaultKind] = rng.sample(CACHE_FAULTS, rng.randint(1, 3))
    rate = 10 ** rng.uniform(-2.0, -0.3)
    for move in range(1, 300):
        if rng.random() < rate:
            scenario.cache_faults.append(CacheFault(move, rng.choice(kinds), rng.uniform(0.0, 0.4)))
    lives: tuple[NudgeKind, ...] = ("cache_crash", "cache_hang")
    for _ in range(rng.choice((0, 0, 1, 3, 6))):
        scenario.nudges.append(Nudge(rng.uniform(0.0, last + 1.0), rng.choice(lives), rng.random()))
    if rng.random() < 0.3:  # slow copies, into a pool that is gone when they end
        scenario.restart_seconds = 0.05
        for move in range(1, 40):
            if rng.random() < 0.5:
                scenario.cache_faults.append(CacheFault(move, "slow", rng.uniform(0.1, 0.4)))
        for _ in range(rng.randint(1, 6)):
            if rng.random() < 0.5:
                scenario.nudges.append(Nudge(rng.uniform(0.0, last + 0.5), "crash"))
            else:
                scenario.steps.append(StepFault(rng.randint(3, 60), "garble", rng.randrange(5)))
    if scenario.storage and rng.random() < 0.4:  # an outage of storage
        begin = rng.randint(1, 60)
        scenario.cache_faults += [CacheFault(move, "error") for move in range(begin, begin + rng.randint(10, 60))]
    for client in scenario.clients if rng.random() < 0.3 else ():
        if client.abort_at is None and client.abort_in is None and rng.random() < 0.3:
            client.abort_in = "loading"
    scenario.nudges.sort(key=lambda nudge: nudge.at)
