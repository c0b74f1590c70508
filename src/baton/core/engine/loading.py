"""Sequences that wait for KV from a lower tier. The scheduler never waits: a loading sequence is out of the queue, the others
run.

    in the queue --ask--> LOADING: storage is asked, then brings what it has to the host --> back in the queue
    head    --load-> LOADING: it holds all its blocks, into which the host's copies are brought  --> back in the queue

A load begins only if it is expected to be quicker than computing, by measured rates, and only when all blocks of the sequence
are available: it comes back needing nothing but a slot. Whatever the result, the sequence returns to its old place; missing
blocks are computed. Storage is asked when a request joins, which is the prefetch: at its turn the host has it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Literal

from baton.core.deadlines import Deadlines
from baton.core.engine.admission import Room, blocks
from baton.core.engine.board import Board
from baton.core.engine.pace import StepPace
from baton.core.engine.phase import Phase
from baton.core.engine.request import LoadingReason, QueueKey, Sequence
from baton.core.kv.move import Move, MoveWaiter, Pending
from baton.core.kv.tiers import Tiers
from baton.core.kv.token_links import NO_RUN
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockKey, Instant, StepNo
from baton.protocol.moves import StorageAnswer


class LoadDecision(Enum):
    """The decision about the head of the queue."""

    PROCEED = "proceed"
    LEFT = "left"
    "The head is loading, and has left the queue."
    HELD = "held"
    "The head waits until there is room to load it."


class SequenceLoad(LoadingReason, MoveWaiter):
    """One stay of a sequence in LOADING: it waits for a storage query, a fetch, or a load of its own or of another sequence."""

    __slots__ = ("begin", "loader", "sequence")

    def __init__(self, loader: Loader, sequence: Sequence, begin: int = -1) -> None:
        super().__init__()
        self.loader = loader
        self.sequence = sequence
        self.begin = begin
        "First place in the sequence's table that its own load fills. -1: the sequence waits for another move."

    def ended(self) -> None:
        self.loader.forget(self)


class Loader:
    def __init__(self, board: Board, tiers: Tiers, pace: StepPace) -> None:
        self._board = board
        self._tiers = tiers
        self._pace = pace
        self._unasked: deque[Sequence] = deque()
        self._bringing: dict[BlockKey, Move] = {}
        "Keys that a fetch or a load brings: another sequence that wants them waits for that move."
        self._patience: Deadlines[SequenceLoad] = Deadlines()
        "Deadlines of sequences that wait for storage. Afterwards the sequence is computed, whatever storage does."
        self._declined = 0
        "Number of loads that were not worth it."
        self._held: QueueKey | None = None
        "The head that waits until there is room to load it."
        self._held_until: Instant | None = None
        "Time until which the head waits for room. None: it has waited long enough."

    # In the queue

    def query_storage_for_new(self, now: Instant) -> None:
        """Query storage for the KV of sequences that have joined the queue."""
        unasked = self._unasked
        unasked.extend(self._board.newly_queued)
        self._board.newly_queued.clear()
        while unasked and self._tiers.questions < self._tiers.config.queries_max:
            sequence = unasked.popleft()
            if sequence.phase is Phase.WAITING and not sequence.tiers_asked:
                self._query_storage(sequence, now)
        if len(unasked) > 2 * len(self._board.waiting) + 64:  # most entries have left the queue
            waiting = [s for s in unasked if s.phase is Phase.WAITING and not s.tiers_asked]
            self._unasked = deque(dict.fromkeys(waiting))

    def _query_storage(self, sequence: Sequence, now: Instant) -> bool:
        """Query storage for one sequence. True: the sequence has left the queue."""
        sequence.tiers_asked = True
        if not (self._tiers.config.storage and self._may_load(sequence)):
            return False
        keys, have, full = self._missing(sequence)
        here = have + self._tiers.host.run(keys, have, full)
        if full - here < self._tiers.config.load_blocks_min:
            return False
        patience = self._patience_for(full - here)
        under_way: Pending | None = self._bringing.get(keys[here])
        if under_way is None:
            answer = self._tiers.answer_rate.seconds
            if answer is not None and answer > patience and not self._try_anyway():
                return False  # storage answers too late for this sequence
            if self._tiers.questions >= self._tiers.config.queries_max:
                return False
            links = self._tiers.links
            run = links.chain_of(keys, here, full, sequence.tokens) if links is not None else NO_RUN
            under_way = self._tiers.query(keys[here:full], run, now)
            if under_way is None:
                return False
        self._wait(sequence, under_way, Instant(now + patience))
        return True

    def _missing(self, sequence: Sequence) -> tuple[list[BlockKey], int, int]:
        """The sequence's keys, the number of leading ones on the device, and the number worth having."""
        hit = self._board.need(sequence).hit
        return sequence.keys, hit, (len(sequence.tokens) - 1) // self._board.block_size

    def _may_load(self, sequence: Sequence) -> bool:
        """Whether the sequence may load. Suspects are computed: no other sequence may delay a suspect, nor wait for it."""
        return self._tiers.up and not sequence.suspect and not sequence.must_compute_prompt and not sequence.blocks

    def _patience_for(self, wanted: int) -> float:
        """The longest wait for storage that makes sense: the time to compute these blocks."""
        price, config = self._pace.price, self._tiers.config
        if price is None:
            return config.storage_seconds_max
        return min(config.storage_seconds_max, config.spare_seconds + price * wanted * self._board.block_size)

    # At the head of the queue

    def consider(self, head: Sequence, room: Room, now: Instant, step: StepNo) -> LoadDecision:
        """Decide about the head of the queue: load its KV from the host, let it wait for a load, or let it be admitted and
        computed."""
        if not self._tiers.host.total or not self._may_load(head):
            return LoadDecision.PROCEED
        if not head.tiers_asked and self._query_storage(head, now):
            return LoadDecision.LEFT
        tiers = self._tiers
        keys, have, full = self._missing(head)
        if have < full and (under_way := self._bringing.get(keys[have])) is not None and under_way.kind == "load":
            self._wait(head, under_way)
            return LoadDecision.LEFT
        run = tiers.host.run(keys, have, full)
        if run < tiers.config.load_blocks_min or not self._worth_loading(head):
            return LoadDecision.PROCEED
        need = self._board.need(head)
        if tiers.loading_blocks and tiers.loading_blocks + need.new > self._board.cache.pool.total // 2:
            return LoadDecision.HELD if self._holds(head, run, now) else LoadDecision.PROCEED
        if blocks(head, room, self._board) is not None:
            return LoadDecision.PROCEED  # admission reports the shortage
        self._board.lease(head)
        load = tiers.load(keys[have : have + run], head.blocks[have : have + run], StepNo(step - 1))
        self._note_keys(load)
        self._wait(head, load, begin=have)
        return LoadDecision.LEFT

    def _worth_loading(self, head: Sequence) -> bool:
        """Whether the load is worth it. Called at each check of the head, decided once: loads are counted, not checks."""
        if self._is_quicker("load"):
            return True
        if head.load_anyway is None:
            head.load_anyway = self._try_anyway()
        return head.load_anyway

    def _is_quicker(self, kind: Literal["load", "fetch"]) -> bool:
        """Whether the move is quicker than computing, as far as both are measured."""
        seconds, price = self._tiers.rates[kind].seconds, self._pace.price
        return seconds is None or price is None or seconds < price * self._board.block_size

    def _try_anyway(self) -> bool:
        """Whether to load although it is not worth it. Now and then this happens: a rate that is never used is never measured
        again."""
        self._declined += 1
        return self._declined % self._tiers.config.load_again_after == 0

    def _holds(self, head: Sequence, run: int, now: Instant) -> bool:
        """Whether the head waits, because loads have used their share of the pool: until one of them ends, but not longer than
        computing it would take: everything behind it waits too."""
        if self._held != head.order:
            self._held = head.order
            self._held_until = Instant(now + self._patience_for(run))
        return self._held_until is not None and now < self._held_until

    def _note_keys(self, move: Move) -> None:
        """Record that the move brings these keys, so that other sequences wait for it."""
        for key in move.keys:
            self._bringing[key] = move

    def _wait(self, sequence: Sequence, pending: Pending, deadline: Instant | None = None, begin: int = -1) -> None:
        """Let the sequence wait for `pending`. A copy in memory needs no deadline: it ends, or the service is found to hang."""
        load = SequenceLoad(self, sequence, begin)
        self._board.begin_loading(sequence, load)
        load.wait_for(pending)
        if deadline is not None:
            self._patience.set(load, deadline)

    # Results

    def answered(self, answer: StorageAnswer, now: Instant) -> None:
        """Fetch the blocks that storage has to the host, if that is worth it; the sequences that asked wait for the fetch."""
        question = self._tiers.answered(answer, now)
        if question is None:
            return
        found = max(0, min(answer.found, len(question.keys)))
        fetch = None
        if (
            question.waiters
            and found >= self._tiers.config.load_blocks_min
            and (self._is_quicker("fetch") or self._try_anyway())
        ):
            fetch = self._tiers.fetch(question.keys[:found], question.run, now)
        waiters = question.take_waiters()
        if fetch is None:
            self._release(waiters)
            return
        self._note_keys(fetch)
        for waiter in waiters:
            waiter.wait_for(fetch)

    def moved(self, move: Move) -> None:
        if move.kind in ("fetch", "load"):
            self._end(move, len(move.host))

    def _end(self, pending: Pending, arrived: int) -> None:
        for key in pending.keys:
            if self._bringing.get(key) is pending:
                del self._bringing[key]
        fetched = isinstance(pending, Move) and pending.kind == "fetch"
        waiters = pending.take_waiters()
        for load in waiters:
            if not isinstance(load, SequenceLoad):
                continue
            if load.begin >= 0:
                publish_loaded(self._board, load.sequence, load.begin, arrived)
            elif fetched and not load.sequence.admissions:
                load.sequence.fetched_blocks += arrived
        self._release(waiters)

    def _release(self, waiters: list[MoveWaiter]) -> None:
        for load in waiters:
            if isinstance(load, SequenceLoad):
                self._patience.discard(load)
                self._board.end_loading(load.sequence)

    def forget(self, load: SequenceLoad) -> None:
        """End the sequence's wait. The move that it waited for continues."""
        load.leave()
        self._patience.discard(load)

    # Timeouts and losses

    def next_deadline(self) -> Instant | None:
        patience, held = self._patience.earliest, self._held_until
        return held if patience is None else patience if held is None else min(patience, held)

    def expire(self, now: Instant) -> None:
        """Continue the sequences that have waited for storage long enough. That is no failure of storage."""
        if self._patience.earliest is not None:
            for load in self._patience.due(now):
                load.leave()
                self._board.end_loading(load.sequence)
        if self._held_until is not None and self._held_until <= now:
            self._held_until = None

    def storage_late(self, now: Instant) -> None:
        """Continue the sequences of these queries: storage has failed to answer in time."""
        for question in self._tiers.late(now):
            self._release(question.take_waiters())

    def service_lost(self, now: Instant) -> None:
        for pending in self._tiers.service_lost(now):
            if not isinstance(pending, Move) or pending.kind != "pull":
                self._end(pending, 0)

    def pool_changed(self) -> None:
        """Return the loading sequences to the queue: leases are void. Storage queries continue, as they do not touch the
        device."""
        for sequence in list(self._board.leased):
            self._board.drop_lease(sequence)
            if sequence.phase is Phase.LOADING and isinstance(sequence.load, SequenceLoad):
                self.forget(sequence.load)
                self._board.end_loading(sequence)
        for move in self._tiers.pool_changed():
            self._end(move, 0)

    # Proof

    def check(self) -> None:
        """17: a sequence waits only for a move or query that is under way and lists it as waiter."""
        sequences = [sequence for group in self._board.groups.values() for sequence in group.sequences]
        for sequence in sequences:
            load = sequence.load
            if isinstance(load, SequenceLoad) and (load.pending is None or load not in load.pending.waiters):
                raise InvariantBroken(f"{sequence!r} waits for nothing", invariant=17)
            if isinstance(load, SequenceLoad) and load.pending is not None and not self._tiers.is_pending(load.pending):
                raise InvariantBroken(f"{sequence!r} waits for what is not under way", invariant=17)
        for pending in self._tiers.pending():
            for waiter in pending.waiters:
                if waiter.pending is not pending or (isinstance(waiter, SequenceLoad) and waiter.sequence.load is not waiter):
                    raise InvariantBroken(f"a waiter of {pending.id} does not wait for it", invariant=17)
        if not all(self._tiers.is_pending(move) for move in self._bringing.values()):
            raise InvariantBroken("a key counts as being brought by what is not under way", invariant=17)


def publish_loaded(board: Board, sequence: Sequence, begin: int, count: int) -> None:
    """Publish the loaded blocks from `begin` on. Where another sequence published the same content meanwhile, use its block."""
    for place in range(begin, begin + count):
        board.publish(sequence, place)
    if not sequence.admissions:
        sequence.loaded_blocks += count
    sequence.computed = sequence.published = max(sequence.published, begin + count)
    sequence.computed *= board.block_size
