"""The state of an instance's sequences, and the operations that keep it consistent.

Each file beside this one decides one thing and acts through these operations: scheduler.py plans steps, admission.py finds
shortages, preemption.py chooses victims, absorb.py absorbs results, recovery.py handles a lost worker. They import this file;
it imports none of them. proof.py verifies the state from scratch.

A block may be reassigned at once: plans are executed in order, so the plan that gives a block to its next owner is executed
after every plan in which the last owner still writes to it.
"""

from __future__ import annotations

from bisect import insort
from typing import Final

from baton.config import InstanceConfig
from baton.core.deadlines import Deadlines
from baton.core.engine.outbox import Outbox
from baton.core.engine.phase import ON_WORKER, Fact, Phase
from baton.core.engine.request import Group, LoadingReason, PinnedBlocks, QueueKey, Sequence, by_urgency
from baton.core.engine.reserve import GrowthReserve
from baton.core.engine.slots import SlotTable
from baton.core.engine.stats import Stats
from baton.core.engine.waiting import WaitingQueue
from baton.core.kv.block_hash import BlockHasher
from baton.core.kv.block_pool import BlockPool
from baton.core.kv.digest import CacheDigest
from baton.core.kv.eviction import POLICIES
from baton.core.kv.pool_trust import PoolTrust
from baton.core.kv.prefix_cache import PrefixCache
from baton.core.kv.tiers import Tiers
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId, Incarnation, Instant, RequestId, Slot
from baton.protocol.output import EndError
from baton.protocol.request import FinishReason

USED_ALL: Final = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
"""Ends that show how long an answer is. An abort, a timeout or an error ends an answer early, so the reserve learns nothing
from it."""


class Need:
    """The blocks that a sequence needs to be admitted. Computing a Need changes nothing: a refused sequence holds nothing."""

    __slots__ = ("hit", "hit_idle", "new")

    def __init__(self, hit: int, hit_idle: int, new: int) -> None:
        self.hit = hit
        "Leading blocks found in the cache."
        self.hit_idle = hit_idle
        "Number of idle hits: taking them makes them unavailable to others."
        self.new = new


