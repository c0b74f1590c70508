"""The sink of one request: passes deltas to the API as they arrive, and completes when all sequences have ended.

The ledger tracks positions, attempts and replays (core/delivery/ledger.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from baton.protocol.output import Begun, Delta, Ended
from baton.protocol.request import GenerateRequest
from baton.protocol.step import RowLogprobs, TokenLogprob


class Stream:
    __slots__ = ("_cached", "_embedding", "_prompt", "_take", "done", "offered_at", "open")

    def __init__(self, request: GenerateRequest, take: Callable[[Delta], None]) -> None:
        self._take = take
        self.open = len(request.wanted)
        "Sequences that have not ended."
        self._cached: dict[int, Begun] = {}
        "Cached part of the prompt as delivered with the first token of each sequence."
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        "Completes when all sequences have ended, or nothing more is delivered: refused, engine lost, or an error of `take`."
        self._embedding = b""
        "The pooled prompt, if the request wants it: delivered with every later delta."
        self._prompt: list[TokenLogprob | None] | None = None
        "Log-probabilities of the prompt, delivered once with sequence 0; the first token has none."
        if request.sampling.prompt_logprobs is not None:
            self._prompt = [None] * len(request.prompt)
        self.offered_at: float | None = None
        "Time at which the whole prompt was computed for a hand-off; routed requests only."

    def deliver(self, delta: Delta) -> None:
        if self.done.done():
            return
        delta.embedding = self._embedding
        if self._prompt is not None and delta.index == 0:
            delta.prompt_logprobs, self._prompt = self._prompt, None
        if delta.begun is not None:
            self._cached[delta.index] = delta.begun
        if delta.ended is not None:
            self.open -= 1
            delta.ended = self._as_begun(delta.ended)
        try:
            self._take(delta)
        except Exception as error:
            self.done.set_exception(error)
            return
        if not self.open and not self.done.done():
            self.done.set_result(None)

    def _as_begun(self, ended: Ended) -> Ended:
        """Report the cached tokens of the first attempt: a replay's end counts those that the replay found."""
        begun = self._cached.pop(ended.index, None)
        if begun is None:
            return ended
        cached, host, storage = begun.cached_tokens, begun.host_tokens, begun.storage_tokens
        return replace(ended, cached_tokens=cached, host_tokens=host, storage_tokens=storage)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def add_prompt(self, row: RowLogprobs) -> None:
        """Add part of the prompt. A prompt that was computed twice arrives twice: entries are written, not appended."""
        self._embedding = row.embedding or self._embedding
        if self._prompt is not None:
            for place, entry in enumerate(row.prompt, row.prompt_from):
                if place < len(self._prompt):
                    self._prompt[place] = entry
