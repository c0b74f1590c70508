"""Plans one step: what runs goes on, then the line moves up, and drops are told.

Plans run ahead of results: `scheduled` counts what was planned, `computed` what was confirmed (absorb.py).
"""

from __future__ import annotations

from msgspec import Struct

from baton.config import SchedulerConfig
from baton.core.engine.admission import Room, shortage
from baton.core.engine.board import Board
from baton.core.engine.loading import Answer, Loader
from baton.core.engine.pace import StepPace
from baton.core.engine.phase import Phase
from baton.core.engine.preemption import preempt_for_head
from baton.core.engine.request import Sequence
from baton.protocol.ids import BlockId, Instant, Slot, StepNo, WorkerEpoch
from baton.protocol.step import NewSequence, Run, StepPlan


class Draft:
    """A step while it is being planned."""

    __slots__ = ("chunks", "counts", "grown", "new", "preempted", "prompt_tokens", "room", "slots", "unfinished")

    def __init__(self, room: Room) -> None:
        self.room = room
        "Every decoding sequence already has its one token."
        self.slots: list[Slot] = []
        self.counts: list[int] = []
        self.unfinished: list[Slot] = []
        "Those that run a chunk which is not their last."
        self.new: list[NewSequence] = []
        self.grown: list[tuple[Slot, BlockId]] = []
        self.preempted = False
        self.chunks = self.prompt_tokens = 0


class PlanInFlight(Struct, frozen=True):
    """A plan that is out, and what is remembered of it until its result is in."""

    plan: StepPlan
    unfinished: tuple[Slot, ...]
    "Slots whose row is a chunk that is not the last: no token is due."
    prompt_tokens: int = 0
    decoding: int = 0
    "Rows of one token."
    planned_at: Instant = Instant(0.0)


class Scheduler:
    __slots__ = ("_board", "_chunk_max", "_loader", "_pace", "_tokens_per_step")

    def __init__(self, config: SchedulerConfig, board: Board, pace: StepPace, loader: Loader) -> None:
        self._board = board
        self._loader = loader
        self._pace = pace
        self._tokens_per_step = config.tokens_per_step
        self._chunk_max = config.chunk_tokens_max or config.tokens_per_step

    def plan_step(self, step: StepNo, epoch: WorkerEpoch, now: Instant) -> PlanInFlight | None:
        """The next step, or None if there is nothing to do and nothing to tell."""
        board = self._board
        # First, as what has its place in the draft stays; and nobody is preempted for one that is about to load.
        preempted = not self._load_heads(self._room(), step, now) and preempt_for_head(board, self._prefill_room)
        draft = Draft(self._room())
        draft.preempted = preempted
        self._continue_running(draft)
        if not draft.preempted:
            self._admit(draft, step, now)
        if not draft.slots and not board.drops:
            return None
        return self._seal(draft, step, epoch, now)

    def _room(self) -> Room:
        board = self._board
        return Room(self._prefill_room(board.decoding), board.slots.free, board.cache.available)

    def _load_heads(self, room: Room, step: StepNo, now: Instant) -> bool:
        """Heads of the line whose KV a lower tier has leave it. True: the one that is left is about to."""
        board = self._board
        while (head := board.waiting.head()) is not None:
            answer = self._loader.consider(head, room, now, step)
            if answer is not Answer.LEFT:
                return answer is Answer.HELD
            room.available = board.cache.available
        return False

    def _prefill_room(self, decoding: int) -> int:
        """A long prompt in their step is what the next token of those that decode would wait for."""
        left = self._tokens_per_step - decoding
        return min(left, self._pace.prompt_tokens()) if decoding else left

    # What runs

    def _continue_running(self, draft: Draft) -> None:
        """One token for each that decodes, a chunk for each that prefills, most urgent first.

        Hot: no call per decoding sequence, which at 256 of them would be most of a step's planning.
        """
        running, decode = self._board.running, Phase.DECODE
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
        board = self._board
        while not board.cache.available and board.revoke_lease():
            pass
        if not board.cache.available:
            board.reserve.growth_preempted()
        while not board.cache.available:
            victim = board.running[-1]
            board.preempt(victim)
            draft.preempted = True
            if victim is sequence:
                return False
        (block,) = board.cache.take(1)
        sequence.blocks.append(block)
        sequence.capacity += board.block_size
        draft.grown.append((sequence.slot, block))
        return True

    def _run_chunk(self, sequence: Sequence, draft: Draft) -> None:
        """As much of its prompt as fits into this step."""
        count = min(sequence.target - sequence.scheduled, draft.room.prefill_left, self._chunk_max)
        if count <= 0:
            return
        draft.room.prefill_left -= count
        draft.chunks += 1
        draft.prompt_tokens += count
        draft.slots.append(sequence.slot)
        draft.counts.append(count)
        sequence.scheduled += count
        if sequence.scheduled == sequence.target:  # the last chunk samples
            self._board.prompt_planned(sequence)
        else:
            draft.unfinished.append(sequence.slot)

    # The line moves up

    def _admit(self, draft: Draft, step: StepNo, now: Instant) -> None:
        """Strictly in order: nobody overtakes a head that does not fit, so it cannot starve."""
        board, room = self._board, draft.room
        room.available = board.cache.available
        while not (held := self._load_heads(room, step, now)) and (head := board.waiting.head()) is not None:
            short = shortage(head, room, board)
            if short is not None and short.reason == "blocks" and board.revoke_lease(behind=head.order):
                room.available = board.cache.available
                continue
            if short is not None:
                board.stats.held_back[short.reason] += 1
                return
            board.seat(head)
            room.admitted(board, head)
            draft.new.append(_new_sequence(head, room.settings[head.group.settings]))
            self._run_chunk(head, draft)
        board.stats.held_back["loading"] += held

    def _seal(self, draft: Draft, step: StepNo, epoch: WorkerEpoch, now: Instant) -> PlanInFlight:
        board = self._board
        folded = tuple(
            (sequence.slot, place, block)
            for sequence, incarnation, place, block in board.folds
            if sequence.incarnation == incarnation and sequence.blocks
        )
        drops = tuple(board.drops)
        board.folds.clear()
        board.drops.clear()
        run = Run(tuple(draft.slots), tuple(draft.counts))
        plan = StepPlan(step, epoch, drops, tuple(draft.new), tuple(draft.grown), folded, run, tuple(draft.room.settings))
        return PlanInFlight(plan, tuple(draft.unfinished), draft.prompt_tokens, len(draft.slots) - draft.chunks, now)


def _new_sequence(sequence: Sequence, sampling: int) -> NewSequence:
    return NewSequence(
        slot=sequence.slot,
        incarnation=sequence.incarnation,
        tokens=tuple(sequence.tokens),
        prompt_tokens=sequence.prompt_tokens,
        computed_tokens=sequence.computed,
        blocks=tuple(sequence.blocks),
        sampling=sampling,
        index=sequence.index,
    )
