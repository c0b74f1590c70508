"""Pieces to OpenAI's chunks. A piece without text (half a character, perhaps a stop string) waits for one with some."""

from __future__ import annotations

from typing import Any, Protocol

from baton.api.dialect import event, one_line, text_frame
from baton.api.generate.generation import Generation
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job
from baton.api.generate.shape import Put
from baton.api.generate.usage import usage_json

DONE = b"data: [DONE]\n\n"


class ChunkShape(Protocol):
    """What differs between chats and completions (shape.py)."""

    def delta(self, job: Job, piece: Piece, *, first: bool) -> dict[str, Any]: ...

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, *, with_usage: bool) -> dict[str, Any]: ...


class Chunks:
    def __init__(self, shape: ChunkShape, job: Job, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._put = put
        self._job = job
        self._generation = generation
        self._waiting: dict[int, Piece] = {}
        self._begun: set[int] = set()
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        "By choice: what stands before and after the text in an event that has nothing else to say, as most have."

    def add_text(self, choice: int, text: str) -> None:
        frame = self._frames.get(choice)
        if frame is not None:
            before, after = frame
            self._put(before + one_line(text) + after)
            return
        self.add(Piece.of_text(choice, text))
        self._frames[choice] = text_frame(lambda mark: self._event(Piece.of_text(choice, mark)))

    def add(self, piece: Piece) -> None:
        if piece.choice in self._waiting:
            earlier = self._waiting.pop(piece.choice)
            earlier.add(piece)
            piece = earlier
        if not piece.worth_sending:
            self._waiting[piece.choice] = piece
            return
        for ordered in (piece,) if len(piece.parts) < 2 else piece.in_order():
            self._put(self._event(ordered))
            self._begun.add(piece.choice)

    def _event(self, piece: Piece) -> bytes:
        options = self._job.options.stream
        usage = _usage_so_far(piece) if options.continuous_usage else None
        choice = self._shape.delta(self._job, piece, first=piece.choice not in self._begun)
        return event(self._shape.chunk([choice], usage, with_usage=options.include_usage))

    def end(self) -> None:
        if self._job.options.stream.include_usage:
            self._put(event(self._shape.chunk([], usage_json(self._generation.usage), with_usage=True)))
        self._put(DONE)


def _usage_so_far(piece: Piece) -> dict[str, Any]:
    """Of this chunk's choice. What was cached is in the last one."""
    prompt, output = piece.usage
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
