"""Plans one step: what runs goes on, then the line moves up, and drops are told.

The heart is `plan_step`; results come back through absorb.py. Both work on the state below, in one thread, with plans running
ahead of results: `scheduled` counts what was planned, `computed` what was confirmed.

Why blocks may be handed on at once: plans are executed in order, so the plan that gives a block to its next owner is executed
after every plan in which the last owner still writes to it.
"""

from __future__ import annotations

from bisect import insort

from msgspec import Struct
from msgspec.structs import replace

from baton.config import InstanceConfig
from baton.core.engine import preemption
from baton.core.engine.admission import GrowthReserve
from baton.core.engine.limits import Limit, Need, Shortage, default_limits, new_bytes
from baton.core.engine.outbox import Outbox
from baton.core.engine.request import Fact, Group, Phase, Sequence
from baton.core.engine.seats import Seats
from baton.core.engine.stats import Stats
from baton.core.engine.waiting import WaitingLine
from baton.core.kv.block_hash import BlockHasher
from baton.core.kv.block_pool import BlockPool
from baton.core.kv.eviction import POLICIES
from baton.core.kv.prefix_cache import PrefixCache
from baton.protocol.ids import BlockId, Incarnation, Slot, StepNo, WorkerEpoch
from baton.protocol.request import FinishReason, SamplingParams
from baton.protocol.step import NewSequence, Run, StepPlan


def by_urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Draft:
    """A step while it is being planned."""

    __slots__ = (
        "_reserves",
        "counts",
        "grown",
        "new",
        "new_bytes",
        "preempted",
        "prefill_left",
        "sampling",
        "slots",
        "unfinished",
    )

    def __init__(self, prefill_left: int) -> None:
        self.slots: list[Slot] = []
        self.counts: list[int] = []
        self.unfinished: list[Slot] = []
        "Those that run a chunk which is not their last."
        self.new: list[NewSequence] = []
        self.new_bytes = 0
        self.sampling: dict[SamplingParams, int] = {}
        "The distinct settings of `new`, each with its row."
        self.grown: list[tuple[Slot, BlockId]] = []
        self.prefill_left = prefill_left
        "Prompt tokens that this step has room for; every decoding sequence already has its one token."
        self.preempted = False
        self._reserves: dict[int, int] = {}

    def reserve(self, scheduler: Scheduler, priority: int) -> int:
        """Blocks to leave for growth, counted at most once a step and class; an admission forgets them."""
        if priority not in self._reserves:
            self._reserves[priority] = scheduler.reserve.blocks(scheduler.running, priority)
        return self._reserves[priority]

    def forget_reserves(self) -> None:
        self._reserves.clear()

    def new_settings(self, sequence: Sequence) -> SamplingParams | None:
        """What the plan does not have yet of the settings that the sequence needs."""
        settings = worker_settings(sequence)
        return settings if settings not in self.sampling else None

    def add_new(self, sequence: Sequence) -> None:
        self.new_bytes += new_bytes(len(sequence.tokens), self.new_settings(sequence))
        self.new.append(
            NewSequence(
                slot=sequence.slot,
                incarnation=sequence.incarnation,
                tokens=tuple(sequence.tokens),
                prompt_tokens=sequence.prompt_tokens,
                computed_tokens=sequence.computed,
                blocks=tuple(sequence.blocks),
                sampling=self.sampling.setdefault(worker_settings(sequence), len(self.sampling)),
                index=sequence.index,
            )
        )


def worker_settings(sequence: Sequence) -> SamplingParams:
    """The request's settings without max_tokens, which only the scheduler needs: so all prompts of a list share them."""
    return replace(sequence.request.sampling, max_tokens=SamplingParams().max_tokens)


class Issued(Struct, frozen=True):
    """A plan that is out, and what is remembered of it until its result is in."""

    plan: StepPlan
    unfinished: tuple[Slot, ...]
    "Slots whose row is a chunk that is not the last: no token is due."