class Board:
    __slots__ = (
        "awaiting",
        "away",
        "block_size",
        "cache",
        "decoding",
        "digest",
        "drafts_ahead",
        "drops",
        "folds",
        "groups",
        "handed_over",
        "hasher",
        "kept",
        "kept_until",
        "leased",
        "loading",
        "new_bytes_max",
        "newly_queued",
        "now",
        "out",
        "pool",
        "preempting",
        "queued",
        "queued_tokens",
        "reserve",
        "running",
        "slots",
        "stats",
        "tiers",
        "to_offer",
        "waiting",
    )

    def __init__(self, config: InstanceConfig, stats: Stats) -> None:
        self.block_size = config.kv.block_size
        self.hasher = BlockHasher(b"", config.kv.block_size)
        self.cache = PrefixCache(BlockPool(config.kv.blocks), POLICIES[config.kv.eviction])
        self.pool = PoolTrust()
        self.tiers = Tiers(config.tiers, self.cache, self.pool, config.kv.block_size)
        self.digest: CacheDigest | None = None
        "Digest of the cache for routers. None: no router asks for it."
        if config.kv.digest and config.kv.prefix_caching:
            self.digest = CacheDigest(config.kv.digest_changes_max, self.tiers.host.__contains__)
        self.cache.digest = self.tiers.host.digest = self.digest
        self.groups: dict[RequestId, Group] = {}
        "Number of requests whose client still waits for an end."
        self.waiting = WaitingQueue()
        self.slots = SlotTable(config.scheduler.slots)
        self.running: list[Sequence] = []
        "PREFILL and DECODE, most urgent first: the tail is the next victim."
        self.decoding = 0
        "Number of running sequences that decode."
        self.leased: list[Sequence] = []
        "LOADING or WAITING sequences that hold blocks: a lower tier fills or has filled them. Few."
        self.awaiting: list[Sequence] = []
        "LOADING sequences whose reservation waits for blocks, the most urgent first (handoff/reservation_queue.py). Few."
        self.loading = 0
        "Number of LOADING sequences."
        self.newly_queued: list[Sequence] = []
        "Sequences that joined the queue in this event; lower tiers are searched for them (loading.py)."
        self.kept: dict[RequestId, PinnedBlocks] = {}
        "Prompts computed for another instance. Their blocks are held beyond the life of their sequence. Few."
        self.kept_until: Deadlines[PinnedBlocks] = Deadlines()
        "Deadlines of kept prompts whose sequence has ended."
        self.to_offer: dict[RequestId, PinnedBlocks] = {}
        "Kept prompts whose sequence may have more whole blocks since the end of the last event."
        self.handed_over: list[PinnedBlocks] = []
        "Kept prompts whose sequence has ended in this event and continues elsewhere (handoff/source.py)."
        self.preempting: list[Sequence] = []
        "Sequences without blocks whose drop is not acknowledged yet. Few."
        self.away: dict[Sequence, None] = {}
        "Sequences that were preempted and have not run since. A held suspect is among them."
        self.drops: list[tuple[Slot, Incarnation]] = []
        "Drops for the next plan."
        self.folds: list[tuple[Sequence, Incarnation, int, BlockId]] = []
        "Table entries replaced since the last plan."
        self.new_bytes_max = config.scheduler.new_bytes_max
        drafts, steps = config.scheduler.drafts_max, config.scheduler.steps_in_flight
        self.drafts_ahead = drafts * steps + steps - 1 if drafts else 0
        "Tokens that the blocks may hold beyond those of a sequence: drafts in flight, and a token per plan ahead of them."
        self.reserve = GrowthReserve(config.scheduler, config.kv.block_size)
        self.out = Outbox()
        self.now = Instant(0.0)
        "Time of the current event."
        self.stats = stats
        self.queued = self.queued_tokens = 0
        "Sequences that were never admitted, and their prompt tokens: the queue bounds limit these."

    def reroot(self, fingerprint: bytes) -> None:
        """Give all keys a new root: the weights or the way of computing changed. No sequence holds blocks, because there was no
        worker."""
        self.cache.clear()
        self.hasher = BlockHasher(fingerprint, self.block_size)
        for group in self.groups.values():
            root = self.hasher.root(group.request.salt, group.private)
            for sequence in group.sequences:
                sequence.root = root
                sequence.keys.clear()

    # Joining and ending

    def join(self, group: Group) -> None:
        """Put the request's leader in the queue; its siblings follow when the leader's prompt is computed."""
        self.groups[group.request.id] = group
        for sequence in group.sequences:
            if sequence.queued:
                self.queued += 1
                self.queued_tokens += sequence.prompt_tokens
        self._enqueue(group.sequences[0])

    def _enqueue(self, sequence: Sequence) -> None:
        """Put the sequence in the queue; lower tiers are searched for it at the end of the event."""
        self.waiting.join(sequence)
        sequence.tiers_asked = False
        sequence.load_anyway = None
        if self.tiers.enabled:
            self.newly_queued.append(sequence)

    def release_siblings(self, group: Group) -> None:
        """Let the siblings join: the leader's prompt is in the cache, or will never be."""
        for sequence in group.sequences[1:]:
            if sequence.phase is Phase.HELD and not sequence.suspect:
                self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Move a held sequence to the queue."""
        sequence.advance(Fact.RELEASED)
        self._enqueue(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Take a suspect out of the queue until its turn comes (recovery.py)."""
        sequence.advance(Fact.SUSPECTED)
        self.waiting.leave(sequence)
        self.drop_lease(sequence)
        if sequence.kept is not None:
            self.drop_kept(sequence.kept)  # the suspects that run first may need its blocks

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: EndError | None = None,
        detail: str = "",
        *,
        silent: bool = False,
    ) -> None:
        """End the sequence for its client, once. Slot and blocks are released as the phase demands."""
        phase = sequence.phase
        handed_over = sequence.kept is not None and self._end_kept(sequence.kept, reason)
        sequence.advance(Fact.ENDED)
        if phase is Phase.WAITING:
            self.waiting.leave(sequence)
        elif phase in ON_WORKER:
            self.vacate_worker(sequence, was=phase)
        elif phase is Phase.PREEMPTING:
            self.preempting.remove(sequence)
        elif phase is Phase.LOADING and sequence.load is not None:
            self.loading -= 1
            sequence.load.ended()
        sequence.load = None
        self.away.pop(sequence, None)
        self.drop_lease(sequence)
        if self.tiers.up:
            self.tiers.host.touch(sequence.keys)
        if sequence.queued:
            self._leave_queue(sequence)
        if sequence.admissions and not handed_over and reason in USED_ALL:
            self.reserve.sequence_ended(sequence)
        group = sequence.group
        if sequence is group.leader and len(group.sequences) > 1:
            self.release_siblings(group)
        group.open -= 1
        self.stats.ended[reason] += 1
        if not silent and not handed_over:
            self.out.end(sequence, reason, error, detail)

    def forget(self, request: RequestId) -> None:
        """Delete a request whose sequences have all ended. Clearing the list frees them without the cyclic collector."""
        group = self.groups[request]
        if not group.open:
            del self.groups[request]
            group.sequences.clear()

    def _leave_queue(self, sequence: Sequence) -> None:
        sequence.queued = False
        self.queued -= 1
        self.queued_tokens -= sequence.prompt_tokens

    # Loading

    def begin_loading(self, sequence: Sequence, load: LoadingReason) -> None:
        """Take the sequence out of the queue until `load` ends."""
        sequence.advance(Fact.LOAD_BEGUN)
        self.loading += 1
        sequence.load = load
        self.waiting.leave(sequence)

    def end_loading(self, sequence: Sequence) -> None:
        """Return the sequence to its old place in the queue, whatever the load's result."""
        sequence.advance(Fact.LOAD_OVER)
        self.loading -= 1
        sequence.load = None
        self.waiting.join(sequence)

    def lease(self, sequence: Sequence, room: int = 0) -> None:
        """Take all blocks that the sequence needs to be admitted, before it has a slot, to bring missing content into them.
        `room`: tokens to have room for besides its own."""
        hit = self._take_blocks(sequence, room)
        sequence.computed = hit * self.block_size
        sequence.published = hit
        self.leased.append(sequence)

    def drop_lease(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence without a slot. Content that has arrived is in the cache; blocks being filled stay
        pinned."""
        if sequence in self.leased:
            self.leased.remove(sequence)
            self.cache.release(sequence.detach_blocks())

    def idle_leases(self, behind: QueueKey) -> list[Sequence]:
        """Sequences behind this place in the queue that hold blocks without running and can give them up."""
        return [s for s in self.leased if s.gives_way and s.order > behind]

    def revoke_lease(self, behind: QueueKey) -> bool:
        """Revoke the lease of the last sequence behind this place, because blocks are short. False: there is none."""
        idle = self.idle_leases(behind)
        if idle:
            self.drop_lease(max(idle, key=by_urgency))
        return bool(idle) or (bool(self.kept) and self._revoke_kept(behind))

    def reserved(self, priority: int) -> int:
        """Blocks for the growth of holders at least as urgent: on the worker, or leased and soon there."""
        return self.reserve.blocks_of(self.running, priority) + self.reserve.blocks_of(self.leased, priority)

    def claimed(self, behind: Sequence) -> int:
        """Blocks that an earlier reservation waits for. None if nothing runs: no block would become free meanwhile."""
        if not self.awaiting or not self.running or self.awaiting[0].order > behind.order:
            return 0
        need = self.need(self.awaiting[0])
        return need.new + need.hit_idle

    # Blocks that are kept for another instance

    def keep_blocks(self, kept: PinnedBlocks, count: int) -> None:
        """Hold the first `count` blocks of the sequence from now on, whatever becomes of the sequence."""
        more = kept.sequence.blocks[len(kept.blocks) : count]
        self.cache.pool.share(more)
        kept.blocks += more

    def drop_kept(self, kept: PinnedBlocks) -> None:
        """Release the kept blocks. The instance that copies them learns this when it asks for their release."""
        self.cache.release(kept.blocks)
        kept.blocks = []
        kept.void = True
        self.kept_until.discard(kept)
        if kept.finished and self.kept.get(kept.sequence.request.id) is kept:
            del self.kept[kept.sequence.request.id]

    def idle_kept(self, behind: QueueKey) -> list[Sequence]:
        """Sequences behind this place whose kept blocks they do not hold themselves. If nothing runs, also the head's own: a
        head that must compute its prompt anew does not find them, and would wait for itself."""
        held = [kept.sequence for kept in self.kept.values() if kept.blocks and not kept.sequence.blocks]
        return [s for s in held if s.order > behind or (s.order == behind and not self.running)]

    def _revoke_kept(self, behind: QueueKey) -> bool:
        idle = self.idle_kept(behind)
        if idle:
            self.drop_kept(self.kept[max(idle, key=by_urgency).request.id])
        return bool(idle)

    def _end_kept(self, kept: PinnedBlocks, reason: FinishReason) -> bool:
        """End the keeping. True: the sequence has its one token and continues elsewhere, so the client's request does not end
        here."""
        sequence = kept.sequence
        sequence.kept = None
        kept.finished = True
        handed_over = reason is FinishReason.LENGTH and sequence.admissions > 0
        if handed_over:
            self.stats.handed_over += 1
            self.handed_over.append(kept)
            if not kept.void and sequence.blocks:  # otherwise it was preempted with that token in flight
                self.keep_blocks(kept, -(-sequence.computed // self.block_size))
            whole = len(kept.blocks) * self.block_size
            kept.tokens = min(sequence.computed, whole) if sequence.blocks else whole
        if not handed_over or not kept.blocks:
            self.drop_kept(kept)
        return handed_over

    # On and off the worker

    def need(self, sequence: Sequence, room: int = 0) -> Need:
        if sequence.blocks:
            return Need(0, 0, 0)  # leased
        known = len(sequence.tokens) + room
        # The last token is always computed: its logits are not stored anywhere. So a full hit ends one block early and the
        # block with the last token is computed into a private one; no shared block is ever written.
        full = (known - 1) // self.block_size
        self.hasher.extend(sequence.keys, sequence.root, sequence.tokens, full, sequence.request.extras)
        readable = self.pool.trusted and not sequence.must_compute_prompt
        hit = self.cache.match(sequence.keys, full) if readable else 0
        return Need(hit, self.cache.idle_among(sequence.keys, hit), -(-known // self.block_size) - hit)

    def assign_slot(self, sequence: Sequence) -> None:
        """Admit the head of the queue: it takes a slot and all blocks that it needs now."""
        self.waiting.pop()
        sequence.advance(Fact.ADMITTED)
        self.away.pop(sequence, None)
        if sequence.blocks:
            self.leased.remove(sequence)
        else:
            sequence.published = self._take_blocks(sequence)
            sequence.computed = sequence.published * self.block_size
        sequence.scheduled = sequence.computed
        sequence.target = len(sequence.tokens)
        if not sequence.admissions:
            sequence.admitted_at = self.now
            cached = sequence.computed - sequence.pulled_tokens  # pulled tokens were computed for this very request
            sequence.cached_tokens = max(0, min(cached, sequence.prompt_tokens - 1))
            loaded = min(sequence.loaded_blocks * self.block_size, sequence.cached_tokens)
            sequence.storage_tokens = min(sequence.fetched_blocks * self.block_size, loaded)
            sequence.host_tokens = loaded - sequence.storage_tokens
            self.stats.prompt_tokens += sequence.prompt_tokens
            self.stats.cached_tokens += sequence.cached_tokens
        sequence.admissions += 1
        if sequence.queued:
            self._leave_queue(sequence)
        self.slots.assign_slot(sequence)
        insort(self.running, sequence, key=by_urgency)

    def _take_blocks(self, sequence: Sequence, room: int = 0) -> int:
        """Take all blocks needed for admission. Returns how many of them already have their content."""
        need = self.need(sequence, room)
        hits = self.cache.acquire(sequence.keys[: need.hit])  # held first, so that `take` cannot evict them
        if self.tiers.up:
            self.tiers.writes.found(sequence.keys[: need.hit], hits)
        sequence.blocks = hits + self.cache.take(need.new)
        sequence.capacity = len(sequence.blocks) * self.block_size
        self._may_offer(sequence)
        return need.hit

    def _may_offer(self, sequence: Sequence) -> None:
        if sequence.kept is not None:
            self.to_offer[sequence.request.id] = sequence.kept

    def publish(self, sequence: Sequence, place: int) -> bool:
        """Publish the computed or loaded block at this place. False: another sequence published it first, and this one uses
        that block now."""
        if not self.pool.trusted:
            raise InvariantBroken(f"{sequence!r}: block {place} of a pool that is not trusted is published", invariant=12)
        own = self.cache.publish(sequence.keys, sequence.blocks, place)
        self._may_offer(sequence)
        if own and self.tiers.links is not None:
            self.tiers.links.published(sequence.keys, place, sequence.blocks[place], sequence.tokens)
        return own

    def prompt_planned(self, sequence: Sequence) -> None:
        """The sequence's last chunk is in a plan, which samples its next token."""
        sequence.advance(Fact.PROMPT_PLANNED)
        sequence.in_flight += 1
        self.decoding += 1

    def preempt(self, victim: Sequence) -> None:
        """Preempt a running sequence. Its blocks are available at once: the plan that reassigns them also drops it, after every
        plan that writes to them."""
        was = victim.phase
        victim.advance(Fact.PREEMPTED)
        victim.preemptions += 1
        self.stats.preemptions += 1
        self.preempting.append(victim)
        self.away[victim] = None
        if self.tiers.up:
            self.tiers.writes.park(victim.keys[: victim.published], victim.blocks[: victim.published])
        self.vacate_worker(victim, was)

    def vacate_worker(self, sequence: Sequence, was: Phase) -> None:
        """Remove the sequence from `running`, release its blocks, drop it in the next plan. The slot stays taken until the drop
        is acknowledged."""
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
        """The worker has executed the drop: nothing of this incarnation is in flight."""
        sequence.advance(Fact.ACKNOWLEDGED)
        self.slots.vacate(sequence)
        if sequence.phase is Phase.WAITING:
            if sequence.in_flight:
                raise InvariantBroken(f"{sequence!r}: dropped with {sequence.in_flight} tokens in flight", invariant=32)
            self.preempting.remove(sequence)
            self._enqueue(sequence)

    def clear_worker(self) -> None:
        """The worker is dead: every occupant leaves its slot without an acknowledgement."""
        for sequence in self.slots.slot_owners:
            if sequence is None:
                continue
            sequence.advance(Fact.WORKER_LOST)
            self.cache.release(sequence.detach_blocks())
            sequence.in_flight = 0
            sequence.drafts = 0
            self.slots.vacate(sequence)
            if sequence.phase is Phase.WAITING:
                if sequence.preemptions:
                    self.away[sequence] = None
                self._enqueue(sequence)
        self.running.clear()
        self.preempting.clear()
        self.drops.clear()
        self.folds.clear()
        self.decoding = 0
