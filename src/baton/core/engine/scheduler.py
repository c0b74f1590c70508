"""Plans one step: decodes first, then prompts (running ones and those admitted from the queue), and drops.

Prompts are planned class by class. A less urgent running prompt keeps its slot and blocks, but its next chunk comes after the
prompts of a more urgent class, also those admitted in this very step. Within a class: sharing.py.

Plans run ahead of results: `scheduled` counts planned tokens, `computed` confirmed ones (absorb.py).

Drafts (speculative decoding) get what a step without prompts leaves: tokens of its budget, and blocks that nothing else needs
(_plan_drafts). The worker decides how many of them it makes.
"""

from __future__ import annotations

from itertools import groupby
from typing import Final

from msgspec import Struct

from baton.config import SchedulerConfig
from baton.core.engine.admission import Room, shortage
from baton.core.engine.board import Board
from baton.core.engine.loading import LoadDecision, Loader
from baton.core.engine.pace import StepPace
from baton.core.engine.phase import Phase
from baton.core.engine.preemption import PrefillRoom, preempt_for_head
from baton.core.engine.request import Sequence, by_urgency
from baton.core.engine.sharing import divide
from baton.protocol.ids import BlockId, Instant, Slot, StepNo, WorkerEpoch
from baton.protocol.step import BatchRows, NewSequence, StepPlan

DRAFTING_MAX: Final = 64
"""Maximum of decoding sequences with drafts: with more of them arithmetic bounds a step, and one more row costs its full
price."""


class Draft:
    """A step while it is being planned."""

    __slots__ = ("chunks", "closed", "counts", "drafts", "grown", "new", "preempted", "prompts", "room", "slots", "unfinished")

    def __init__(self, room: Room) -> None:
        self.room = room
        "Resources left after every decoding sequence has its one token."
        self.slots: list[Slot] = []
        self.counts: list[int] = []
        self.drafts: tuple[int, ...] = ()
        self.prompts: list[Sequence] = []
        "Sequences on the worker with prompt tokens that neither an earlier step nor their admission in this step has planned."
        self.chunks: dict[Sequence, int] = {}
        "Prompt tokens of this step, per sequence."
        self.unfinished: list[Slot] = []
        "Slots with a chunk that is not the last of its prompt."
        self.new: list[NewSequence] = []
        self.grown: list[tuple[Slot, BlockId]] = []
        self.preempted = False
        self.closed = False
        "Whether no further sequence is admitted in this step."


class PlanInFlight(Struct, frozen=True):
    """A plan in flight, with the facts needed when its result arrives."""

    plan: StepPlan
    unfinished: tuple[Slot, ...]
    "Slots whose row is a chunk before the last: no token is expected."
    prompt_tokens: int = 0
    decoding: int = 0
    "Number of rows with one token."
    planned_at: Instant = Instant(0.0)