class Scheduler:
    __slots__ = (
        "_beside_decodes",
        "_chunk_max",
        "_tokens_per_step",
        "block_size",
        "cache",
        "decoding",
        "drops",
        "folds",
        "hasher",
        "limits",
        "out",
        "preempting",
        "queued",
        "queued_tokens",
        "reserve",
        "running",
        "seats",
        "stats",
        "waiting",
    )

    def __init__(self, config: InstanceConfig, stats: Stats) -> None:
        kv, scheduler = config.kv, config.scheduler
        self.block_size = kv.block_size
        self.hasher = BlockHasher(config.fingerprint, kv.block_size)
        self.cache = PrefixCache(BlockPool(kv.blocks), POLICIES[kv.eviction])
        self.seats = Seats(scheduler.slots)
        self.waiting = WaitingLine()
        self.running: list[Sequence] = []
        "PREFILL and DECODE, most urgent first: the tail is the next victim."
        self.decoding = 0
        "How many of them decode."
        self.preempting: list[Sequence] = []
        "Given up their blocks, not acknowledged yet. Few."
        self.drops: list[tuple[Slot, Incarnation]] = []
        "To be told to the worker in the next plan."
        self.folds: list[tuple[Sequence, Incarnation, int, BlockId]] = []
        "Table entries replaced since the last plan."
        self.reserve = GrowthReserve(scheduler, kv.block_size)
        self.limits: list[Limit] = default_limits()
        self.out = Outbox()
        self.stats = stats
        self.queued = self.queued_tokens = 0
        "Sequences that were never admitted, and their prompt tokens: what the queue bounds are about."
        self._tokens_per_step = scheduler.tokens_per_step
        self._chunk_max = scheduler.chunk_tokens_max or scheduler.tokens_per_step
        self._beside_decodes = scheduler.prefill_tokens_beside_decodes or scheduler.tokens_per_step

    # The heart

    def plan_step(self, step: StepNo, epoch: WorkerEpoch) -> Issued | None:
        """The next step, or None if there is nothing to do and nothing to tell."""
        draft = Draft(self._tokens_per_step - self.decoding)
        if self.decoding:  # a long prompt in their step is what their next token would wait for
            draft.prefill_left = min(draft.prefill_left, self._beside_decodes)
        preemption.make_way(self, draft)  # first: what has its place in the draft is not preempted any more
        self._go_on(draft)
        if not draft.preempted:
            self._admit(draft)
        if not draft.slots and not self.drops:
            return None
        self.reserve.decay()
        return self._seal(draft, step, epoch)

    def _go_on(self, draft: Draft) -> None:
        """One token for each that decodes, a chunk for each that prefills, most urgent first. Hot: kept flat."""
        running, decode = self.running, Phase.DECODE
        add_slot, add_count = draft.slots.append, draft.counts.append
        place = 0
        while place < len(running):  # the tail may be preempted on the way
            sequence = running[place]
            place += 1
            if sequence.phase is decode:
                position = sequence.scheduled
                if position >= sequence.stop_position:
                    continue  # all it may compute is planned; the last tokens are in flight
                if position == sequence.capacity and not self._grow(sequence, draft):
                    return
                sequence.scheduled = position + 1
                sequence.in_flight += 1
                add_slot(sequence.slot)
                add_count(1)
            else:
                self._run_chunk(sequence, draft)

    def _grow(self, sequence: Sequence, draft: Draft) -> bool:
        """One more block, from less urgent sequences if need be. False: it was itself the least urgent and is out."""
        while not self.cache.available:
            victim = self.running[-1]
            preemption.preempt(self, victim)
            draft.preempted = True
            if victim is sequence:
                return False
        (block,) = self.cache.take(1)
        sequence.blocks.append(block)
        sequence.capacity += self.block_size
        draft.grown.append((sequence.slot, block))
        return True

    def _run_chunk(self, sequence: Sequence, draft: Draft) -> None:
        """As much of its prompt as fits into this step."""
        count = min(sequence.target - sequence.scheduled, draft.prefill_left, self._chunk_max)
        if count <= 0:
            return
        draft.prefill_left -= count
        draft.slots.append(sequence.slot)
        draft.counts.append(count)
        sequence.scheduled += count
        if sequence.scheduled == sequence.target:  # the last chunk samples
            sequence.advance(Fact.PROMPT_PLANNED)
            sequence.in_flight += 1
            self.decoding += 1
        else:
            draft.unfinished.append(sequence.slot)

    # The line moves up

    def _admit(self, draft: Draft) -> None:
        """Strictly in order: nobody overtakes a head that does not fit, so it cannot starve."""
        while (head := self.waiting.head()) is not None:
            shortage = self.shortage(head, draft)
            if shortage is not None:
                self.stats.held_back[shortage.reason] += 1
                return
            self.waiting.pop()
            self._seat(head, draft)

    def shortage(self, head: Sequence, draft: Draft) -> Shortage | None:
        """The first limit that says no."""
        for limit in self.limits:
            short = limit.short(head, draft, self)
            if short is not None:
                return short
        return None

    def need(self, sequence: Sequence) -> Need:
        known = len(sequence.tokens)
        # The last token is always computed: its logits are not stored anywhere. So a full hit ends one block early and the
        # block with the last token is computed into a private one; no shared block is ever written.
        full = (known - 1) // self.block_size
        self.hasher.extend(sequence.keys, sequence.root, sequence.tokens, full)
        whole = sequence.request.sampling.prompt_logprobs is not None and sequence.outputs == 0
        hit = 0 if whole else self.cache.match(sequence.keys, full)
        return Need(hit, self.cache.idle_among(sequence.keys, hit), -(-known // self.block_size) - hit)

    def _seat(self, sequence: Sequence, draft: Draft) -> None:
        need = self.need(sequence)
        hit = need.hit
        sequence.advance(Fact.ADMITTED)
        sequence.blocks = self.cache.acquire(sequence.keys[:hit])  # held first, so that `take` cannot evict them
        sequence.blocks += self.cache.take(need.new)
        sequence.capacity = len(sequence.blocks) * self.block_size
        sequence.computed = sequence.scheduled = hit * self.block_size
        sequence.published = hit
        sequence.target = len(sequence.tokens)
        if sequence.queued:
            sequence.cached_tokens = sequence.computed
            self.stats.prompt_tokens += sequence.prompt_tokens
            self.stats.cached_tokens += sequence.cached_tokens
            self._leave_queue(sequence)
        self.seats.seat(sequence)
        insort(self.running, sequence, key=by_urgency)
        draft.forget_reserves()
        draft.add_new(sequence)
        self._run_chunk(sequence, draft)

    # Joining and ending

    def join(self, group: Group) -> None:
        """A request enters. Its leader goes in line; the others follow when the leader's prompt is computed."""
        self.queued += len(group.sequences)
        self.queued_tokens += len(group.sequences) * len(group.request.prompt)
        self.waiting.join(group.sequences[0])

    def release_siblings(self, group: Group) -> None:
        """The leader's prompt is in the cache, or will never be."""
        for sequence in group.sequences:
            if sequence.phase is Phase.HELD:
                sequence.advance(Fact.LEADER_READY)
                self.waiting.join(sequence)

    def end(self, sequence: Sequence, reason: FinishReason, detail: str = "") -> None:
        """The client is done with it, now and once. Slot and blocks go back as the phase demands."""
        phase = sequence.phase
        sequence.advance(Fact.ENDED)
        if phase is Phase.WAITING:
            self.waiting.leave(sequence)
        elif phase in (Phase.PREFILL, Phase.DECODE):
            preemption.leave_worker(self, sequence, was=phase)
        elif phase is Phase.PREEMPTING:
            self.preempting.remove(sequence)
        if sequence.queued:
            self._leave_queue(sequence)
        if sequence.index == 0 and len(sequence.group.sequences) > 1:
            self.release_siblings(sequence.group)
        sequence.group.open -= 1
        self.stats.ended[reason] += 1
        self.out.end(sequence, reason, detail)

    def _leave_queue(self, sequence: Sequence) -> None:
        sequence.queued = False
        self.queued -= 1
        self.queued_tokens -= sequence.prompt_tokens

    def _seal(self, draft: Draft, step: StepNo, epoch: WorkerEpoch) -> Issued:
        folded = tuple(
            (sequence.slot, place, block)
            for sequence, incarnation, place, block in self.folds
            if sequence.incarnation == incarnation and sequence.blocks
        )
        drops = tuple(self.drops)
        self.folds.clear()
        self.drops.clear()
        run = Run(tuple(draft.slots), tuple(draft.counts))
        plan = StepPlan(step, epoch, drops, tuple(draft.new), tuple(draft.grown), folded, run, tuple(draft.sampling))
        return Issued(plan, tuple(draft.unfinished))
