"""What the answers of both endpoints have in common. chat.py and completions.py fill in the rest."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from baton.api.front import Front
from baton.api.generate.generation import Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job
from baton.api.http.auth import Caller
from baton.protocol.request import FinishReason


class Shape(ABC):
    """One answer. Made before the body is read, so that its id can be told in errors and used to abort."""

    id_prefix: ClassVar[str]
    object_whole: ClassVar[str]
    object_chunk: ClassVar[str]
    renders: ClassVar[bool] = False
    "Making the job renders a chat template."

    def __init__(self, front: Front) -> None:
        self.front = front
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self._created = int(time.time())

    @abstractmethod
    def job(self, body: dict[str, Any], caller: Caller) -> Job:
        """Checks the body and makes the engine's requests of it. May run on another thread."""

    @abstractmethod
    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        """One entry of `choices` of a whole answer."""

    @abstractmethod
    def delta(self, job: Job, piece: Piece, *, first: bool) -> dict[str, Any]:
        """One entry of `choices` of a chunk. `first`: nothing of this choice has been sent yet."""

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return {
            **self._head(self.object_whole),
            "choices": [self.choice(job, piece) for piece in pieces],
            "usage": usage_json(usage),
        }

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
            "created": self._created,
            "model": self.front.model.name,
            "system_fingerprint": self.front.model.fingerprint,
        }


def usage_json(usage: Usage) -> dict[str, Any]:
    told: dict[str, Any] | None = None if usage.cached_tokens is None else {"cached_tokens": usage.cached_tokens}
    below = usage.host_tokens + usage.storage_tokens
    if told is not None and below:
        device = told["cached_tokens"] - below
        told["cached_tokens_by_tier"] = {"device": device, "host": usage.host_tokens, "storage": usage.storage_tokens}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": told,
    }


def finish_word(piece: Piece) -> str | None:
    """stop, length and tool_calls are OpenAI's; abort (someone ended it) and timeout (its deadline did) tell what happened, as
    in vLLM."""
    if piece.finish is FinishReason.STOP and piece.called:
        return "tool_calls"
    return None if piece.finish is None else piece.finish.value
