"""The interface of a dialect to GenerateRoute: a job from the body, and the answer in the dialect's form.

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
    """The events of one streamed answer, passed to `put`. Its methods never wait."""

    def add(self, piece: Piece) -> None: ...

    def add_text(self, choice: int, text: str) -> None:
        """Adds a piece of plain text, as most are: the fast path."""
        ...

    def end(self) -> None:
        """Called when every choice has finished."""
        ...


class NothingToGenerate(Exception):
    """Raised by Shape.job if the answer is known without the engine."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__()
        self.answer = answer


class Shape(ABC):
    """One answer. Created before the body is read, so that errors and aborts can use its id."""

    kind: ClassVar[str]
    "Kind of answer. A retry with an Idempotency-Key must have the same kind."
    id_prefix: ClassVar[str]
    renders: ClassVar[bool] = False
    "Whether `job` renders a chat template."

    def __init__(self, front: Front) -> None:
        self.front = front
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())

    def error_event(self, body: dict[str, Any]) -> bytes | None:
        """The last event of a failed stream. None: the dialect's default."""
        return None

    @abstractmethod
    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        """Checks the body and builds the engine's requests. May run on another thread."""

    @abstractmethod
    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The answer to a request without streaming; `pieces` has one per choice."""

    @abstractmethod
    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        """The events of a streamed answer."""


def require_vectors(pieces: Sequence[Piece]) -> Sequence[Piece]:
    """The pieces, if each has its embedding; else raises."""
    for piece in pieces:
        if not piece.embedding:
            how = piece.finish.value if piece.finish is not None else "lost"
            raise ApiError(503, f"the request ended before its vectors were there: {how}", code="no_vector")
    return pieces
