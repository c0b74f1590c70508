"""Verify the board's state from scratch: holders of blocks, counters, queues. Invariant numbers are those of
docs/internals/reliability.md."""

from __future__ import annotations

from baton.core.engine.board import Board
from baton.core.engine.phase import AWAY, ON_WORKER, OPEN, Phase
from baton.core.engine.request import Sequence, by_urgency
from baton.errors import InvariantBroken
from baton.protocol.ids import BlockId


def check_board(board: Board) -> None:
    board.cache.pool.check(_held(board), board.tiers.pinned())
    board.tiers.check()
    board.cache.check()
    if board.digest is not None:
        board.digest.check(board.cache.marked_keys(), board.tiers.host.index())
    _check_sequences(board)


def check_part(board: Board, begin: int, end: int) -> None:
    """Check blocks `begin` to `end` only, and everything that grows with requests: an engine calls this while it has none."""
    board.cache.pool.check_part(begin, end, _held(board), board.tiers.pinned())
    board.tiers.check_part(begin, end)
    board.cache.check_part(begin, end)
    _check_sequences(board)


def _held(board: Board) -> dict[BlockId, int]:
    """Number of block table entries that name each block."""
    held: dict[BlockId, int] = {}
    tables = [holder.blocks for holder in (*board.running, *board.leased)] + [kept.blocks for kept in board.kept.values()]
    for table in tables:
        for block in table:
            held[block] = held.get(block, 0) + 1
    return held


def _check_sequences(board: Board) -> None:
    board.slots.check()
    _check_running(board)
    for sequence in board.running:
        _check_table(board, sequence)
    _check_leases(board)
    _check_kept(board)
    _check_queue(board)
    _check_away(board)


def _check_running(board: Board) -> None:
    """25: `running` lists the sequences on the worker, in order. 30: the number of decoding sequences is right."""
    working = [s for s in board.slots.slot_owners if s is not None and s.phase in ON_WORKER]
    if sorted(working, key=by_urgency) != board.running:
        raise InvariantBroken("running is not what has a slot and computes, most urgent first", invariant=25)
    if sum(s.phase is Phase.DECODE for s in working) != board.decoding:
        raise InvariantBroken(f"{board.decoding} sequences are counted as decoding", invariant=30)


def _check_leases(board: Board) -> None:
    """25: without a slot, only a waiting or loading sequence holds blocks, and then all that it needs."""
    for sequence in board.leased:
        enough = sequence.capacity >= len(sequence.tokens) and sequence.capacity == len(sequence.blocks) * board.block_size
        if sequence.phase not in (Phase.WAITING, Phase.LOADING) or not enough or sequence.slot >= 0:
            raise InvariantBroken(f"{sequence!r} has a lease that it should not have", invariant=25)


def _check_kept(board: Board) -> None:
    """25: kept blocks belong to a sequence that computes them, or has ended with all of them computed and a deadline."""
    for request, kept in board.kept.items():
        sequence = kept.sequence
        if sequence.request.id != request or (kept.void and (kept.blocks or kept.finished)):
            raise InvariantBroken(f"blocks of {request} are kept that were given up", invariant=25)
        if kept.finished != (sequence.phase not in OPEN) or (sequence.kept is kept) == kept.finished:
            raise InvariantBroken(f"{sequence!r} and the blocks that are kept of it disagree about its end", invariant=25)


def _check_away(board: Board) -> None:
    """25: `away` lists exactly the sequences that were preempted and do not run."""
    away = [s for group in board.groups.values() for s in group.sequences if s.preemptions and s.phase in AWAY]
    listed = [sequence for sequence in board.away if sequence.phase in AWAY]
    if sorted(away, key=by_urgency) != sorted(listed, key=by_urgency):
        raise InvariantBroken(f"{len(away)} are preempted and do not run, {len(listed)} are listed", invariant=25)


def _check_table(board: Board, sequence: Sequence) -> None:
    """6: no hole, no duplicate, long enough. 30: computed <= planned <= known. 4: nothing shared is written. 66: nothing counts
    as computed or published behind the last known token: KV of a refused draft may be there."""
    pool, size = board.cache.pool, board.block_size
    known, blocks = len(sequence.tokens), sequence.blocks
    if len(dict.fromkeys(blocks)) != len(blocks) or sequence.capacity != len(blocks) * size:
        raise InvariantBroken(f"{sequence!r}: a block twice in its table, or a wrong capacity", invariant=6)
    needed = max(sequence.scheduled, sequence.target)
    if sequence.scheduled > sequence.capacity or sequence.capacity - size >= needed + board.drafts_ahead:
        raise InvariantBroken(f"{sequence!r}: {len(blocks)} blocks for {sequence.scheduled} tokens", invariant=6)
    planned = sequence.in_flight + sequence.drafts
    if not sequence.computed <= sequence.scheduled <= known + planned:
        raise InvariantBroken(f"{sequence!r}: {sequence.scheduled} tokens planned", invariant=30)
    if sequence.phase is Phase.DECODE and sequence.scheduled != known + planned - 1:
        raise InvariantBroken(f"{sequence!r}: {sequence.in_flight} in flight, {sequence.drafts} drafts", invariant=31)
    if not sequence.published * size <= sequence.computed < max(known, 1):
        raise InvariantBroken(f"{sequence!r}: {sequence.published} blocks are published", invariant=66)
    for block in blocks[sequence.computed // size :]:
        if pool.request_references(block) != 1 or pool.is_cached(block):
            raise InvariantBroken(f"{sequence!r}: block {block} is shared and will be written", invariant=4)


def _check_queue(board: Board) -> None:
    """25 for waiting sequences, and the counters of the queue (49)."""
    opened = [s for group in board.groups.values() for s in group.sequences if s.phase in OPEN]
    board.waiting.check([s for s in opened if s.phase is Phase.WAITING], board.leased)
    if sum(s.phase is Phase.LOADING for s in opened) != board.loading:
        raise InvariantBroken(f"{board.loading} are counted as loading", invariant=25)
    queued = [s for s in opened if s.queued]
    if (len(queued), sum(s.prompt_tokens for s in queued)) != (board.queued, board.queued_tokens):
        raise InvariantBroken(f"{len(queued)} queued, {board.queued} counted", invariant=49)
