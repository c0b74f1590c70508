"""The state of an instance's sequences, and the moves that keep it consistent.

Each file beside this one decides one thing and acts through these moves: scheduler.py plans steps, admission.py says what is
short, preemption.py chooses victims, absorb.py takes results in, recovery.py handles a lost worker. They import this file;
it imports none of them.

A block may be handed on at once: plans are executed in order, so the plan that gives a block to its next owner is executed
after every plan in which the last owner still writes to it.
"""

from __future__ import annotations

from bisect import insort

from baton.config import InstanceConfig
from baton.core.engine.outbox import Outbox
from baton.core.engine.request import ON_WORKER, OPEN, Fact, Group, Phase, Sequence, by_urgency
from baton.core.engine.reserve import GrowthReserve
from baton.core.engine.slots import SlotTable
from baton.core.engine.stats import Stats
from baton.core.engine.waiting import WaitingLine
from baton.core.kv.block_hash import BlockHasher
from baton.core.kv.block_pool import BlockPool
from baton.core.kv.eviction import POLICIES
from baton.core.kv.prefix_cache import PrefixCache
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, Incarnation, RequestId, Slot
from baton.protocol.output import EndError
from baton.protocol.request import FinishReason


class Need:
    """The blocks that a sequence needs to be admitted, found without changing anything: one sent back holds nothing."""

    __slots__ = ("hit", "hit_idle", "new")

    def __init__(self, hit: int, hit_idle: int, new: int) -> None:
        self.hit = hit
        "Leading blocks that the cache has."
        self.hit_idle = hit_idle
        "How many of those are idle: taking them makes them unavailable to others."
        self.new = new


