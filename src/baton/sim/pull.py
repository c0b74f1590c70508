"""A simulated pull: blocks of a peer's pool are read with their content of that moment, some early, some late, one of them
torn.

    now ----- even places, whole ----- odd places, first halves ----- odd places, second halves ----- the result

If the peer reassigns a block meanwhile the content differs: the copy is worthless unless the peer confirms afterwards that its
blocks were kept all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from baton.protocol.ids import PoolIncarnation
from baton.protocol.moves import BlockMove, MoveResult
from baton.sim.scenario import CacheFault


class Copier(Protocol):
    """The cache service that pulls (cache.py)."""

    def later(self, seconds: float, action: Callable[[], None], *, copies: bool = False) -> None: ...
    def map_peer(self, peer: str, incarnation: PoolIncarnation) -> list[bytearray] | None: ...
    def target(self, move: BlockMove) -> list[bytearray]: ...
    def done(self, move: BlockMove, result: MoveResult, fault: CacheFault | None) -> None: ...
    def saw(self, what: str) -> None: ...


class SimulatedPull:
    __slots__ = ("_fault", "_move", "_moved", "_service", "_whole")

    def __init__(self, service: Copier, move: BlockMove, fault: CacheFault | None) -> None:
        self._service = service
        self._move = move
        self._fault = fault
        self._whole = True
        "Whether all parts could be read so far."
        self._moved = 0

    def begin(self, seconds: float) -> None:
        allowed = self._move.seconds_max
        late = bool(allowed) and seconds > allowed
        later = self._service.later
        for part, share in enumerate((0.1, 0.5, 0.9)):
            if not late or seconds * share <= allowed:
                later(seconds * share, lambda part=part: self._read(part), copies=True)  # type: ignore[misc]
        ends = allowed if late else seconds
        later(ends, lambda: self._end(ends, late))

    def _read(self, part: int) -> None:
        move = self._move
        theirs, ours = self._service.map_peer(move.peer, move.peer_pool), self._service.target(move)
        if theirs is None or not self._whole:
            self._whole = False
            return
        for place in range(1 if part else 0, len(move.device), 2):
            source, target = theirs[move.peer_blocks[place]], ours[move.device[place]]
            middle = len(source) // 2
            piece = (slice(None), slice(0, middle), slice(middle, None))[part]
            target[piece] = source[piece]
        self._moved = len(move.device) if part == 2 or len(move.device) == 1 else 1

    def _end(self, seconds: float, late: bool) -> None:
        error = "timeout" if late else None if self._whole else "the peer cannot be read"
        moved = self._moved
        if self._fault is not None and self._fault.kind == "error":
            moved, error = moved // 2, "EIO"
        if self._fault is not None and self._fault.kind == "short":  # one rank has pulled half of what the others have
            moved //= 2
            for device in self._move.device[moved:]:
                block = self._service.target(self._move)[device]
                block[: len(block) // 2] = bytes(len(block) // 2)
        if moved < len(self._move.device):
            self._service.saw("a pull fell short")
        self._service.done(self._move, MoveResult(self._move.id, moved, seconds, error), self._fault)
