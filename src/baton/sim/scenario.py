"""A scenario: everything a run depends on, as plain data. A seed makes one (generate.py), a file keeps one (tests/seeds)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from baton.config import CircuitConfig, InstanceConfig, KVConfig, QueueConfig, SchedulerConfig, TierConfig
from baton.protocol.ids import RequestId
from baton.protocol.repetition import RepetitionStop
from baton.protocol.request import GenerateRequest, SamplingParams

VOCAB = 16
PULL_SHARE, RELEASE_SHARE = 0.4, 0.3
"Shares of the time that a router allows a hand-off. The rest is for the messages."

TIERS, SCHEDULER, KV = TierConfig(), SchedulerConfig(), KVConfig()
"The defaults of production."
TIER_BOUNDS = (
    "queries_max", "store_blocks_max", "put_blocks", "load_again_after",
    "reservations_max", "reservations_waiting_max", "kept_max", "attempts_max",
)  # fmt: skip
ORDER_BOUNDS = ("pauses_max", "sleep_orders_max")
DIGEST_BOUNDS = ("digest_changes_max",)
"""Bounds of an instance that `Scenario.bound` sets, by class of settings."""

Abortable = Literal["held", "waiting", "loading", "prefill", "decode", "preempting", "closing", "end"]


class Client(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A request, and its client's actions."""

    id: str
    at: float
    prompt: list[int]
    max_tokens: int
    seed: int = 0
    n: int = 1
    priority: int = 0
    min_tokens: int = 0
    stop: list[int] = []
    timeout: float | None = None
    salt: str = ""
    abort_at: float | None = None
    "Time at which the client leaves, whatever the request is doing; a time before it was submitted must have no effect."
    abort_in: Abortable | None = None
    "Phase of one of its sequences in which the client leaves ('end': in the tick of its first end)."
    again_at: float | None = None
    "Time at which the client uses its id once more: refused while the first is running, another request after that."
    stop_string_at: int | None = None
    "Number of tokens after which the front finds a stop string in the last of the n sequences, and ends that sequence alone."
    stop_last_at: float | None = None
    "Time at which the front ends the last of the n sequences alone, whatever the request is doing. In a cluster only."
    poison_at: int | None = None
    "Number of outputs at which the request kills the worker that computes it."
    nan_at: int | None = None
    "Number of outputs at which the worker cannot compute the request, which fails alone."
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition: RepetitionStop | None = None
    drafts_max: int | None = None
    "Maximum of drafts per step that the request allows."
    vocab: int = VOCAB
    "Size of the vocabulary that the answer is drawn from. Few tokens give repetitions."

    def request(self) -> GenerateRequest:
        return GenerateRequest(
            id=RequestId(self.id),
            prompt=tuple(self.prompt),
            sampling=SamplingParams(
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                stop_token_ids=tuple(self.stop),
                repetition_stop=self.repetition,
                seed=self.seed,
                logprobs=self.logprobs,
                prompt_logprobs=self.prompt_logprobs,
                drafts_max=self.drafts_max,
            ),
            n=self.n,
            priority=self.priority,
            timeout_seconds=self.timeout,
            salt=self.salt.encode(),
        )

    def next_user_of_id(self, at: float) -> Client:
        """The client that uses the id next, for another request. Data of the first must not be taken for its own."""
        return Client(self.id, at, self.prompt[::-1], self.max_tokens, self.seed + 1, self.n, self.priority, salt=self.salt)


StepFaultKind = Literal[
    "slow", "plod", "late", "repeat", "ghost", "garble", "crash_before", "crash_amid", "crash_after", "hang", "lose_result",
    "lose_plan", "oom", "rank_dies", "rank_hangs", "rank_late", "rank_differs",
]  # fmt: skip


