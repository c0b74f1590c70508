"""What the answers of OpenAI's two older endpoints have in common. chat.py and completions.py fill in the rest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job
from baton.api.generate.shape import Events, Put, Shape
from baton.api.generate.usage import usage_json
from baton.api.openai.chunks import Chunks
from baton.protocol.request import FinishReason


class OpenAIShape(Shape):
    object_chunk: ClassVar[str]
    "`kind` is the object of a whole answer."

    @abstractmethod
    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        """One entry of `choices` of a whole answer."""

    @abstractmethod
    def delta(self, job: Job, piece: Piece, *, first: bool) -> dict[str, Any]:
        """One entry of `choices` of a chunk. `first`: nothing of this choice has been sent yet."""

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return {
            **self._head(self.kind),
            "choices": [self.choice(job, piece) for piece in pieces],
            "usage": usage_json(usage),
        }

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        return Chunks(self, job, generation, put)

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, *, with_usage: bool) -> dict[str, Any]:
        """`with_usage`: the client asked for usage, so every chunk has the key, as OpenAI does it."""
        chunk = {**self._head(self.object_chunk), "choices": choices}
        if with_usage:
            chunk["usage"] = usage
        return chunk

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.front.model.name,
            "system_fingerprint": self.front.model.fingerprint,
        }


def finish_word(piece: Piece) -> str | None:
    """OpenAI's words and no other: the enums of typed clients fail on one that they do not know (`ended_by` has it then)."""
    word = piece.known_finish
    if word is FinishReason.STOP and piece.called:
        return "tool_calls"
    return None if word is None else word.value
