"""Blocks of a prompt that was computed for another instance: they stay as they are until that one has copied them.

    sequence    computing | preempted | computing | ended
    its blocks  |--------|             |---------|
    kept        |---- grows with what is computed ----|---- for keep_seconds ----| released, lapsed or revoked

The board has them (Board.kept), the hand-off decides about them (handoff/source.py). Giving them up is always allowed, because
whoever has copied them asks, before it believes its copy, whether they were kept all the time.
"""

from __future__ import annotations

from baton.core.engine.request import Sequence
from baton.protocol.ids import BlockId, Instant


class Kept:
    __slots__ = ("blocks", "deadline", "finished", "keep_seconds", "offered", "sequence", "tokens", "void")

    def __init__(self, sequence: Sequence, keep_seconds: float) -> None:
        self.sequence = sequence
        "That computes them. It may have ended."
        self.keep_seconds = keep_seconds
        self.blocks: list[BlockId] = []
        "A leading run of its table, each with a reference of its own."
        self.offered = 0
        "How many of them were offered."
        self.tokens = 0
        "Of an ended sequence: how many tokens the blocks are about."
        self.finished = False
        "The sequence has ended."
        self.void = False
        "They were given up."
        self.deadline: Instant | None = None
        "Of a finished one: so long they stay."
