"""The choice of the preempted sequence, exactly as docs/internals/protocol.md section 5. board.py changes the state.

1. The victim is the tail of `running`: the least urgent, then the youngest. The oldest of the most urgent class is never it.
2. `Board.preempt`: PREEMPTING, blocks given up, slot still taken, drop in the next plan. Tokens in flight are appended as they
arrive.
3. The worker acknowledges the drop within that step, after the slot's last token, even if the batch is empty.
4. `Board.acknowledge`: only now WAITING, at its old place in the queue. Tokens to prefill (prompt + outputs) are frozen at
admission.
5. An end while PREEMPTING (a stop token in flight, an abort) makes it CLOSING; the same drop serves for both.

Less urgent sequences give way to the head of the queue, which needs all that admission asks for, and to the first reservation
of a hand-off (handoff/destination.py), which needs blocks. Equal urgency never gives way, so no two sequences preempt each
other in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from baton.core.engine.admission import Room, shortage
from baton.core.engine.board import Board
from baton.core.engine.phase import Phase
from baton.core.engine.request import QueueKey, Sequence
from baton.protocol.ids import BlockId

PrefillRoom = Callable[[int], int]
"""Room for prompt tokens in a step, by the number of sequences that decode in it."""
Fits = Callable[[Room], bool]
"""Does the sequence that others give way to fit into this room?"""


def preempt_for_head(board: Board, room_for: Callable[[Sequence], PrefillRoom | None]) -> bool:
    """Preempt less urgent sequences for the head of the queue: as few as let it in, and none if all would not suffice.

    `room_for` returns None if running prompts that are as urgent use up the prompt tokens, whichever others leave.
    """
    running, head = board.running, board.waiting.head()
    if head is None or not running or not gives_way(running[-1], head):
        return False
    prefill_room = room_for(head)
    if prefill_room is None:
        return False
    after = _After(board, head, board.cache.blocks_of(head.keys[: board.need(head).hit]), prefill_room)
    after.without_leases(behind=head.order)
    victims = _fewest_victims(board, head, after, lambda room: shortage(head, room, board) is None)
    return _preempt_last(board, victims or 0)


class BlockClaim(NamedTuple):
    """Blocks that a reservation needs."""

    sequence: Sequence
    wanted: int
    "Number of blocks: of the sequence, for the growth of holders, and of earlier requests that wait."
    hits: list[BlockId]
    "Blocks that the sequence or those requests find in the cache. Their release is no gain."

    def is_short(self, board: Board) -> bool:
        return self.wanted > board.cache.available


def make_room(board: Board, sequence: Sequence, claim: Callable[[Sequence], BlockClaim]) -> bool:
    """Make the blocks of a reservation available: revoke less urgent leases, then preempt less urgent sequences. As few as
    suffice, and none if all would not."""
    victims = victims_for(board, claim(sequence))
    if victims is None:
        return False
    while claim(sequence).is_short(board) and board.revoke_lease(behind=_end_of_class(sequence)):
        pass
    _preempt_last(board, victims)
    return not claim(sequence).is_short(board)


def victims_for(board: Board, claim: BlockClaim) -> int | None:
    """Number of sequences to preempt, the last ones of `running`, for the claimed blocks. None: all less urgent ones do not
    suffice."""
    sequence = claim.sequence
    holders = [each.blocks for each in (*board.running, *board.leased) if gives_way(each, sequence)]
    holders += [kept.blocks for kept in board.kept.values()]
    if board.cache.available + sum(map(len, holders)) < claim.wanted:
        return None
    after = _After(board, sequence, claim.hits, lambda decoding: 0)
    after.without_leases(behind=_end_of_class(sequence))
    return _fewest_victims(board, sequence, after, lambda room: room.available >= claim.wanted)


def gives_way(victim: Sequence, head: Sequence) -> bool:
    return victim.priority > head.priority


def _end_of_class(sequence: Sequence) -> QueueKey:
    """The place in the queue behind all sequences that are as urgent."""
    return (sequence.priority, inf, 0)


def _fewest_victims(board: Board, sequence: Sequence, after: _After, fits: Fits) -> int | None:
    """Number of sequences to preempt, the least urgent first, until `sequence` fits. None: too few are less urgent."""
    running, victims = board.running, 0
    while not fits(after.room):
        victims += 1
        if victims > len(running) or not gives_way(running[-victims], sequence):
            return None
        after.without(running[-victims])
    return victims


def _preempt_last(board: Board, victims: int) -> bool:
    for _ in range(victims):
        board.preempt(board.running[-1])
    return victims > 0


class _After:
    """The room after the victims, sequences already leaving, and idle leases behind the sequence have left. Admission revokes
    those leases itself."""

    __slots__ = ("_board", "_decoding", "_head", "_hits", "_prefill_room", "_references", "room")

    def __init__(self, board: Board, head: Sequence, hits: Iterable[BlockId], prefill_room: PrefillRoom) -> None:
        """`hits`: blocks whose release is no gain, because the head would find them in the cache."""
        self._board = board
        self._head = head
        self._prefill_room = prefill_room
        self._decoding = board.decoding
        self._references: dict[BlockId, int] = {}
        "References that remain to each block of a leaving sequence."
        self._hits = frozenset(hits)
        free = board.slots.total - len(board.running)
        self.room = Room(prefill_room(self._decoding), free, board.cache.available, board.new_bytes_max)

    def without_leases(self, behind: QueueKey) -> None:
        board, priority = self._board, self._head.priority
        idle = board.idle_leases(behind)
        for lease in idle:
            self._release(lease.blocks)
        for sequence in board.idle_kept(behind):
            self._release(board.kept[sequence.request.id].blocks)
        if idle:
            self.room.expect(priority, board.reserved(priority) - board.reserve.blocks_of(idle, priority))

    def without(self, victim: Sequence) -> None:
        room = self.room
        room.slots_free += 1
        if victim.phase is Phase.DECODE:
            self._decoding -= 1
            room.prefill_left = self._prefill_room(self._decoding)
        self._release(victim.blocks)

    def _release(self, blocks: list[BlockId]) -> None:
        room, pool = self.room, self._board.cache.pool
        for block in blocks:
            left = self._references.get(block, pool.request_references(block)) - 1
            self._references[block] = left
            # No gain: a block that the head would hit is taken again, and a block that a move holds stays.
            room.available += not left and block not in self._hits and not pool.is_pinned(block)
