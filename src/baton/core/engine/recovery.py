"""Finds the request that kills workers. A lost worker costs time, never an answer, unless there is evidence against one
request.

Suspects are the sequences of the plans that the worker may have begun: the oldest in flight, and on a device that runs ahead
also the next ones (steps_ahead), which are launched before its result is sent. They are separated by halving, beside the work
of all sequences that were not in these plans:

    lost with     a b c d e f g h
    run           a b c d . . . .     e f g h are held
    lost again    a b . .             then c d are held too
    or passed             e f g h     a b c d are past the place and cleared, e f g h run

A sequence is cleared when it has a token more than it had when the worker was lost. A sequence that was the only suspect twice
in a row is ended as poison: at most log2(suspects) + 2 workers are lost with it. A loss without evidence (a kill from outside)
changes nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from typing import Final

from baton.core.engine.board import Board
from baton.core.engine.phase import OPEN, Phase
from baton.core.engine.request import Sequence, by_urgency
from baton.errors import InvariantBroken
from baton.protocol.request import FinishReason
from baton.protocol.step import StepPlan

ONLY_SUSPECT_LOSSES_MAX: Final = 2
"""Losses in a row as the only suspect after which a sequence is ended."""


class Suspects:
    __slots__ = ("_active", "_held", "steps_ahead")

    def __init__(self) -> None:
        self.steps_ahead = 1
        "Maximum of plans that the worker begins before it sends the result of the first."
        self._active: list[Sequence] = []
        "Suspects that may run."
        self._held: list[list[Sequence]] = []
        "Groups of suspects that wait for the active ones to be cleared."

    @property
    def any(self) -> bool:
        return bool(self._active or self._held)

    def worker_lost(self, board: Board, plans: Iterable[StepPlan], *, evidence: bool) -> bool:
        """Return everything on the worker to the queue. True if the loss is explained: earlier suspects were narrowed down.
        Suspects of a younger plan explain nothing, because it may not have begun. `plans`: those in flight, oldest first."""
        self.settle(board)  # this event may have brought a suspect past its place, before the loss was detected
        begun = [[board.slots.slot_owner(slot) for slot in plan.run.slots] for plan in islice(plans, self.steps_ahead)]
        explained = evidence and bool(begun) and any(sequence.suspect for sequence in begun[0])
        board.clear_worker()
        if evidence:
            self._blame(board, list(dict.fromkeys(chain.from_iterable(begun))))
        self.settle(board)
        return explained

    def _blame(self, board: Board, ran: list[Sequence]) -> None:
        """Hold the suspects: known ones are examined first, and the others of the plans wait until then."""
        known = [sequence for sequence in ran if sequence.suspect]
        first = sorted((s for s in known or ran if s.phase in OPEN), key=by_urgency)
        later = [s for s in ran if s.phase in OPEN and s not in first]
        for sequence in (*first, *later):
            sequence.suspect = True
            sequence.suspect_length = len(sequence.tokens)
        self._hold(board, later, last=True)
        self._hold(board, [sequence for sequence in self._active if sequence not in known])
        if len(known or ran) == 1:
            for sequence in first:
                self._count_against(board, sequence)
        half = (len(first) + 1) // 2
        self._active = first[:half]
        self._hold(board, first[half:])

    def settle(self, board: Board) -> None:
        """Clear suspects that are past their place or have ended, and let the next group run. Called after every event."""
        past = [s for s in self._active if s.phase not in OPEN or len(s.tokens) > s.suspect_length]
        for sequence in past:
            _clear(sequence)
        if past:
            self._active = [sequence for sequence in self._active if sequence.suspect]
        while self._held and not self._active:
            self._active = [sequence for sequence in self._held.pop(0) if sequence.phase in OPEN]
            for sequence in self._active:
                if sequence.phase is Phase.HELD:
                    board.release(sequence)

    def check(self, board: Board) -> None:
        """47: a suspect is either active or held, and every active or held sequence is a suspect."""
        watched = [_name(sequence) for group in (self._active, *self._held) for sequence in group]
        for group in board.groups.values():
            for sequence in group.sequences:
                if sequence.phase in OPEN and sequence.suspect != (_name(sequence) in watched):
                    raise InvariantBroken(f"{sequence!r} is a suspect and not listed, or listed and no suspect", invariant=47)

    def _count_against(self, board: Board, sequence: Sequence) -> None:
        """Count a loss with evidence against the only suspect."""
        sequence.suspect_losses += 1
        if sequence.suspect_losses >= ONLY_SUSPECT_LOSSES_MAX:
            board.stats.crash_ends += 1
            detail = "the worker was lost twice while computing this request and no other suspect"
            board.end(sequence, FinishReason.ERROR, "poison", detail)

    def _hold(self, board: Board, group: list[Sequence], *, last: bool = False) -> None:
        if group:
            self._held.insert(len(self._held) if last else 0, group)
        for sequence in group:
            if sequence.phase is Phase.WAITING:
                board.hold(sequence)


def _name(sequence: Sequence) -> tuple[str, int, int]:
    return sequence.request.id, sequence.attempt, sequence.index


def _clear(sequence: Sequence) -> None:
    sequence.suspect = False
    sequence.suspect_losses = 0
