"""Which sequence is preempted, exactly as docs/internals/protocol.md section 5. board.py changes the state.

1. The victim is the tail of `running`: the least urgent, then the youngest. The oldest of the most urgent class is never it.
2. `Board.preempt`: PREEMPTING, blocks given up, slot still taken, drop in the next plan. Tokens in flight are appended as they
arrive.
3. The worker acknowledges the drop within that step, after the slot's last token, even if the batch is empty.
4. `Board.acknowledge`: only now WAITING, at its old place in the queue. Tokens to prefill (prompt + outputs) are frozen at
admission.
5. An end while PREEMPTING (a stop token in flight, an abort) makes it CLOSING; the same drop serves for both.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.engine.admission import Room, shortage
from baton.core.engine.board import Board
from baton.core.engine.phase import Phase
from baton.core.engine.request import Sequence
from baton.protocol.ids import BlockId

PrefillRoom = Callable[[int], int]
"""Room for prompt tokens in a step, by the number of sequences that decode in it."""


def preempt_for_head(board: Board, room_for: Callable[[Sequence], PrefillRoom | None]) -> bool:
    """Preempt less urgent sequences for the head of the queue: as few as let it in, and none if all would not suffice.

    Equal urgency never gives way, so two of a class cannot preempt each other in turn. `room_for` returns None if running
    prompts that are as urgent use up the prompt tokens, whichever others leave.
    """
    running, head = board.running, board.waiting.head()
    if head is None or not running or not gives_way(running[-1], head):
        return False
    prefill_room = room_for(head)
    if prefill_room is None:
        return False
    after = _After(board, head, prefill_room)
    victims = 0
    while shortage(head, after.room, board) is not None:
        victims += 1
        if victims > len(running) or not gives_way(running[-victims], head):
            return False
        after.without(running[-victims])
    for _ in range(victims):
        board.preempt(running[-1])
    return victims > 0


def gives_way(victim: Sequence, head: Sequence) -> bool:
    return victim.priority > head.priority


class _After:
    """The room after the victims, sequences already leaving, and idle leases behind the head have left. Admission revokes those
    leases itself."""

    __slots__ = ("_board", "_decoding", "_hits", "_prefill_room", "_references", "room")

    def __init__(self, board: Board, head: Sequence, prefill_room: PrefillRoom) -> None:
        self._board = board
        self._prefill_room = prefill_room
        self._decoding = board.decoding
        self._references: dict[BlockId, int] = {}
        "References that remain to each block of a leaving sequence."
        self._hits = frozenset(board.cache.blocks_of(head.keys[: board.need(head).hit]))
        free = board.slots.total - len(board.running)
        self.room = Room(prefill_room(self._decoding), free, board.cache.available, board.new_bytes_max)
        idle = board.idle_leases(head.order)
        for lease in idle:
            self._release(lease.blocks)
        for sequence in board.idle_kept(head.order):
            self._release(board.kept[sequence.request.id].blocks)
        if idle:
            reserved = board.reserved(head.priority) - board.reserve.blocks_of(idle, head.priority)
            self.room.expect(head.priority, reserved)

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
            # No gain: a block that the head itself would hit is taken again, and a block that a move holds stays.
            room.available += not left and block not in self._hits and not pool.is_pinned(block)
