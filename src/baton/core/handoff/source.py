"""The prefill end of a hand-off: an ordinary request whose blocks are kept for the instance that decodes it.

    Prefill -> in the queue -> computing    Offer   each time more leading blocks are whole (computed, found or loaded)
                            |
              its one token |-- is a stop, or it failed: an ordinary end, and nothing is kept
                            `-- is not: Emit of the token, then Offer(last), no Ended. The blocks stay for keep_seconds

    Release -> Released(kept)     kept: every block was held from its offer until now, so the copy is what was computed

Kept blocks are a promise that may be broken at any time: the copying instance asks at the end (PinnedBlocks in request.py). The
promise is broken when time is up, when blocks are short (Board.revoke_lease), when the pool is lost or not trusted, and when
the root of the keys changes.
"""

from __future__ import annotations

from baton.config import TierConfig
from baton.core.effects import Effect
from baton.core.engine.board import Board
from baton.core.engine.request import PinnedBlocks, Sequence
from baton.protocol.handoff import Offer, Release, Released
from baton.protocol.ids import Instant


class Source:
    __slots__ = ("_board", "_config", "_outgoing")

    def __init__(self, config: TierConfig, board: Board, outgoing: list[Effect]) -> None:
        self._board = board
        self._config = config
        self._outgoing = outgoing

    def keep(self, sequence: Sequence, keep_seconds: float) -> None:
        """Offer the blocks that the sequence computes from now on."""
        sequence.kept = PinnedBlocks(sequence, keep_seconds)
        self._board.kept[sequence.request.id] = sequence.kept

    # Offers

    def offer(self, now: Instant) -> None:
        """Offer the blocks that became whole in this event; called at its end."""
        board = self._board
        grown, board.to_offer = board.to_offer, {}
        for kept in grown.values():
            sequence = kept.sequence
            if not kept.finished and not kept.void and sequence.published > len(kept.blocks):
                board.keep_blocks(kept, sequence.published)
                self._offer(kept, len(kept.blocks) * board.block_size)
        ended, board.handed_over = board.handed_over, []
        for kept in ended:
            if not kept.void:
                board.kept_until.set(kept, Instant(now + kept.keep_seconds))
            self._offer(kept, kept.tokens, last=True)
            if kept.sequence.request.id in board.groups:
                board.forget(kept.sequence.request.id)
        if ended:
            self._bound()

    def _offer(self, kept: PinnedBlocks, tokens: int, *, last: bool = False) -> None:
        sequence, place = kept.sequence, kept.offered
        kept.offered = len(kept.blocks)
        usage = (sequence.cached_tokens, sequence.host_tokens, sequence.storage_tokens) if last else ()
        blocks = tuple(kept.blocks[place:])
        pool, first = self._board.pool.offered, place if blocks else 0
        offer = Offer(sequence.request.id, sequence.attempt, pool, first, blocks, tokens, last, *usage)
        self._outgoing.append(offer)

    def _bound(self) -> None:
        """Keep at most `kept_max` prompts: the one that expires next is dropped first."""
        while len(self._board.kept_until) > self._config.kept_max:
            self._board.drop_kept(self._board.kept_until.first())

    # Release

    def asked(self, message: Release) -> None:
        """Release the blocks, because the copy is complete, and answer whether they were kept all the time."""
        kept = self._board.kept.get(message.request)
        mine = kept is not None and kept.finished and kept.sequence.attempt == message.attempt
        if kept is not None and mine:
            self._board.drop_kept(kept)
        self._board.stats.not_kept += not mine
        self._outgoing.append(Released(message.request, message.attempt, mine))

    def void(self) -> None:
        """Drop all kept blocks: the pool was replaced or is not trusted, or the drain has timed out."""
        for kept in list(self._board.kept.values()):
            self._board.drop_kept(kept)

    def expire(self, now: Instant) -> None:
        for kept in self._board.kept_until.due(now):
            self._board.drop_kept(kept)
