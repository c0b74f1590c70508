"""Output for clients at the end of an event: one object per event, however many tokens."""

from __future__ import annotations

from baton.core.engine.request import Sequence
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import Begun, Emit, Ended, EndError, TokenRow
from baton.protocol.request import FinishReason
from baton.protocol.step import RowLogprobs


class Outbox:
    __slots__ = ("begun", "ended", "logprobs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[TokenRow] = []
        self.begun: list[Begun] = []
        self.ended: list[Ended] = []
        self.logprobs: list[tuple[RequestId, int, RowLogprobs]] = []

    def begin(self, sequence: Sequence, now: Instant) -> None:
        """Report the cached part of the prompt to the client, with the first token."""
        cached = (sequence.cached_tokens, sequence.host_tokens, sequence.storage_tokens)
        seconds = now - sequence.admitted_at
        self.begun.append(Begun(sequence.request.id, sequence.attempt, sequence.index, *cached, seconds))

    def end(self, sequence: Sequence, reason: FinishReason, error: EndError | None, detail: str) -> None:
        """Report the end of a sequence, with its usage."""
        self.ended.append(
            Ended(
                request=sequence.request.id,
                index=sequence.index,
                reason=reason,
                prompt_tokens=sequence.prompt_tokens,
                cached_tokens=sequence.cached_tokens,
                output_tokens=sequence.outputs,
                preemptions=sequence.preemptions,
                error=error,
                detail=detail,
                attempt=sequence.attempt,
                host_tokens=sequence.host_tokens,
                storage_tokens=sequence.storage_tokens,
                drafted_tokens=sequence.drafted_tokens,
                accepted_tokens=sequence.accepted_tokens,
            )
        )

    def flush(self) -> Emit | None:
        if not self.tokens and not self.ended and not self.logprobs:
            return None
        emit = Emit(self.tokens, self.ended, self.logprobs, self.begun)
        self.tokens, self.ended, self.logprobs, self.begun = [], [], [], []
        return emit
