"""Sequences that wait for KV from a lower tier. The scheduler never waits: whoever loads is out of line, the others go on.

    in line --ask--> LOADING: storage is asked, then brings what it has to the host --> back in line
    head    --load-> LOADING: it holds all its blocks, into which the host's copies are brought  --> back in line

A load begins only if it is expected to be quicker than computing, by rates as measured, and only when the whole need of the
sequence is available: it comes back needing nothing but a slot. Whatever comes of it, the sequence returns to its old place;
what did not arrive is computed. Storage is asked when a request joins, which is the prefetch: at its turn the host has it.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from heapq import heappop, heappush
from itertools import count
from typing import Final

from baton.core.engine.admission import Room, blocks
from baton.core.engine.board import Board
from baton.core.engine.pace import StepPace
from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence, Stay
from baton.core.kv.move import Move
from baton.core.kv.tiers import Tiers
from baton.core.kv.token_links import NO_RUN, Run
from baton.protocol.ids import BlockKey, Instant, MoveId, StepNo
from baton.protocol.moves import MoveKind, StorageAnswer

QUERIES_MAX: Final = 64
"""Questions to storage at once. Those behind in line are asked for as answers come in."""
TRY_AGAIN: Final = 32
"""After so many loads that were not worth it one is done all the same: what is never used is never measured again."""
SPARE_SECONDS: Final = 0.05


class Answer(Enum):
    """What becomes of the head of the line."""

    PROCEED = "proceed"
    LEFT = "left"
    "It loads, and is out of line."
    HELD = "held"
    "It will load when there is room for that."


class Load(Stay):
    """One stay of a sequence in LOADING."""

    __slots__ = ("begin", "sequence", "waits_for")

    def __init__(self, sequence: Sequence, waits_for: MoveId, begin: int = -1) -> None:
        self.sequence = sequence
        self.waits_for = waits_for
        self.begin = begin
        "Of a load into its own blocks: the first place in its table that is brought. -1: it waits for something else."


class Loader:
    def __init__(self, board: Board, tiers: Tiers, pace: StepPace) -> None:
        self._board = board
        self._tiers = tiers
        self._pace = pace
        self._unasked: deque[Sequence] = deque()
        self._waiters: dict[MoveId, list[Load]] = {}
        self._bringing: dict[BlockKey, MoveId] = {}
        "Keys that a fetch or a load is about: whoever wants them too waits for that one."
        self._keys_of: dict[MoveId, tuple[BlockKey, ...]] = {}
        self._asked: dict[MoveId, tuple[tuple[BlockKey, ...], Run]] = {}
        "Questions to storage: about which keys, and their token ids where it wants those."
        self._deadlines: list[tuple[Instant, int, Load]] = []
        self._order = count()
        self._not_worth = 0
        self._loading: dict[MoveId, int] = {}
        "Blocks of each load into the device."
        self._loading_blocks = 0

    # In line

    def look_at_newcomers(self, now: Instant) -> None:
        """Those that have joined the line: does storage have their KV?"""
        self._unasked.extend(self._board.lined_up)
        self._board.lined_up.clear()
        while self._unasked and len(self._asked) < QUERIES_MAX:
            sequence = self._unasked.popleft()
            if sequence.phase is Phase.WAITING and not sequence.tiers_asked:
                self._ask(sequence, now)

    def _ask(self, sequence: Sequence, now: Instant) -> bool:
        """True: it has left the line."""
        sequence.tiers_asked = True
        if not (self._tiers.config.storage and self._may_load(sequence)):
            return False
        keys, have, full = self._missing(sequence)
        here = have + self._tiers.host.run(keys, have, full)
        if full - here < self._tiers.config.load_blocks_min:
            return False
        under_way = self._bringing.get(keys[here])
        if under_way is None:
            links = self._tiers.links
            run = links.asked(keys, here, full, sequence.tokens) if links is not None else NO_RUN
            under_way = self._tiers.query(keys[here:full], run, now)
            if under_way is None:
                return False
            self._asked[under_way] = tuple(keys[here:full]), run
        self._wait(sequence, under_way, Instant(now + self._patience(full - here)))
        return True

    def _missing(self, sequence: Sequence) -> tuple[list[BlockKey], int, int]:
        """Its keys, how many leading ones the device has, and how many are worth having."""
        hit = self._board.need(sequence).hit
        return sequence.keys, hit, (len(sequence.tokens) - 1) // self._board.block_size

    def _may_load(self, sequence: Sequence) -> bool:
        """A suspect is computed: it may not be held up, nor hold others up, by anything else."""
        return self._tiers.up and not sequence.suspect and not sequence.must_compute_prompt and not sequence.blocks

    def _patience(self, wanted: int) -> float:
        """Longer than computing it would take makes no sense."""
        price = self._pace.price
        allowed = self._tiers.config.storage_seconds_max
        return allowed if price is None else min(allowed, SPARE_SECONDS + price * wanted * self._board.block_size)

    # At the head of the line

    def consider(self, head: Sequence, room: Room, now: Instant, step: StepNo) -> Answer:
        if not self._tiers.host.total or not self._may_load(head):
            return Answer.PROCEED
        if not head.tiers_asked and self._ask(head, now):
            return Answer.LEFT
        tiers = self._tiers
        keys, have, full = self._missing(head)
        if have < full and (under_way := self._bringing.get(keys[have])) is not None and self._keys_are_loading(under_way):
            self._wait(head, under_way)
            return Answer.LEFT
        run = tiers.host.run(keys, have, full)
        if run < tiers.config.load_blocks_min or not self._worth("load"):
            return Answer.PROCEED
        need = self._board.need(head)
        if self._loading_blocks and self._loading_blocks + need.new > self._board.cache.pool.total // 2:
            return Answer.HELD
        if blocks(head, room, self._board) is not None:
            return Answer.PROCEED  # which says so itself
        self._board.lease(head)
        number = tiers.load(keys[have : have + run], head.blocks[have : have + run], StepNo(step - 1))
        self._bring(number, keys[have : have + run])
        self._loading[number] = run
        self._loading_blocks += run
        self._wait(head, number, begin=have)
        return Answer.LEFT

    def _keys_are_loading(self, number: MoveId) -> bool:
        return number in self._loading

    def _worth(self, kind: MoveKind) -> bool:
        """Quicker than computing, as far as both are known."""
        seconds = self._tiers.rates[kind].seconds
        price = self._pace.price
        if seconds is None or price is None or seconds < price * self._board.block_size:
            return True
        self._not_worth += 1
        return self._not_worth % TRY_AGAIN == 0

    def _bring(self, number: MoveId, keys: list[BlockKey]) -> None:
        self._keys_of[number] = tuple(keys)
        for key in keys:
            self._bringing[key] = number

    def _wait(self, sequence: Sequence, number: MoveId, deadline: Instant | None = None, begin: int = -1) -> None:
        """Without a deadline for a copy in memory: that ends, or the service is found to hang."""
        load = Load(sequence, number, begin)
        self._board.begin_loading(sequence, load)
        self._waiters.setdefault(number, []).append(load)
        if deadline is not None:
            heappush(self._deadlines, (deadline, next(self._order), load))

    # Outcomes

    def answered(self, answer: StorageAnswer, now: Instant) -> None:
        """What storage has is brought to the host, if that is worth it; whoever asked goes on waiting for that."""
        if not self._tiers.answered(answer, now):
            return
        keys, run = self._asked.pop(answer.id)
        waiters = self._still_waiting(answer.id)
        found = max(0, min(answer.found, len(keys)))
        fetch = None
        if waiters and found >= self._tiers.config.load_blocks_min and self._worth("fetch"):
            fetch = self._tiers.fetch(keys[:found], run, now)
        if fetch is None:
            self._release(waiters)
            return
        self._bring(fetch, list(keys[:found]))
        for load in waiters:
            load.waits_for = fetch
        self._waiters[fetch] = waiters

    def moved(self, move: Move) -> None:
        self._end(move.id, len(move.host), fetched=move.kind == "fetch")

    def _end(self, number: MoveId, arrived: int, *, fetched: bool = False) -> None:
        for key in self._keys_of.pop(number, ()):
            if self._bringing.get(key) == number:
                del self._bringing[key]
        self._loading_blocks -= self._loading.pop(number, 0)
        waiters = self._still_waiting(number)
        for load in waiters:
            sequence = load.sequence
            if load.begin >= 0:
                publish_loaded(self._board, sequence, load.begin, arrived)
            elif fetched and not sequence.admissions:
                sequence.fetched_blocks += arrived
        self._release(waiters)

    def _still_waiting(self, number: MoveId) -> list[Load]:
        return [load for load in self._waiters.pop(number, []) if load.sequence.load is load]

    def _release(self, loads: list[Load]) -> None:
        for load in loads:
            self._board.end_loading(load.sequence)

    # Time, and lives of others

    def next_deadline(self) -> Instant | None:
        return self._deadlines[0][0] if self._deadlines else None

    def expire(self, now: Instant) -> None:
        """Whoever has waited for storage long enough goes on without."""
        while self._deadlines and (self._deadlines[0][0] <= now or self._is_over(self._deadlines[0][2])):
            load = heappop(self._deadlines)[2]
            if self._is_over(load):
                continue
            self._tiers.late(load.waits_for, now)
            self._asked.pop(load.waits_for, None)  # a store that never answers must not keep the others from asking
            self._board.end_loading(load.sequence)

    @staticmethod
    def _is_over(load: Load) -> bool:
        return load.sequence.load is not load

    def service_lost(self) -> None:
        for number in self._tiers.service_lost():
            self._asked.pop(number, None)
            self._end(number, 0)

    def pool_changed(self) -> None:
        """Leases are void. What storage is asked for goes on: it does not touch the device."""
        for sequence in list(self._board.leased):
            self._board.drop_lease(sequence)
            if sequence.phase is Phase.LOADING:
                self._board.end_loading(sequence)
        for number in self._tiers.pool_changed():
            self._end(number, 0)


def publish_loaded(board: Board, sequence: Sequence, begin: int, count: int) -> None:
    """Its blocks from `begin` on are whole. Where another sequence published the same meanwhile, it takes that one's block."""
    for place in range(begin, begin + count):
        board.publish(sequence, place)
    if not sequence.admissions:
        sequence.loaded_blocks += count
    sequence.computed = sequence.published = max(sequence.published, begin + count)
    sequence.computed *= board.block_size