class Board:
    __slots__ = (
        "block_size",
        "cache",
        "decoding",
        "drops",
        "folds",
        "groups",
        "hasher",
        "out",
        "preempting",
        "queued",
        "queued_tokens",
        "reserve",
        "running",
        "slots",
        "stats",
        "waiting",
    )

    def __init__(self, config: InstanceConfig, stats: Stats) -> None:
        self.block_size = config.kv.block_size
        self.hasher = BlockHasher(b"", config.kv.block_size)
        self.cache = PrefixCache(BlockPool(config.kv.blocks), POLICIES[config.kv.eviction])
        self.groups: dict[RequestId, Group] = {}
        "Requests whose client is still owed an end."
        self.waiting = WaitingLine()
        self.slots = SlotTable(config.scheduler.slots)
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
        self.reserve = GrowthReserve(config.scheduler, config.kv.block_size)
        self.out = Outbox()
        self.stats = stats
        self.queued = self.queued_tokens = 0
        "Sequences that were never admitted, and their prompt tokens: what the queue bounds are about."

    def reroot(self, fingerprint: bytes) -> None:
        """Other weights, or computed in another way: every key begins anew. Nobody holds a block now: no worker had one."""
        self.cache.clear()
        self.hasher = BlockHasher(fingerprint, self.block_size)
        for group in self.groups.values():
            root = self.hasher.root(group.request.salt, group.private)
            for sequence in group.sequences:
                sequence.root = root
                sequence.keys.clear()

    # Joining and ending

    def join(self, group: Group) -> None:
        """A request enters. Its leader goes in line; the others follow when the leader's prompt is computed."""
        self.groups[group.request.id] = group
        for sequence in group.sequences:
            if sequence.queued:
                self.queued += 1
                self.queued_tokens += sequence.prompt_tokens
        self.waiting.join(group.sequences[0])

    def release_siblings(self, group: Group) -> None:
        """The leader's prompt is in the cache, or will never be."""
        for sequence in group.sequences[1:]:
            if sequence.phase is Phase.HELD and not sequence.suspect:
                self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """What it was held for is over: it goes in line."""
        sequence.advance(Fact.RELEASED)
        self.waiting.join(sequence)

    def hold(self, sequence: Sequence) -> None:
        """A suspect leaves the line until its turn comes (recovery.py)."""
        sequence.advance(Fact.SUSPECTED)
        self.waiting.leave(sequence)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: EndError | None = None,
        detail: str = "",
        *,
        silent: bool = False,
    ) -> None:
        """The client is done with it, now and once. Slot and blocks go back as the phase demands."""
        phase = sequence.phase
        sequence.advance(Fact.ENDED)
        if phase is Phase.WAITING:
            self.waiting.leave(sequence)
        elif phase in ON_WORKER:
            self.vacate_worker(sequence, was=phase)
        elif phase is Phase.PREEMPTING:
            self.preempting.remove(sequence)
        if sequence.queued:
            self._leave_queue(sequence)
        if sequence.admissions:
            self.reserve.sequence_ended(sequence)
        group = sequence.group
        if sequence is group.leader and len(group.sequences) > 1:
            self.release_siblings(group)
        group.open -= 1
        self.stats.ended[reason] += 1
        if not silent:
            self.out.end(sequence, reason, error, detail)

    def forget(self, request: RequestId) -> None:
        """All its sequences have ended. Cutting the group's list frees them without the cyclic collector."""
        group = self.groups[request]
        if not group.open:
            del self.groups[request]
            group.sequences.clear()

    def _leave_queue(self, sequence: Sequence) -> None:
        sequence.queued = False
        self.queued -= 1
        self.queued_tokens -= sequence.prompt_tokens

    # On and off the worker

    def need(self, sequence: Sequence) -> Need:
        known = len(sequence.tokens)
        # The last token is always computed: its logits are not stored anywhere. So a full hit ends one block early and the
        # block with the last token is computed into a private one; no shared block is ever written.
        full = (known - 1) // self.block_size
        self.hasher.extend(sequence.keys, sequence.root, sequence.tokens, full)
        hit = 0 if sequence.must_compute_prompt else self.cache.match(sequence.keys, full)
        return Need(hit, self.cache.idle_among(sequence.keys, hit), -(-known // self.block_size) - hit)

    def seat(self, sequence: Sequence) -> None:
        """The head of the line is admitted: it takes a slot and all blocks that it needs now."""
        self.waiting.pop()
        need = self.need(sequence)
        hit = need.hit
        sequence.advance(Fact.ADMITTED)
        sequence.blocks = self.cache.acquire(sequence.keys[:hit])  # held first, so that `take` cannot evict them
        sequence.blocks += self.cache.take(need.new)
        sequence.capacity = len(sequence.blocks) * self.block_size
        sequence.computed = sequence.scheduled = hit * self.block_size
        sequence.published = hit
        sequence.target = len(sequence.tokens)
        if not sequence.admissions:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens - 1)
            self.stats.prompt_tokens += sequence.prompt_tokens
            self.stats.cached_tokens += sequence.cached_tokens
        sequence.admissions += 1
        if sequence.queued:
            self._leave_queue(sequence)
        self.slots.seat(sequence)
        insort(self.running, sequence, key=by_urgency)

    def prompt_planned(self, sequence: Sequence) -> None:
        """Its last chunk is in a plan, which samples its next token."""
        sequence.advance(Fact.PROMPT_PLANNED)
        sequence.in_flight += 1
        self.decoding += 1

    def preempt(self, victim: Sequence) -> None:
        """Its blocks are available at once: the plan that hands them on also drops it, after every plan that writes to them."""
        was = victim.phase
        victim.advance(Fact.PREEMPTED)
        victim.preemptions += 1
        self.stats.preemptions += 1
        self.preempting.append(victim)
        self.vacate_worker(victim, was)

    def vacate_worker(self, sequence: Sequence, was: Phase) -> None:
        """Out of `running`, blocks back, drop to be told. The slot stays taken until the drop is acknowledged."""
        running = self.running
        if running[-1] is sequence:
            running.pop()
        else:
            running.remove(sequence)
        if was is Phase.DECODE:
            self.decoding -= 1
        self.cache.release(sequence.detach_blocks())
        self.drops.append((sequence.slot, sequence.incarnation))

    def acknowledge(self, sequence: Sequence) -> None:
        """The worker has executed the drop: nothing of this incarnation is in flight any more."""
        sequence.advance(Fact.ACKNOWLEDGED)
        self.slots.vacate(sequence)
        if sequence.phase is Phase.WAITING:
            if sequence.in_flight:
                raise InvariantBroken(f"{sequence!r}: dropped with {sequence.in_flight} tokens in flight", invariant=32)
            self.preempting.remove(sequence)
            self.waiting.join(sequence)

    def clear_worker(self) -> None:
        """The worker is dead. Every occupant leaves its slot without an acknowledgement: nobody is left to give one."""
        for sequence in self.slots.occupants:
            if sequence is None:
                continue
            sequence.advance(Fact.WORKER_LOST)
            self.cache.release(sequence.detach_blocks())
            sequence.in_flight = 0
            self.slots.vacate(sequence)
            if sequence.phase is Phase.WAITING:
                self.waiting.join(sequence)
        self.running.clear()
        self.preempting.clear()
        self.drops.clear()
        self.folds.clear()
        self.decoding = 0

    # Proof. Numbers are those of docs/reliability.md.

    def check(self) -> None:
        held: dict[BlockId, int] = {}
        for sequence in self.running:
            for block in sequence.blocks:
                held[block] = held.get(block, 0) + 1
        self.cache.pool.check(held)
        self.cache.check()
        self.slots.check()
        self._check_running()
        for sequence in self.running:
            self._check_table(sequence)
        self._check_queue()

    def _check_running(self) -> None:
        """25: `running` is who computes, in order. 30: the decoding ones are counted right."""
        working = [s for s in self.slots.occupants if s is not None and s.phase in ON_WORKER]
        if sorted(working, key=by_urgency) != self.running:
            raise InvariantBroken("running is not what has a slot and computes, most urgent first", invariant=25)
        if sum(s.phase is Phase.DECODE for s in working) != self.decoding:
            raise InvariantBroken(f"{self.decoding} sequences are counted as decoding", invariant=30)

    def _check_table(self, sequence: Sequence) -> None:
        """6: no hole, no duplicate, long enough. 30: computed <= planned <= known. 4: nothing shared is written."""
        pool, size = self.cache.pool, self.block_size
        known, blocks = len(sequence.tokens), sequence.blocks
        if len(dict.fromkeys(blocks)) != len(blocks) or sequence.capacity != len(blocks) * size:
            raise InvariantBroken(f"{sequence!r}: a block twice in its table, or a wrong capacity", invariant=6)
        if sequence.scheduled > sequence.capacity or sequence.capacity - size >= max(sequence.scheduled, sequence.target):
            raise InvariantBroken(f"{sequence!r}: {len(blocks)} blocks for {sequence.scheduled} tokens", invariant=6)
        if not sequence.computed <= sequence.scheduled <= known + sequence.in_flight:
            raise InvariantBroken(f"{sequence!r}: {sequence.scheduled} tokens planned", invariant=30)
        if sequence.phase is Phase.DECODE and sequence.scheduled != known + sequence.in_flight - 1:
            raise InvariantBroken(f"{sequence!r}: {sequence.in_flight} in flight", invariant=31)
        for block in blocks[sequence.computed // size :]:
            if pool.request_references(block) != 1 or pool.is_cached(block):
                raise InvariantBroken(f"{sequence!r}: block {block} is shared and will be written", invariant=4)

    def _check_queue(self) -> None:
        """25 for those that wait, and the counters of the queue (49)."""
        opened = [s for group in self.groups.values() for s in group.sequences if s.phase in OPEN]
        self.waiting.check([s for s in opened if s.phase is Phase.WAITING])
        queued = [s for s in opened if s.queued]
        if (len(queued), sum(s.prompt_tokens for s in queued)) != (self.queued, self.queued_tokens):
            raise InvariantBroken(f"{len(queued)} queued, {self.queued} counted", invariant=49)
