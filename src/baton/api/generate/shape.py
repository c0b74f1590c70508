"""What GenerateRoute asks of a dialect: a job from its body, and its words for what comes of it.

body -> Shape.job -> Job -> Generation -> pieces -> Shape.whole     one JSON object
                                              `---> Shape.events    a stream, event by event
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

from baton.api.errors import ApiError
from baton.api.front import Front
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job
from baton.api.http.auth import ApiCaller

Put = Callable[[bytes], None]


class Events(Protocol):
    """The events of one streamed answer. What it has to say it puts; it never waits."""

    def add(self, piece: Piece) -> None: ...

    def add_text(self, choice: int, text: str) -> None:
        """A piece that is text and nothing else: most are, so this is the short way."""
        ...

    def end(self) -> None:
        """Every choice has its finish."""
        ...


class NothingToGenerate(Exception):
    """Raised by Shape.job where the answer is known without the engine."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__()
        self.answer = answer


class Shape(ABC):
    """One answer. Made before the body is read, so that its id can be told in errors and used to abort."""

    kind: ClassVar[str]
    "What is answered: retries with an Idempotency-Key must be of the same kind."
    id_prefix: ClassVar[str]
    renders: ClassVar[bool] = False
    "Making the job renders a chat template."

    def __init__(self, front: Front) -> None:
        self.front = front
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())

    def error_event(self, body: dict[str, Any]) -> bytes | None:
        """The last event of a stream that failed. None: as the dialect has it."""
        return None

    @abstractmethod
    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        """Checks the body and makes the engine's requests of it. May run on another thread."""

    @abstractmethod
    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The answer to a request that does not stream; a piece for each choice."""

    @abstractmethod
    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        """The answer to one that does."""


def require_vectors(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """Of prompts that are pooled."""
    for piece in pieces:
        if not piece.embedding:
            how = piece.finish.value if piece.finish is not None else "lost"
            raise ApiError(503, f"the request ended before its vectors were there: {how}", code="no_vector")
    return pieces