class Scheduler:
    __slots__ = (
        "_ahead",
        "_board",
        "_chunk_max",
        "_drafts_max",
        "_grown_meanwhile",
        "_loader",
        "_pace",
        "_prompts_at_once",
        "_tokens_per_step",
    )

    def __init__(self, config: SchedulerConfig, board: Board, pace: StepPace, loader: Loader) -> None:
        self._board = board
        self._loader = loader
        self._pace = pace
        self._tokens_per_step = config.tokens_per_step
        self._drafts_max = config.drafts_max
        self._ahead = config.steps_in_flight - 1
        "Maximum of plans between a plan and its result."
        self._grown_meanwhile = 1 + (config.drafts_max + self._ahead) * (1 + config.drafts_max) // board.block_size
        "Maximum of blocks that a sequence fills until another one has reached a block that it took for drafts."
        self._chunk_max = config.chunk_tokens_max or config.tokens_per_step
        self._prompts_at_once = config.prompts_at_once

    def plan_step(self, step: StepNo, epoch: WorkerEpoch, now: Instant) -> PlanInFlight | None:
        """The next plan, or None if there is nothing to compute and nothing to drop."""
        board, preempted = self._board, False
        if board.waiting.waiting:
            # Preempt first, because rows in the draft stay; and preempt nothing for a head that is about to load.
            held = board.tiers.up and self._load_heads(self._room(), step, now)
            preempted = not held and preempt_for_head(board, self._room_for_head)
        draft = Draft(self._room())
        draft.preempted = preempted
        self._continue_running(draft)
        decoding = len(draft.slots)
        if draft.prompts or board.waiting.waiting:
            self._plan_prompts(draft, step, now)
        if self._drafts_max and 0 < decoding == len(draft.slots) <= DRAFTING_MAX:
            self._plan_drafts(draft)
        if not draft.slots and not board.drops:
            return None
        return self._seal(draft, step, epoch, decoding, now)

    def _room(self) -> Room:
        board = self._board
        return Room(self._prefill_room(board.decoding), board.slots.free, board.cache.available, board.new_bytes_max)

    def _load_heads(self, room: Room, step: StepNo, now: Instant) -> bool:
        """Take heads of the queue whose KV a lower tier has out of the queue. True: the remaining head is about to load. Called
        only with a cache service: without one no head loads."""
        board = self._board
        while (head := board.waiting.head()) is not None:
            answer = self._loader.consider(head, room, now, step)
            if answer is not LoadDecision.LEFT:
                return answer is LoadDecision.HELD
            room.refresh(board)
        return False

    def _prefill_room(self, decoding: int) -> int:
        """Room for prompt tokens. Limited while sequences decode: their next token waits for the prompts of the step."""
        left = self._tokens_per_step - decoding
        return min(left, self._pace.prompt_tokens()) if decoding else left

    def _room_for_head(self, head: Sequence) -> PrefillRoom | None:
        """Room for the head. None: running prompts that are as urgent leave the head nothing in this step. Less urgent prompts
        come after it."""
        prompts = [s for s in self._board.running if s.phase is Phase.PREFILL and s.priority <= head.priority]
        if not prompts:
            return self._prefill_room
        left, equals = self._prefill_room(self._board.decoding), [s for s in prompts if s.priority == head.priority]
        left -= sum(self._chunk(sequence) for sequence in prompts[: len(prompts) - len(equals)])
        if len(equals) < self._prompts_at_once:
            left = max(left // 2, left - sum(map(self._chunk, equals)))
        else:
            left -= sum(map(self._chunk, equals))
        return self._prefill_room if left > 0 else None

    def _chunk(self, sequence: Sequence, planned: int = 0) -> int:
        """Prompt tokens that the sequence could compute in one step in which `planned` are planned already."""
        return min(sequence.target - sequence.scheduled, self._chunk_limit(sequence) - planned)

    def _chunk_limit(self, sequence: Sequence) -> int:
        """Maximum of a chunk: small for a prompt that is handed over. Not beside other prompts, which would share the steps:
        all of them would be computed late."""
        kept, board = sequence.kept, self._board
        if kept is None or board.waiting.waiting or len(board.running) - board.decoding > 1:
            return self._chunk_max
        left = sequence.target - sequence.scheduled
        if not kept.chunk or left > kept.left:  # its first chunk, or it begins anew
            kept.chunk = self._pace.chunks.size(left)
        kept.left = left
        return min(self._chunk_max, kept.chunk)

    # Running sequences

    def _continue_running(self, draft: Draft) -> None:
        """Plan one token for each decoding sequence, most urgent first. Prompts are collected.

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
                    continue  # all its positions are planned; the last tokens are in flight
                if position == sequence.capacity and not self._grow(sequence, draft):
                    return
                sequence.scheduled = position + 1
                sequence.in_flight += 1
                add_slot(sequence.slot)
                add_count(1)
            else:
                draft.prompts.append(sequence)

    def _grow(self, sequence: Sequence, draft: Draft) -> bool:
        """Take one more block, from less urgent sequences if need be. False: the sequence was itself the least urgent and is
        preempted.

        Leases behind it are revoked first: they cost the least. Leases before it stay, as the last of `running` is less urgent.
        """
        board = self._board
        if not board.cache.available and not self._make_room(sequence, draft):
            return False
        (block,) = board.cache.take(1)
        sequence.blocks.append(block)
        sequence.capacity += board.block_size
        draft.grown.append((sequence.slot, block))
        return True

    def _make_room(self, sequence: Sequence, draft: Draft) -> bool:
        """Make one block available to a running sequence. False: the sequence was itself preempted."""
        board = self._board
        while not board.cache.available and board.revoke_lease(behind=sequence.order):
            pass
        if not board.cache.available:
            board.reserve.growth_preempted()
        while not board.cache.available:
            victim = board.running[-1]
            board.preempt(victim)
            draft.preempted = True
            if victim is sequence:
                return False
        return True

    def _plan_drafts(self, draft: Draft) -> None:
        """Plan drafts behind the token of each decoding sequence, most urgent first. No sequence gives way for a draft.

            capacity    |------------- blocks of the sequence -------------|
            position    |-- planned --|
            drafts                    |---------- drafts ---------|- ahead -|

        Plans ahead of this plan's result begin behind all its drafts, though most may be refused. The `ahead` positions are for
        their tokens: a sequence that needs a block for its token has no drafts in flight, and truly is at its end.
        """
        left, ahead = self._tokens_per_step - len(draft.slots), self._ahead
        drafts = []
        for slot in draft.slots:
            sequence = self._board.slots.slot_owner(slot)
            position, stop = sequence.scheduled, sequence.stop_position
            wanted = min(self._drafts_max, sequence.drafts_max, left, stop - position)
            count = self._room_for_drafts(sequence, wanted, min(position + wanted + ahead, stop), draft) if wanted > 0 else 0
            sequence.scheduled = position + count
            sequence.drafts += count
            drafts.append(count)
            left -= count
        if any(drafts):
            draft.drafts = tuple(drafts)

    def _room_for_drafts(self, sequence: Sequence, wanted: int, end: int, draft: Draft) -> int:
        """Number of drafts that fit. Blocks up to `end` are taken early only if nothing waits for blocks, and if all decoding
        sequences have enough until this one needs them for its tokens."""
        board = self._board
        if sequence.capacity < end and not (board.waiting.waiting or board.preempting or board.awaiting):
            while sequence.capacity < end and board.cache.available > board.decoding * self._grown_meanwhile:
                self._grow(sequence, draft)
        return wanted if sequence.capacity >= end else max(0, sequence.capacity - sequence.scheduled - self._ahead)

    # Prompts

    def _plan_prompts(self, draft: Draft, step: StepNo, now: Instant) -> None:
        """Plan class by class: more urgent sequences are admitted before a running class gets its chunks."""
        draft.closed = draft.preempted
        if draft.prompts:
            self._share_running(draft, step, now)
        self._admit(draft, step, now)
        if draft.prompts:
            self._share_rest(draft)
        if draft.chunks:
            self._add_rows(draft)

    def _share_running(self, draft: Draft, step: StepNo, now: Instant) -> None:
        running = [sequence for sequence in draft.prompts if sequence.phase is Phase.PREFILL]  # growth may preempt some of them
        draft.prompts = list(running)
        for priority, prompts in groupby(running, key=lambda sequence: sequence.priority):
            self._admit(draft, step, now, before=priority)
            self._share(list(prompts), draft)

    def _share_rest(self, draft: Draft) -> None:
        if draft.room.prefill_left > 0:  # prompt tokens that the queue did not take
            draft.closed = True
            for _, prompts in groupby(sorted(draft.prompts, key=by_urgency), key=lambda sequence: sequence.priority):
                self._share(list(prompts), draft)

    def _share(self, prompts: list[Sequence], draft: Draft) -> None:
        """Divide the remaining room among running prompts of one class, and leave some to the queue if one of that class
        waits."""
        room = draft.room.prefill_left
        remaining = [sequence.target - sequence.scheduled for sequence in prompts]
        if sum(remaining) > room and self._leaves_room(prompts[0], draft):
            room -= room // 2
        wanted = [self._chunk(sequence, draft.chunks.get(sequence, 0)) for sequence in prompts]
        for sequence, count in zip(prompts, divide(room, wanted, remaining), strict=True):
            if count > 0:
                self._plan_chunk(sequence, count, draft)

    def _leaves_room(self, sequence: Sequence, draft: Draft) -> bool:
        """Whether to leave room: another prompt of the class waits, and not too many are being computed. Each holds blocks
        until it is computed."""
        head = self._board.waiting.head()
        if head is None or draft.closed or head.priority != sequence.priority:
            return False
        return sum(other.priority == sequence.priority for other in draft.prompts) < self._prompts_at_once

    def _plan_chunk(self, sequence: Sequence, count: int, draft: Draft) -> None:
        """Plan `count` more prompt tokens of the sequence in this step."""
        draft.room.prefill_left -= count
        draft.chunks[sequence] = draft.chunks.get(sequence, 0) + count
        sequence.scheduled += count

    def _add_rows(self, draft: Draft) -> None:
        for sequence, count in draft.chunks.items():
            draft.slots.append(sequence.slot)
            draft.counts.append(count)
            if sequence.scheduled == sequence.target:  # the last chunk samples
                self._board.prompt_planned(sequence)
            else:
                draft.unfinished.append(sequence.slot)

    # The queue

    def _admit(self, draft: Draft, step: StepNo, now: Instant, before: int | None = None) -> None:
        """Admit strictly in order: no sequence overtakes a head that does not fit, so the head cannot starve. `before`: admit
        only more urgent sequences than this class."""
        board, room = self._board, draft.room
        room.available = board.cache.available
        while not draft.closed and (head := board.waiting.head()) is not None:
            if before is not None and head.priority >= before:
                return
            if board.tiers.up:
                if self._load_heads(room, step, now):
                    board.stats.held_back["loading"] += 1
                    draft.closed = True
                    return
                if head is not board.waiting.head():
                    continue  # the head has left the queue to load
            short = shortage(head, room, board)
            if short is None:
                self._admit_head(head, draft)
            elif short == "blocks" and board.revoke_lease(behind=head.order):
                room.refresh(board)
            else:
                board.stats.held_back[short] += 1
                draft.closed = True

    def _admit_head(self, head: Sequence, draft: Draft) -> None:
        board, room = self._board, draft.room
        leased = bool(head.blocks)
        board.assign_slot(head)
        draft.new.append(_new_sequence(head, room.admitted(board, head, leased=leased)))
        left, wanted = room.prefill_left, head.target - head.scheduled
        if wanted > left:
            draft.prompts.append(head)
            left -= left // 2 if self._leaves_room(head, draft) else 0
        self._plan_chunk(head, min(wanted, self._chunk_limit(head), left), draft)

    def _seal(self, draft: Draft, step: StepNo, epoch: WorkerEpoch, decoding: int, now: Instant) -> PlanInFlight:
        """Build the plan from the draft, and take over the drops and table changes that the board has collected."""
        board = self._board
        deduplicated: tuple[tuple[Slot, int, BlockId], ...] = ()
        if board.folds:
            deduplicated = tuple(
                (sequence.slot, place, block)
                for sequence, incarnation, place, block in board.folds
                if sequence.incarnation == incarnation and sequence.blocks
            )
            board.folds.clear()
        drops = tuple(board.drops)
        board.drops.clear()
        run = BatchRows(tuple(draft.slots), tuple(draft.counts), draft.drafts)
        plan = StepPlan(step, epoch, drops, tuple(draft.new), tuple(draft.grown), deduplicated, run, tuple(draft.room.settings))
        prompt_tokens = sum(draft.chunks.values()) if draft.chunks else 0
        return PlanInFlight(plan, tuple(draft.unfinished), prompt_tokens, decoding, now)


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
