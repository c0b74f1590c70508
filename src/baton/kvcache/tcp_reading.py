"""One read over TCP, in a thread: requests the pieces, and receives them straight into the pool's own memory where that is
shared memory. While a piece is verified the next one is received. Blocks count once their piece is verified: until then they
are the reader's to fill, and no step uses them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial

from baton.errors import PeerUnreadable
from baton.kvcache import tcp_session
from baton.kvcache.socket_threads import Beside
from baton.kvcache.tcp_session import TcpSession, piece_blocks
from baton.kvpool.block_bytes import BlockBytes, release
from baton.kvpool.copies import CopySpan
from baton.protocol.pool import ReadBlocks

Piece = Sequence[CopySpan]
"""Number of blocks with one digest."""


class Reading:
    """One read. `revoked`: the reason why the peer must not be read any more, or empty; checked before every piece, as
    `may_go_on` is. `joins_runs`: the peer has the capability `pieces`."""

    def __init__(
        self,
        session: TcpSession,
        runs: Sequence[CopySpan],
        target: BlockBytes,
        may_go_on: Callable[[], bool],
        revoked: Callable[[], str],
        *,
        block_bytes: int,
        joins_runs: bool,
    ) -> None:
        self._pieces = list(pieces_of(runs, piece_blocks(block_bytes), joined=joins_runs))
        self._session = session
        self._target = target
        self._may_go_on = may_go_on
        self._revoked = revoked
        self._joins_runs = joins_runs
        self._verifying: Future[None] | None = None
        self.whole = 0
        "Number of leading blocks that are complete."

    def run(self, beside: Beside) -> bool:
        """Read all pieces. False: the read may not continue. Raises PeerUnreadable, ProtocolError or OSError."""
        try:
            with self._session.stream.blocking():
                for request, pieces in _requests(self._pieces, joined=self._joins_runs):
                    self._session.write_message(request)
                    for piece in pieces:
                        if why := self._revoked():
                            raise PeerUnreadable(f"the peer must not be read any more: {why}")
                        if not self._may_go_on():
                            return False
                        self._receive(piece, beside)
        finally:
            if self._verifying is not None:
                wait([self._verifying])
        return True

    def _receive(self, piece: Piece, beside: Beside) -> None:
        placed = self._target.place([(span.target, span.blocks) for span in piece], self._session.spare)
        try:
            digest = self._session.read_piece(placed)
            if self._verifying is not None:
                self._verifying.result()
        except BaseException:
            release(placed)
            raise
        complete = partial(self._complete, piece, placed, digest)
        if piece is self._pieces[-1]:
            complete()
        else:
            self._verifying = beside(complete)

    def _complete(self, piece: Piece, placed: list[memoryview], digest: bytes) -> None:
        try:
            self._session.verify(placed, piece[0].source, digest)
            self._target.write([(span.target, span.blocks) for span in piece], placed)
        finally:
            release(placed)
        self.whole += sum(span.blocks for span in piece)


def pieces_of(runs: Sequence[CopySpan], blocks_max: int, *, joined: bool) -> Iterator[Piece]:
    """The runs in order, as pieces of at most `blocks_max` blocks. `joined`: a piece may have several runs."""
    piece, blocks = list[CopySpan](), 0
    for run in runs:
        for at in range(0, run.blocks, blocks_max):
            span = CopySpan(run.source + at, run.target + at, min(blocks_max, run.blocks - at))
            if piece and (not joined or blocks + span.blocks > blocks_max or len(piece) >= tcp_session.RUNS_MAX):
                yield piece
                piece, blocks = [], 0
            piece.append(span)
            blocks += span.blocks
    if piece:
        yield piece


def _requests(pieces: Sequence[Piece], *, joined: bool) -> Iterator[tuple[ReadBlocks, Sequence[Piece]]]:
    """Requests of at most RUNS_MAX runs, each with its pieces."""
    begin, runs = 0, 0
    for end in range(len(pieces) + 1):
        count = len(pieces[end]) if end < len(pieces) else tcp_session.RUNS_MAX + 1
        if runs + count > tcp_session.RUNS_MAX and begin < end:
            asked = pieces[begin:end]
            spans = tuple((span.source, span.blocks) for piece in asked for span in piece)
            yield ReadBlocks(spans, tuple(map(len, asked)) if joined else ()), asked
            begin, runs = end, 0
        runs += count
