"""Pieces as blocks, for the dialects whose answer is a list of typed blocks (Anthropic's messages, the Responses API).

    pieces      reasoning "a"   reasoning "b", text "c"          call 0 "{"        call 0 "}"
    blocks      open    more    more  close   open  more  close  open  more        more       close

A block is open until another one begins, or the answer ends. One block at a time is open.
"""

from __future__ import annotations

from typing import Literal, Protocol

from baton.api.generate.output import Piece
from baton.text.parsers.base import ToolCallDelta

BlockKind = Literal["reasoning", "text", "call"]


class BlockWriter(Protocol):
    def open(self, kind: BlockKind, call: ToolCallDelta | None) -> None:
        """`call`: with its id and name, where the block is one."""

    def more(self, kind: BlockKind, text: str) -> None: ...

    def close(self, kind: BlockKind) -> None: ...


class Blocks:
    def __init__(self, writer: BlockWriter) -> None:
        self._writer = writer
        self._open: tuple[BlockKind, int] | None = None

    def add(self, piece: Piece) -> None:
        if piece.reasoning:
            self._more("reasoning", piece.reasoning)
        if piece.text:
            self._more("text", piece.text)
        for call in piece.tool_calls:
            self._more("call", call.arguments, call)

    def end(self) -> None:
        if self._open is not None:
            self._writer.close(self._open[0])
        self._open = None

    def _more(self, kind: BlockKind, text: str, call: ToolCallDelta | None = None) -> None:
        block = (kind, call.index if call is not None else 0)
        if self._open != block:
            self.end()
            self._writer.open(kind, call)
            self._open = block
        if text:
            self._writer.more(kind, text)