class StepFault(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A fault of the k-th step that the worker begins. Addressed by occurrence, so it survives shrinking."""

    step: int
    kind: StepFaultKind
    seconds: float = 0.0
    """slow: added to the step; plod: likewise, with signs of progress all the while; late, repeat: added to the (second)
    delivery; garble: which of seven ways; oom: time in which every step of that size or larger fails; rank_late: until the
    digests of the other ranks come."""
    every: bool = False
    """Whether late, repeat, ghost and rank_late strike from that step on. Does not depend on how many steps come before it,
    which helps the shrinker. rank_late: then the digests of one rank never come."""


NudgeKind = Literal[
    "preempt", "evict", "crash", "clock", "pause", "resume", "restart_fails", "restart_hangs", "freeze", "crash_loop",
    "cache_crash", "cache_hang", "clear", "reload", "rank_hello", "sleep",
]  # fmt: skip


CacheFaultKind = Literal["slow", "error", "repeat", "flip", "torn", "misdirect", "foreign", "vanish", "full", "silent", "short"]


class CacheFault(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A fault of the k-th message that the cache service receives, if it can strike that kind of message."""

    move: int
    kind: CacheFaultKind
    seconds: float = 0.0
    """slow: added; repeat: until the second answer; damage, full: which block of the move. silent: storage never comes back
    from this call. short: one rank moves, or finds, fewer blocks than the others."""


class Nudge(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """An action on a plain instance at a time."""

    at: float
    kind: NudgeKind
    amount: float = 1.0
    """preempt, evict: how many; clock: seconds of the jump; pause: seconds to drain; restart_fails: how often; freeze: seconds
    in which the engine process does nothing; crash_loop: lives of the worker that end in their second step; reload: the model's
    files are these weights now, and the worker is killed; rank_hello: in which way a rank of the next worker contradicts the
    others in its hello; sleep: seconds until it is woken."""


def _nodes_are_instances(raw: dict[str, Any]) -> dict[str, Any]:
    cluster = raw.get("cluster")
    if cluster is None:
        return raw
    return raw | {"cluster": {("instances" if name == "nodes" else name): value for name, value in cluster.items()}}


def _without_two_policies(raw: dict[str, Any]) -> dict[str, Any]:
    cluster = raw.get("cluster")
    if cluster is None or cluster.get("policy") not in ("two_choices", "round_robin"):
        return raw
    return raw | {"cluster": cluster | {"policy": "load"}}


UPGRADES: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (_nodes_are_instances, _without_two_policies)
"""The n-th turns a file of version n into one of version n + 1: a change of
fields adds one, and no kept file changes."""
VERSION = 1 + len(UPGRADES)
"""Version of the files that are written now. A file without a version has version 1."""


InstanceRole = Literal["prefill", "decode", "mixed"]
Stage = Literal["H0", "H1", "H2", "H3", "H4", "H5", "H6", "H7", "H8", "H9"]
"""Stage of a hand-off: H0 arrived at the router, H1 sent to prefill, H2 a chunk is computed, H3 all is computed and the first
token sampled, H4 decode has reserved room, H5 it pulls, H6 it asks for the release, H7 that was granted, H8 decode continues
alone, H9 the end is sent."""

ClusterFaultKind = Literal[
    "kill", "freeze", "worker", "worker_hang", "worker_freeze", "cache", "cache_hang", "drain", "preempt", "evict",
    "cut", "stall_up", "stall_down", "stall", "leave", "reload", "reload_worker", "stray", "sleep",
]  # fmt: skip
"""kill, freeze: the whole process (engine or router). worker, cache: these processes die, or hang; a frozen worker continues
after a while. cut: a session ends. stall: nothing gets through for a while, towards the router (up), from it (down), or
both ways. leave: a client leaves. reload: the model's files are replaced, and the engine or the worker is killed and comes
back with them. stray: one more instance, with other weights, dials all routers for a while.
sleep: the instance drains, stops its worker, and wakes when the time has passed."""
WEIGHTS_FAULTS: tuple[ClusterFaultKind, ...] = ("reload", "reload_worker", "stray")


class ClusterFault(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A fault at a time, or the n-th time that a request reaches a stage: then at a process that works on the request."""

    kind: ClusterFaultKind
    at: float | None = None
    stage: Stage | None = None
    nth: int = 1
    party: Literal["prefill", "decode", "router"] = "decode"
    "Process that is struck, with a stage. Stalls and cuts strike its session with the request's router."
    target: int = 0
    "Number of the instance, with a time; numbers of routers come after them."
    router: int = 0
    "Other end of a stall or a cut, with a time."
    seconds: float = 0.5
    "Duration. A cut: messages due later than this are lost. preempt, evict: how many."
    unseen: bool = False
    "Whether neither side of a cut is notified; each notices the silence of the other."
    weights: int = 1
    "reload: the weights in its files from now on. stray: its weights."
    alias: bool = False
    "Whether a stray has the name of its target. It is of the target's kind in any case."


class InstanceSpec(Struct, omit_defaults=True, forbid_unknown_fields=True):
    role: InstanceRole
    blocks: int
    slots: int
    tokens_per_step: int
    chunk_tokens_max: int | None = None
    host_blocks: int = 0
    speed: float = 1.0
    steps: list[StepFault] = []
    cache_faults: list[CacheFault] = []


class Cluster(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """Routers, and instances that dial all of them. The other fields of a scenario hold for every instance."""

    instances: list[InstanceSpec]
    routers: int = 1
    delay: float = 0.0005
    "Least delay of a message in seconds; up to `jitter` times more is added."
    jitter: float = 1.0
    remote: bool = False
    "Whether the memory of a dead instance cannot be read."
    skew: bool = False
    "Whether clocks begin at other times, and run at other speeds (1 %)."
    measured: bool = False
    "Whether instances report the cost of a prompt token; short prompts are then not handed over."
    front: bool = False
    "Whether there is a front in place of routers: clients, the front of one engine, and the first instance (FrontWorld)."
    faults: list[ClusterFault] = []
    policy: Literal["prefix", "load"] = "prefix"
    handoff_tokens_min: int = 0
    waiting_prompts_max: int = 1
    migrations_max: int = 3
    router_queue_max: int = 1024
    lease_seconds: float = 10.0
    handing_seconds_max: float = 10.0
    "Instances give up copying in less: a router accepts no others (core/cluster/membership.py)."
    silence_seconds_max: float = 600.0
    prefill_seconds_max: float = 600.0
    queue_seconds_max: float = 300.0
    overdrawn_max: int = 8
    handoff_room_seconds: float = 5.0
    handoff_retry_interval: int = 32
    prefix_keys_max: int = 1_000_000


Digests = Literal["none", "true", "no removals", "made up"]
"""none: as builds before digests. no removals: evicted blocks stay published. made up: all prompts count as cached."""


class Scenario(Struct, omit_defaults=True, forbid_unknown_fields=True):
    seed: int
    blocks: int
    block_size: int
    slots: int
    tokens_per_step: int
    clients: list[Client]
    chunk_tokens_max: int | None = None
    prefill_tokens_beside_decodes: int | None = None
    prompts_at_once: int = 4
    decode_gap_seconds: float | None = None
    "Goal for the duration of steps with prompts beside decodes."
    new_bytes_max: int = SCHEDULER.new_bytes_max
    plan_bytes_max: int = SCHEDULER.plan_bytes_max
    handoff_chunk_tokens_min: int = SCHEDULER.handoff_chunk_tokens_min
    steps_in_flight: int = 2
    order: Literal["priority", "arrival"] = "priority"
    prefix_caching: bool = True
    eviction: Literal["lru", "lfu"] = "lru"
    reserve_start: float = 0.05
    reserve_learning: float = 0.0625
    queue_requests_max: int = 10_000
    queue_tokens_max: int = 1_000_000
    step_seconds_max: float = 5.0
    worker_restarts_max: int = 5
    worker_kills_max: int = 5
    poison_unseen: bool = False
    """Whether a worker that dies of a request looks as if it was killed from outside: the kernel does not report that memory
    was short."""
    pool_kept: bool = False
    "Whether a restarted worker finds the pool of its predecessor."
    step_seconds: float = 0.01
    token_seconds: float = 0.001
    noise: float = 0.5
    "Maximum share by which a step takes longer."
    restart_seconds: float = 0.5
    ranks: int = 1
    "Number of processes that compute together: the worker set."
    digests: Digests = "none"
    "Digests by which instances of a cluster publish their cached keys."
    drafts_max: int = 0
    "Maximum of draft tokens per sequence and step. 0: no speculation."
    draft_truth: float = 0.5
    "Probability that a draft token is the true one."
    steps: list[StepFault] = []
    nudges: list[Nudge] = []
    host_blocks: int = 0
    "Blocks of the host tier. 0: no tiers."
    storage: bool = False
    write: Literal["through", "selective", "back"] = "through"
    write_outputs: bool = True
    preempted: Literal["storage", "host", "drop"] = "drop"
    storage_warm: bool = False
    "Whether storage has the blocks of every prompt from the beginning."
    storage_rot: int = 0
    "Every n-th of those blocks is damaged. 0: none."
    storage_tokens: bool = False
    "Whether storage finds blocks by token ids, and must be sent them."
    bound: int = 0
    """Bound of everything that an instance holds beside blocks, slots and its queue: queries, blocks stored or put at once,
    permits, reservations, kept prompts, attempts, orders, changes of the digest. 0: as in production."""
    cache_faults: list[CacheFault] = []
    pull_seconds_max: float = 5.0
    "Less in a cluster whose router gives a hand-off less time."
    release_seconds_max: float = 2.0
    cluster: Cluster | None = None
    "Several instances behind routers, each with sizes of its own. Of the faults above only those of clients count."
    fails: int | None = None
    "Invariant that a kept scenario of a mutant breaks. None: the scenario must pass."
    note: str = ""

    def config(self) -> InstanceConfig:
        return InstanceConfig(
            kv=KVConfig(
                blocks=self.blocks,
                block_size=self.block_size,
                prefix_caching=self.prefix_caching,
                eviction=self.eviction,
                digest=self.digests != "none",
                **self._bounds(KV, DIGEST_BOUNDS),
            ),
            scheduler=SchedulerConfig(
                slots=self.slots,
                tokens_per_step=self.tokens_per_step,
                chunk_tokens_max=self.chunk_tokens_max,
                prefill_tokens_beside_decodes=self.prefill_tokens_beside_decodes,
                prompts_at_once=self.prompts_at_once,
                drafts_max=self.drafts_max,
                decode_gap_seconds=self.decode_gap_seconds,
                new_bytes_max=self.new_bytes_max,
                plan_bytes_max=self.plan_bytes_max,
                handoff_chunk_tokens_min=self.handoff_chunk_tokens_min,
                steps_in_flight=self.steps_in_flight,
                order=self.order,
                reserve_start=self.reserve_start,
                reserve_learning=self.reserve_learning,
                step_seconds_max=self.step_seconds_max,
                worker_start_seconds_max=4 * self.step_seconds_max,
                worker_restarts_max=self.worker_restarts_max,
                worker_kills_max=self.worker_kills_max,
                **self._bounds(SCHEDULER, ORDER_BOUNDS),
            ),
            queue=QueueConfig(requests_max=self.queue_requests_max, tokens_max=self.queue_tokens_max),
            tiers=TierConfig(
                host_blocks=self.host_blocks,
                storage=self.storage,
                write=self.write,
                write_outputs=self.write_outputs,
                preempted=self.preempted,
                write_back_blocks=8,
                storage_seconds_max=0.2,
                memory_seconds_max=1.0,
                pull_seconds_max=self.pull_seconds_max,
                release_seconds_max=self.release_seconds_max,
                circuit=CircuitConfig(permits_max=self.bound or TIERS.circuit.permits_max),
                **self._bounds(TIERS, TIER_BOUNDS),
            ),
        )

    def _bounds(self, default: object, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: self.bound or getattr(default, name) for name in names}

    @property
    def faults(self) -> int:
        """Number of disturbances, clients included: the shrinker counts them."""
        odd = sum(
            sum(fault is not None for fault in (c.abort_at, c.abort_in, c.again_at, c.stop_string_at, c.poison_at, c.nan_at))
            for c in self.clients
        )
        own = len(self.steps) + len(self.nudges) + len(self.cache_faults) + odd
        if self.cluster is None:
            return own
        return own + len(self.cluster.faults) + sum(len(each.steps) + len(each.cache_faults) for each in self.cluster.instances)

    @property
    def weights_known(self) -> tuple[int, ...]:
        """All weights that instances may load in this run. They start with 0."""
        faults = [] if self.cluster is None else self.cluster.faults
        known = {0, *(fault.weights for fault in faults if fault.kind in WEIGHTS_FAULTS)}
        return tuple(sorted(known | {int(nudge.amount) for nudge in self.nudges if nudge.kind == "reload"}))

    def of_instance(self, number: int) -> Scenario:
        """The scenario of one instance of the cluster."""
        assert self.cluster is not None
        spec = self.cluster.instances[number]
        return msgspec.structs.replace(
            self,
            cluster=None,
            seed=self.seed + 10 * number,
            blocks=spec.blocks,
            slots=spec.slots,
            tokens_per_step=spec.tokens_per_step,
            chunk_tokens_max=spec.chunk_tokens_max,
            host_blocks=spec.host_blocks,
            storage=self.storage and spec.host_blocks > 0,
            storage_tokens=self.storage_tokens and spec.host_blocks > 0,
            preempted=self.preempted if spec.host_blocks else "drop",
            step_seconds=self.step_seconds * spec.speed,
            token_seconds=self.token_seconds * spec.speed,
            pool_kept=spec.role != "mixed",
            pull_seconds_max=min(self.pull_seconds_max, PULL_SHARE * self.cluster.handing_seconds_max),
            release_seconds_max=min(self.release_seconds_max, RELEASE_SHARE * self.cluster.handing_seconds_max),
            steps=spec.steps,
            cache_faults=spec.cache_faults,
            nudges=[],
        )

    def save(self, path: Path) -> None:
        whole = {"version": VERSION, **msgspec.to_builtins(self)}
        path.write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")

    @staticmethod
    def load(path: Path) -> Scenario:
        return msgspec.convert(upgrade(msgspec.json.decode(path.read_bytes(), type=dict[str, Any])), Scenario)


def upgrade(raw: dict[str, Any]) -> dict[str, Any]:
    """Convert a scenario file of any version to the present one, without its version."""
    version = raw.get("version", 1)
    if version not in range(1, VERSION + 1):
        raise msgspec.ValidationError(f"it has version {version}, and this build reads versions 1 to {VERSION}")
    for change in UPGRADES[version - 1 :]:
        raw = change(raw)
    return {name: value for name, value in raw.items() if name != "version"}
