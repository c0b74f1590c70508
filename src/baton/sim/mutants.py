"""Does the rehearsal find bugs? One-line faults of the core, each of which it must find.

A mutant is a text replacement in one module of the core. It runs in a process of its own, in which the module is loaded with
that line changed; the seeds are the usual ones. `python -m baton.sim.mutants NAME SEEDS [FILE]` is such a process.

This module imports nothing of the core: the change must be in place before the core is loaded.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import msgspec
from msgspec import Struct

from baton.sim.cluster.mutants import CLUSTER_MUTANTS
from baton.sim.tier_mutants import TIER_MUTANTS

SEEDS = 2_000


class Mutant(Struct, frozen=True):
    name: str
    module: str
    "Below baton."
    old: str
    new: str
    fault: str
    "What a developer would have got wrong."
    tiers: bool = False
    "Only a scenario with a cache service can kill it: the others are not run."
    cluster: bool = False
    "The seeds are those of clusters."

    @property
    def file(self) -> str:
        return f"{self.module.replace('.', '/')}.py"

    @property
    def path(self) -> Path:
        return Path(__file__).parent.parent / self.file


class MutantResult(Struct):
    name: str
    file: str
    fault: str
    killed_by_seed: int | None
    seeds_run: int
    invariant: int | None
    message: str


MUTANTS: tuple[Mutant, ...] = (
    # Blocks
    Mutant("share-without-reference", "core.kv.block_pool", "            self._requests[block] += 1\n", "            pass\n",
           "a hit does not count as a reference"),
    Mutant("free-while-shared", "core.kv.block_pool", "if not references and not self._moves[block]:", "if references <= 1 and not self._moves[block]:",
           "the last but one holder frees the block"),
    Mutant("no-generation", "core.kv.block_pool", "            self._generation[block] += 1\n", "            pass\n",
           "the generation does not grow on reuse"),
    # Keys
    Mutant("key-without-salt", "core.kv.block_hash", "self.fingerprint, salt, private", 'self.fingerprint, b"", private',
           "the salt is not in the key: tenants share blocks"),
    Mutant("key-without-parent", "core.kv.block_hash", "sha256(parent + self._pack(*tokens) + extra)", "sha256(self._pack(*tokens) + extra)",
           "a key names a block's own tokens only"),
    # Prefix cache
    Mutant("parent-not-offered", "core.kv.prefix_cache", "            self._offer(parent)\n", "            pass\n",
           "an idle parent is never evicted after its last child"),
    Mutant("match-one-too-many", "core.kv.prefix_cache", "        return low\n\n    def idle_among", "        return min(low + 1, limit)\n\n    def idle_among",
           "the match is one block too long"),
    Mutant("insert-replaces", "core.kv.prefix_cache", "        if first is not None:\n", "        if first is not None and not block:\n",
           "a second block overwrites the first under its key"),
    Mutant("hits-count-as-free", "core.kv.prefix_cache", "        return hit - low\n", "        return 0\n",
           "idle blocks that are hit are promised to others too"),
    # Planning
    Mutant("full-hit-computes-nothing", "core.engine.board", "full = (known - 1) // self.block_size", "full = known // self.block_size",
           "a full hit leaves no token to compute"),
    Mutant("stale-computed", "core.engine.board", "sequence.computed = sequence.published * self.block_size",
           "sequence.computed = min(sequence.published + 1, (len(sequence.tokens) - 1) // self.block_size) * self.block_size",
           "a block counts as computed that is not"),
    Mutant("prefill-prompt-only", "core.engine.board", "sequence.target = len(sequence.tokens)", "sequence.target = sequence.prompt_tokens",
           "after preemption only the prompt is prefilled (FastDeploy 3071)"),
    Mutant("budget-not-spent", "core.engine.scheduler", "        draft.room.prefill_left -= count\n", "",
           "a chunk does not use up the step's budget"),
    Mutant("decodes-not-budgeted", "core.engine.scheduler", "left = self._tokens_per_step - decoding", "left = self._tokens_per_step",
           "decoding sequences are left out of the budget"),
    Mutant("prompts-crowd-decodes", "core.engine.scheduler", "self._pace.prompt_tokens()) if decoding else left", "self._pace.prompt_tokens()) if not decoding else left",
           "prompts are bounded where nothing decodes, and not where something does"),
    Mutant("victim-is-oldest", "core.engine.scheduler", "victim = board.running[-1]", "victim = board.running[0]",
           "the oldest is preempted for a newer one"),
    Mutant("admit-by-first-block", "core.engine.board", "-(-known // self.block_size) - hit)", "min(1, -(-known // self.block_size) - hit))",
           "admission does not ask for the whole need"),
    Mutant("fold-not-told", "core.engine.scheduler", "if sequence.incarnation == incarnation and sequence.blocks", "if sequence.incarnation < incarnation",
           "the worker keeps reading a folded block that was given back"),
    Mutant("overtake-preempted", "core.engine.admission", "sequence.order < head.order for", "sequence.order > head.order for",
           "a younger request overtakes one that is not back in line yet"),
    Mutant("equals-make-way", "core.engine.preemption", "victim.priority > head.priority", "victim.priority >= head.priority",
           "two of a class push each other out in turn"),
    Mutant("prompts-before-urgent-heads", "core.engine.scheduler", "            self._admit(draft, step, now, before=priority)\n", "",
           "an urgent request waits for the prompts of less urgent ones"),
    Mutant("gap-ignored", "core.engine.pace", "        return min(self._limit, max(least, int(room) // CHUNK_MIN * CHUNK_MIN))\n", "        return self._limit\n",
           "prompts beside decodes take as long as they take"),
    Mutant("plan-without-bound", "core.engine.admission", 'return Shortage("plan", over) if over > 0 and room.new_bytes else None', "return None",
           "a plan has as many new sequences as there are, however large"),
    Mutant("never-planned-accepted", "core.engine.intake", "if plan > self._config.scheduler.plan_bytes_max:", "if plan < 0:",
           "a request that no plan can carry is accepted"),
    Mutant("room-of-the-queue-lost", "core.engine.scheduler", "if draft.room.prefill_left > 0:  # what", "if draft.room.prefill_left < 0:  # what",
           "prompt tokens that were left to the queue are used by nobody"),
    # Preemption and ends
    Mutant("requeue-before-ack", "core.engine.phase", "(Phase.DECODE, Fact.PREEMPTED): Phase.PREEMPTING", "(Phase.DECODE, Fact.PREEMPTED): Phase.WAITING",
           "a victim is back in line before the acknowledgement (FastDeploy 3267)"),
    Mutant("drop-not-told", "core.engine.board", "        self.drops.append((sequence.slot, sequence.incarnation))\n", "",
           "the worker is not told of a preemption"),
    Mutant("abort-keeps-blocks", "core.engine.board", "elif phase in ON_WORKER:", "elif phase is Phase.DECODE:",
           "an abort in prefill frees nothing"),
    Mutant("abort-stays-queued", "core.engine.board", "        if sequence.queued:\n            self._leave_queue(sequence)\n        if sequence.admissions and", "        if sequence.admissions and",
           "an aborted request counts against the queue for ever"),
    Mutant("siblings-forgotten", "core.engine.board", "        if sequence is group.leader and len(group.sequences) > 1:\n            self.release_siblings(group)\n", "",
           "siblings wait for a leader that has failed"),
    Mutant("one-token-too-many", "core.engine.request", "self.prompt_tokens + sampling.max_tokens - 1", "self.prompt_tokens + sampling.max_tokens",
           "max_tokens is off by one"),
    Mutant("usage-counts-ahead", "core.engine.outbox", "output_tokens=sequence.outputs,", "output_tokens=sequence.outputs + sequence.in_flight,",
           "usage counts tokens that were never delivered"),
    # Results
    Mutant("token-after-end", "core.engine.absorb", "        if sequence.phase is closing:\n", "        if sequence.phase is None:\n",
           "a token in flight at the end is delivered after it"),
    Mutant("ghost-row", "protocol.step", "        return Rows(list(zip(plan.run.slots, values, strict=True)), [], acks)\n", "        return Rows([r for r in zip(result.slots, result.values, strict=True) if r[1] >= 0], [], acks)\n",
           "a late row of a former occupant is taken for a token"),
    Mutant("ghost-kills", "core.engine.slots", "        return not any(map(self.occupant_of, result.slots[count:], result.incarnations[count:]))\n", "        return len(result.slots) == count\n",
           "a late row of a former occupant costs the worker its life"),
    Mutant("cache-uncomputed", "core.engine.absorb", "full = sequence.computed // board.block_size", "full = len(sequence.tokens) // board.block_size",
           "blocks with uncomputed tokens are published"),
    Mutant("publish-after-preemption", "core.engine.absorb", "        sequence = board.slots.occupant(slot)\n        if sequence.blocks:\n", "        sequence = board.slots.occupant(slot)\n        if sequence:\n",
           "a chunk's result is counted for a sequence that lost its blocks (FastDeploy 5502)"),
    Mutant("min-tokens-off-by-one", "core.engine.absorb", "length >= sequence.min_length", "length > sequence.min_length",
           "a stop at exactly min_tokens is missed"),
    # Repetitions
    Mutant("repetition-looked-for-too-late", "core.engine.request", "self.check_length = min(self.stop_position + 1, length + missing)", "self.check_length = min(self.stop_position + 1, length + missing + 1)",
           "an answer that repeats itself gets one token too many"),
    Mutant("repetition-of-the-prompt", "core.engine.request", "tokens_until_repetition(self.tokens, self.prompt_tokens, rule)", "tokens_until_repetition(self.tokens, 0, rule)",
           "an answer ends because it repeats its prompt"),
    Mutant("repetition-before-min-tokens", "core.engine.request", "missing = early if early > 0 else tokens", "missing = tokens",
           "an answer that repeats itself ends before min_tokens"),
    Mutant("repetition-skips-a-pattern", "core.repetition", "        if missing < fewest:\n            fewest", "        if missing:\n            fewest",
           "the next look is when the longest pattern can be complete, whatever the others need"),
    # The worker's life, deadlines, pause
    Mutant("cache-survives-pool", "core.instance", "elif not pool.is_still(event.pool):", "elif pool.is_still(event.pool):",
           "the cache of a lost pool is believed"),
    Mutant("in-flight-survives-worker", "core.engine.board", "            sequence.in_flight = 0\n", "",
           "tokens of a dead worker are still expected"),
    Mutant("poison-forgiven", "core.engine.recovery", "sequence.suspect_losses += 1", "sequence.suspect_losses = 1",
           "a request that kills workers is never given up"),
    Mutant("suspect-cleared-early", "core.engine.recovery", "len(s.tokens) > s.suspect_length", "len(s.tokens) >= s.suspect_length",
           "a suspect is cleared before it is past the place"),
    Mutant("suspects-never-released", "core.engine.recovery", "        while self._held and not self._active:\n", "        while False:\n",
           "suspects that are held wait for ever"),
    Mutant("kill-is-evidence", "core.instance", 'evidence = cause != "killed" or self.worker.killed(self._now)', "evidence = True",
           "a kill from outside counts against what was being computed"),
    Mutant("kills-without-end", "core.engine.worker_watch", "return len(self._kills) > config.worker_kills_max", "return False",
           "a worker that is killed again and again is restarted for ever"),
    Mutant("suspects-not-split", "core.engine.recovery", "half = (len(first) + 1) // 2", "half = len(first)",
           "suspects run together: the culprit is never the only one"),
    Mutant("position-off", "core.engine.absorb", "length - sequence.prompt_tokens - 1\n", "length - sequence.prompt_tokens\n",
           "a token is told with the position of the next"),
    Mutant("cached-only-at-the-end", "core.engine.absorb", "        if not position:\n            board.out.begin(sequence, board.now)\n", "",
           "the first token comes without the number of cached prompt tokens"),
    Mutant("deadline-not-disarmed", "core.engine.worker_watch", "        if more_in_flight:\n", "        if True:\n",
           "the step deadline stays armed when nothing is in flight"),
    Mutant("never-fits-accepted", "core.engine.intake", "if worst > kv.blocks:", "if worst > kv.blocks + 1:",
           "a request that can never fit is accepted"),
    Mutant("paused-with-work", "core.instance", "return not self.board.groups and not self.in_flight", "return not self.in_flight",
           "paused while requests still wait"),
    Mutant("draining-accepts", "core.engine.intake", "if mode is not Mode.SERVING:\n            return Refused", "if mode is Mode.PAUSED:\n            return Refused",
           "a draining instance takes new requests"),
    # Who is let in, and with what answer
    Mutant("everything-refused", "core.engine.intake", "if self._worker.state is WorkerState.GONE:\n            return Refused", "if self._worker.state is WorkerState.READY:\n            return Refused",
           "a healthy instance refuses every request"),
    Mutant("queue-one-too-many", "core.engine.intake", "if board.queued + sequences > queue.requests_max:", "if board.queued + sequences > queue.requests_max + 1:",
           "the queue takes one sequence more than it may"),
    Mutant("queue-full-too-early", "core.engine.intake", "if board.queued + sequences > queue.requests_max:", "if board.queued + sequences >= queue.requests_max:",
           "the last place of the queue is never given"),
    Mutant("queue-tokens-uncounted", "core.engine.intake", "if board.queued_tokens + tokens > queue.tokens_max:", "if tokens > queue.tokens_max:",
           "the prompt tokens that wait are not counted"),
    Mutant("refusal-numbers-wrong", "core.engine.intake", 'Refused("queue_full", board.queued + sequences, queue', 'Refused("queue_full", board.queued, queue',
           "a refusal tells other numbers than those it was decided by"),
    Mutant("duplicate-taken", "core.engine.intake", "known.request.attempt >= request.attempt", "known.request.attempt > request.attempt",
           "a second request with an open id replaces the first"),
    # Order
    Mutant("priority-reversed", "core.engine.intake", "priority = request.priority if", "priority = -request.priority if",
           "the least urgent come first"),
    Mutant("priority-ignored", "core.engine.intake", 'request.priority if self._config.scheduler.order == "priority" else 0', "0",
           "all are equally urgent"),
    Mutant("last-come-first-served", "core.engine.intake", "(priority, now - request.age_seconds, next(self._order))", "(priority, 0.0, -next(self._order))",
           "the youngest of a class comes first"),
    # Aborts and time
    Mutant("aborts-ignored", "core.engine.intake", "                board.end(sequence, event.reason)\n", "                pass\n",
           "a client that left is still served"),
    Mutant("abort-of-one-ends-all", "core.engine.intake", "if sequence.phase in OPEN and event.index in (None, sequence.index):", "if sequence.phase in OPEN:",
           "a stop string in one sequence ends its siblings"),
    Mutant("deadlines-ignored", "core.engine.intake", "self._deadlines[0][0] <= now or", "False or",
           "a request's deadline passes and nothing happens"),
    Mutant("deadlines-early", "core.engine.intake", "Instant(now + request.timeout_seconds)", "Instant(now + request.timeout_seconds / 10)",
           "a request times out long before its deadline"),
    Mutant("drain-ends-at-once", "core.engine.service_mode", "Instant(now + event.drain_seconds_max)", "now",
           "draining ends requests that have time left"),
    Mutant("drain-never-ends", "core.instance", "if drain is not None and drain <= now:", "if drain is not None and now < 0:",
           "the drain deadline passes and nothing happens"),
    Mutant("resume-from-paused-only", "core.engine.service_mode", "        self.drain_deadline = None\n        if self.mode is not Mode.SERVING:", "        self.drain_deadline = None\n        if self.mode is Mode.PAUSED:",
           "a draining instance cannot be resumed"),
    # The worker's life
    Mutant("no-step-watchdog", "core.engine.worker_watch", "        if self.deadline is None:\n", "        if self.deadline is not None:\n",
           "a worker that hangs is waited for for ever"),
    Mutant("no-start-watchdog", "core.engine.worker_watch", "self.deadline = Instant(now + delay + self._config.worker_start_seconds_max)", "self.deadline = None",
           "a worker that never gets ready is waited for for ever"),
    Mutant("gone-at-first-loss", "core.engine.worker_watch", "if self.losses > self._config.worker_restarts_max:", "if self.losses > 0:",
           "the instance gives its worker up at the first loss"),
    Mutant("gone-without-a-word", "core.instance", '            self._intake.end_all(group, FinishReason.ERROR, "worker_gone", "the worker was lost too often in a row")\n', "            pass\n",
           "the worker is given up and nobody is told"),
    Mutant("narrowing-counts", "core.instance", "counts=evidence and not explained", "counts=True",
           "kills from outside and the search for a culprit count towards giving the worker up"),
    Mutant("healthy-at-once", "core.engine.worker_watch", "HEALTHY_STEPS: Final = 16", "HEALTHY_STEPS: Final = 1",
           "one step is enough for a healthy life: a worker that always dies in its second is restarted for ever"),
    Mutant("beside-suspects-not-held", "core.engine.recovery", "        self._hold(board, later, last=True)\n", "",
           "those that ran beside a known suspect are suspects that nobody looks at"),
    # Broken results
    Mutant("missing-ack-believed", "protocol.step", "if lengths[count : len(rows)] != (1,) * len(acks) or result.values[tokens : tokens + len(acks)] != _DROPPED * len(acks):", "if False:",
           "a drop that the worker did not execute counts as executed"),
    Mutant("wrong-incarnation-believed", "core.engine.slots", "            return False\n        return not any", "            pass\n        return not any",
           "a row of another occupant is taken for the present one's"),
    Mutant("caching-off-shares", "core.engine.intake", 'b"" if self._config.kv.prefix_caching else', 'b"" if self._config.kv.blocks else',
           "requests share blocks though caching is off"),
    # Eviction and the cache
    Mutant("evicts-newest", "core.kv.eviction", "    return (last_used,)\n", "    return (-last_used,)\n",
           "the block that was used last is evicted first"),
    Mutant("lfu-by-time", "core.kv.eviction", "return (hits, last_used)", "return (last_used, hits)",
           "lfu evicts by time, and by hits only among equals"),
    Mutant("lfu-counts-no-hits", "core.kv.prefix_cache", "            self._hits[block] += 1\n", "            pass\n",
           "hits are not counted"),
    Mutant("match-one-too-few", "core.kv.prefix_cache", "        return low\n\n    def idle_among", "        return max(0, low - 1)\n\n    def idle_among",
           "the match is one block too short"),
    Mutant("kept-cache-thrown-away", "core.instance", "elif not pool.is_still(event.pool):", "else:",
           "a pool that outlived its worker counts as empty"),
    # The growth reserve
    Mutant("reserve-ignored", "core.engine.admission", "need.hit_idle + room.reserve(board, head.priority) - room", "need.hit_idle - room",
           "admission leaves nothing for the growth of what runs"),
    Mutant("reserve-for-everybody", "core.engine.reserve", " for sequence in holders if sequence.priority <= priority)", " for sequence in holders)",
           "an urgent request is held back for the growth of those that would make way for it"),
    Mutant("reserve-learns-from-urgency", "core.engine.preemption", "        board.preempt(running[-1])\n", "        board.preempt(running[-1])\n        board.reserve.growth_preempted()\n",
           "a preemption for urgency counts as one for growth"),
    Mutant("reserve-by-declaration", "core.engine.reserve", "min(1.0, sequence.outputs / declared)", "1.0",
           "the reserve learns what was declared, not what was used"),
    # Urgency
    Mutant("urgency-takes-one-more", "core.engine.preemption", "    for _ in range(victims):\n", "    for _ in range(min(victims + (victims > 0), len(running))):\n",
           "one sequence more is preempted than the head of the line needs"),
    Mutant("urgency-in-vain", "core.engine.preemption", "room.available += not left and block not in self._hits and not pool.is_pinned(block)", "room.available += 1",
           "blocks that stay held count as freed: victims that do not help"),
    Mutant("urgency-ignored", "core.engine.preemption", "if head is None or not running or not gives_way(running[-1], head):", "if head is None or running:",
           "nobody makes way for a more urgent request"),
    # Log-probabilities
    Mutant("logprobs-of-strangers", "core.engine.absorb", "board.slots.occupant_of(logprobs.slot, logprobs.incarnation)", "board.slots.occupants[logprobs.slot]",
           "log-probabilities of a former occupant are told to the present one"),
    Mutant("prompt-logprobs-cut", "core.engine.request", "return asks and self.outputs == 0", "return False and self.outputs == 0",
           "a cached prompt has no log-probabilities, and is not computed again"),
    Mutant("logprobs-lost-at-preemption", "core.engine.absorb", "        if sequence is not None and sequence.phase is not Phase.CLOSING:\n            board.out.logprobs", "        if sequence is not None and sequence.phase is Phase.DECODE:\n            board.out.logprobs",
           "a token in flight at a preemption comes without its log-probability"),
    # Time
    Mutant("no-backoff", "core.engine.worker_watch", "delay = self._backoff()", "delay = 0.0",
           "a worker that dies again and again is restarted at once each time"),
    Mutant("progress-ignored", "core.engine.worker_watch", "if self.state is WorkerState.READY and self.deadline is not None:\n            seconds", "if self.state is WorkerState.GONE:\n            seconds",
           "a worker that computes a long step is given up, though it shows that it goes on"),
    Mutant("progress-for-ever", "core.engine.worker_watch", "self.deadline = Instant(min(now + seconds, self._begun + LONGEST_STEPS * seconds))", "self.deadline = Instant(now + seconds)",
           "a worker that shows progress and never ends is waited for without end"),
    Mutant("news-find-the-worker-overdue", "core.instance", "        now = self._now\n        self._intake.expire(now)\n", "        now = self._now\n        self._on_tick(Tick())\n        self._intake.expire(now)\n",
           "after a pause of the engine a worker is given up whose answer is here, unread"),
    Mutant("deadline-of-former-user", "core.engine.intake", "not group.open or group.deadline != entry[0]", "not group.open",
           "a request ends at the deadline of an earlier one with its id"),
    # Other weights
    Mutant("all-end-with-others", "core.instance", "if any(sequence.outputs or sequence.phase not in OPEN for sequence in group.sequences):", "if group.sequences:",
           "a worker comes back with other weights, and requests that have not begun end too"),
    *(Mutant(*row, tiers=True) for row in TIER_MUTANTS),
    *(Mutant(*row, cluster=True) for row in CLUSTER_MUTANTS),
)  # fmt: skip


class _MutatedLoader(SourceFileLoader):
    """Loads a module from its source with one text replaced; never from or to a byte-code cache."""

    mutant: Mutant

    def path_stats(self, path: str) -> dict[str, float]:
        raise OSError("not cached")

    def get_data(self, path: str) -> bytes:
        source = super().get_data(path).decode()
        if source.count(self.mutant.old) != 1:
            raise ValueError(f"mutant {self.mutant.name}: its text occurs {source.count(self.mutant.old)} times in {path}")
        return source.replace(self.mutant.old, self.mutant.new).encode()


class _Finder(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = f"baton.{mutant.module}"

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        loader = _MutatedLoader(name, str(self._mutant.path))
        loader.mutant = self._mutant
        return spec_from_file_location(name, self._mutant.path, loader=loader)


def find(name: str) -> Mutant:
    return next(mutant for mutant in MUTANTS if mutant.name == name)


def apply(mutant: Mutant) -> None:
    """From now on this process runs the mutant. The core must not have been loaded."""
    if any(name.startswith(("baton.core", "baton.protocol")) for name in sys.modules):
        raise RuntimeError("the core is loaded already")
    sys.meta_path.insert(0, _Finder(mutant))


def hunt(mutant: Mutant, seeds: int) -> MutantResult:
    """Run seeds until one fails. In a process that runs the mutant."""
    from baton.sim.run import make, run

    for seed in range(seeds):
        scenario = make(seed, cluster=mutant.cluster)
        if mutant.tiers and not scenario.host_blocks:
            continue
        outcome = run(scenario)
        if outcome.invariant is not None:
            return MutantResult(
                mutant.name, mutant.file, mutant.fault, seed, seed + 1, outcome.invariant, outcome.violation[:200]
            )
    return MutantResult(mutant.name, mutant.file, mutant.fault, None, seeds, None, "survived")


def run_mutants(
    names: Sequence[str] = (),
    seeds: int = SEEDS,
    jobs: int = 1,
    progress: Callable[[MutantResult], None] | None = None,
) -> list[MutantResult]:
    """Each mutant in a process of its own, `jobs` at a time."""

    def one(name: str) -> MutantResult:
        command = [sys.executable, "-m", "baton.sim.mutants", name, str(seeds)]
        ran = subprocess.run(command, capture_output=True, check=False, timeout=1800)
        if ran.returncode:
            raise RuntimeError(f"mutant {name}: {ran.stderr.decode()[-2000:]}")
        result = msgspec.json.decode(ran.stdout, type=MutantResult)
        if progress is not None:
            progress(result)
        return result

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, names or [mutant.name for mutant in MUTANTS]))


def keep(result: MutantResult, path: Path) -> None:
    """Shrink the scenario that killed the mutant and keep it. In a process that runs the mutant."""
    from baton.sim.run import make
    from baton.sim.shrink import shrink

    if result.killed_by_seed is not None and result.invariant is not None:
        scenario = shrink(make(result.killed_by_seed, cluster=find(result.name).cluster), result.invariant)
        scenario.note = f"kills the mutant {result.name}: {result.fault}"
        scenario.save(path)


def replay(mutant: Mutant, path: Path) -> MutantResult:
    """Does a kept scenario still kill it? In a process that runs the mutant."""
    from baton.sim.run import run
    from baton.sim.scenario import Scenario

    outcome = run(Scenario.load(path))
    killed = None if outcome.invariant is None else outcome.seed
    return MutantResult(mutant.name, mutant.file, mutant.fault, killed, 1, outcome.invariant, outcome.violation[:200])


def main(arguments: Sequence[str]) -> None:
    """NAME SEEDS [FILE]: hunt the mutant; with FILE, keep the shrunken scenario that kills it. NAME replay FILE: see if it does."""
    mutant = find(arguments[0])
    apply(mutant)
    if arguments[1] == "replay":
        sys.stdout.buffer.write(msgspec.json.encode(replay(mutant, Path(arguments[2]))))
        return
    result = hunt(mutant, int(arguments[1]))
    if len(arguments) > 2:
        keep(result, Path(arguments[2]))
    sys.stdout.buffer.write(msgspec.json.encode(result))


if __name__ == "__main__":
    main(sys.argv[1:])
