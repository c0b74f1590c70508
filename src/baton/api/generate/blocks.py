"""Pieces as blocks, for the dialects whose answer is a list of typed blocks (Anthropic's messages, the Responses API).

    parts       reasoning "a"   reasoning "b"   text "c"   call 0 "{"   call 0 "}"   text "d"
    blocks      open    more    more    close   open more  close  open  more  more   close ...

A block is open until another one begins, or the answer ends. Only one block is open at a time. A whole answer has one part per
block (Piece.add), so it has the same blocks as its stream, however that was split.
"""

from __future__ import annotations

from typing import Literal, Protocol

from baton.api.generate.output import Piece
from baton.text.parsers.base import Content, Part, ToolCallDelta

BlockKind = Literal["reasoning", "text", "call"]


class BlockWriter(Protocol):
    def open(self, part: Part) -> None:
        """Begin a block. `part`: its first part. For a call it has id and name."""

    def more(self, part: Part) -> None:
        """Add a part to the block. Called for every part, the first included."""

    def close(self, kind: BlockKind) -> None: ...


class Blocks:
    def __init__(self, writer: BlockWriter) -> None:
        self._writer = writer
        self._open: tuple[BlockKind, int] | None = None

    def add(self, piece: Piece) -> None:
        for part in piece.parts:
            block = (kind_of(part), part.index if isinstance(part, ToolCallDelta) else 0)
            if self._open != block:
                self.end()
                self._writer.open(part)
                self._open = block
            self._writer.more(part)

    def end(self) -> None:
        if self._open is not None:
            self._writer.close(self._open[0])
        self._open = None


def kind_of(part: Part) -> BlockKind:
    if isinstance(part, ToolCallDelta):
        return "call"
    return "text" if isinstance(part, Content) else "reasoning"


def text_of(part: Part) -> str:
    return part.arguments if isinstance(part, ToolCallDelta) else part.text
