"""One request on its way through the front: who is told its deltas, what it has been told, and what is still owed.

What was told is kept, so that another engine can go on from there (a replay). A position is taken once, and only from the
attempt that is the present one.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from msgspec.structs import replace

from baton.api.generate.engine_client import Delta
from baton.errors import InvariantBroken
from baton.protocol.output import Begun, Ended
from baton.protocol.request import FinishReason, GenerateRequest
from baton.protocol.step import RowLogprobs, TokenLogprob

TIMEOUT_SECONDS_MIN = 0.001
"""A request whose time was over while there was no engine is ended by the next one, which also knows the usage."""


class Stream:
    __slots__ = ("_begun", "_cached", "_take", "_unwanted", "attempt", "done", "embedding", "lost", "open", "prompt", "request")

    def __init__(self, request: GenerateRequest, take: Callable[[Delta], None], now: float) -> None:
        self.request = request
        self._take = take
        self._begun = now
        self.attempt = request.attempt
        self.open: dict[int, array[int]] = {index: array("i") for index in request.wanted}
        "The tokens told of each sequence that has not ended."
        self._cached: dict[int, Begun] = {}
        "What was told of the cached part of the prompt, with the first token of each open sequence."
        self._unwanted: dict[int, FinishReason] = {}
        "Sequences that were aborted, and whose end was not told yet."
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        "All has ended, or nothing more is told: refused, the engine gone, or an error of whoever takes the deltas."
        self.lost = False
        "The engine does not have the request (any more): there is nothing to abort."
        self.embedding = b""
        "The pooled prompt, where it was asked for: told with whatever is told after it."
        self.prompt: list[TokenLogprob | None] | None = None
        "Told once, with sequence 0; the first token has nothing before it."
        if request.sampling.prompt_logprobs is not None:
            self.prompt = [None] * len(request.prompt)

    def takes(self, attempt: int, index: int, position: int, tokens: list[int]) -> list[int]:
        """Those of the tokens, the first of which has this position, that the client does not have. They count as told."""
        told = self.open.get(index)
        if told is None or attempt != self.attempt:
            return []
        known = len(told) - position
        if known < 0:
            if not self.done.done():
                self.done.set_exception(InvariantBroken(f"token {position} of a sequence came after {len(told)} tokens"))
            return []
        fresh = tokens[known:] if known else tokens
        told.extend(fresh)
        return fresh

    def begins(self, begun: Begun) -> bool:
        """Is its client to be told how much of the prompt was cached? Once for each sequence."""
        if begun.index in self._cached or begun.index not in self.open or begun.attempt != self.attempt:
            return False
        self._cached[begun.index] = begun
        return True

    @property
    def untouched(self) -> bool:
        """Nothing was told."""
        return len(self.open) == len(self.request.wanted) and not any(self.open.values())

    def ends(self, ended: Ended) -> bool:
        return ended.attempt == self.attempt and ended.index in self.open

    def tell(self, delta: Delta) -> None:
        if self.done.done():
            return
        delta.embedding = self.embedding
        if self.prompt is not None and delta.index == 0:
            delta.prompt_logprobs, self.prompt = self.prompt, None
        if delta.ended is not None:
            del self.open[delta.index]
            delta.ended = self._as_begun(delta.ended)
        try:
            self._take(delta)
        except Exception as error:
            self.done.set_exception(error)
            return
        if delta.ended is not None and not self.open and not self.done.done():
            self.done.set_result(None)

    def _as_begun(self, ended: Ended) -> Ended:
        """The end of a replay counts what the replay found cached; its client was told what the first attempt found."""
        begun = self._cached.pop(ended.index, None)
        if begun is None:
            return ended
        cached, host, storage = begun.cached_tokens, begun.host_tokens, begun.storage_tokens
        return replace(ended, cached_tokens=cached, host_tokens=host, storage_tokens=storage)

    def lose(self, why: Exception) -> None:
        self.lost = True
        if not self.done.done():
            self.done.set_exception(why)

    def add_prompt_logprobs(self, row: RowLogprobs) -> None:
        """A prompt that was computed twice comes twice: places are written, not appended."""
        self.embedding = row.embedding or self.embedding
        if self.prompt is not None:
            for place, entry in enumerate(row.prompt, row.prompt_from):
                if place < len(self.prompt):
                    self.prompt[place] = entry

    # Without an engine

    def unwant(self, index: int | None, reason: FinishReason) -> None:
        """An abort was asked for. The engine tells of the end, unless it is lost before it does."""
        for each in self.open if index is None else (index,):
            self._unwanted.setdefault(each, reason)

    def end_unwanted(self) -> None:
        """There is no engine that would tell of these ends, and no other one needs to know of them."""
        unwanted, self._unwanted = self._unwanted, {}
        for index, reason in unwanted.items():
            if (told := self.open.get(index)) is not None:
                prompt = len(self.request.prompt)
                self.tell(
                    Delta(index, ended=Ended(self.request.id, index, reason, prompt, 0, len(told), 0, attempt=self.attempt))
                )

    def replay(self, now: float) -> GenerateRequest:
        """The next attempt: what is still owed, with all that was told of it."""
        first, age = self.request, now - self._begun
        self.attempt += 1
        sampling, timeout = first.sampling, first.timeout_seconds
        return replace(
            first,
            attempt=self.attempt,
            indices=tuple(self.open),
            outputs=tuple(tuple(told) for told in self.open.values()),
            age_seconds=first.age_seconds + age,
            timeout_seconds=None if timeout is None else max(timeout - age, TIMEOUT_SECONDS_MIN),
            sampling=sampling if self.prompt is not None else replace(sampling, prompt_logprobs=None),
        )
