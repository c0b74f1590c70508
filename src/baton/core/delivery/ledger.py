"""The ledger of one request: the tokens that its client has received, and the sequences that are still open.

Each position is accepted once, and only from the current attempt. All delivered tokens are kept, so that another engine or
instance can continue from there (a replay). A routed request inherits the ledger (core/cluster/routed_request.py); the front of
one engine owns it (core/delivery/front.py).
"""

from __future__ import annotations

from array import array
from typing import Any, Final

from msgspec.structs import replace

from baton.core.repetition import ends_by_repetition
from baton.protocol.ids import Instant
from baton.protocol.output import Ended, TokenRow, tokens_of
from baton.protocol.request import FinishReason, GenerateRequest

TIMEOUT_SECONDS_MIN: Final = 0.001
"""Timeout sent for a request whose time has run out: the instance ends it at once and reports the usage."""


class Ledger:
    __slots__ = ("attempt", "begun", "closed_tokens", "id", "open", "request", "sink", "withdrawn")

    def __init__(self, request: GenerateRequest, now: Instant, sink: Any = None) -> None:
        """`sink`: receives the answer from the shell. Opaque to the ledger."""
        self.request = request
        self.id = request.id
        self.begun = now
        "Arrival time of the request."
        self.attempt = request.attempt
        self.open: dict[int, array[int]] = {index: array("i", request.delivered(index)) for index in request.wanted}
        "Delivered tokens of each sequence that has not ended."
        self.closed_tokens = 0
        "Number of delivered tokens of all sequences that have ended."
        self.withdrawn: dict[int, FinishReason] = {}
        "Sequences that the engine was asked to end and has not ended."
        self.sink = sink

    # Queries

    @property
    def delivered_tokens(self) -> int:
        """Number of delivered tokens of all sequences that have not ended."""
        return sum(map(len, self.open.values()))

    @property
    def has_tokens(self) -> bool:
        """Whether the client has received a token: other weights would continue the answer differently. A sequence that was
        withdrawn before its first token is no part of the answer."""
        return self.closed_tokens + self.delivered_tokens > sum(map(len, self.request.outputs))

    @property
    def untouched(self) -> bool:
        """Whether the client has received nothing, no end either: then the request can be refused."""
        return len(self.open) == len(self.request.wanted) and not self.has_tokens

    @property
    def prompt_owed(self) -> bool:
        """Whether prompt log-probabilities are wanted and not delivered: they go with the first token of sequence 0."""
        return self.request.sampling.prompt_logprobs is not None and 0 in self.open and not self.open[0]

    # Tokens

    def misses(self, row: TokenRow) -> bool:
        """Whether a token before this row of the current attempt has not arrived."""
        given = self.open.get(row[2])
        return given is not None and row[3] > len(given)

    def take(self, row: TokenRow) -> TokenRow | None:
        """Return the row from its first new token on, and count these tokens as delivered. None: no token is new."""
        request, attempt, index, position, tokens = *row[:4], tokens_of(row[4])
        given = self.open.get(index)
        if given is None or position + len(tokens) <= len(given):
            return None
        if position < len(given):
            tokens = tokens[len(given) - position :]
            row = (request, attempt, index, len(given), tokens)
        given.extend(tokens)
        return row

    # Replay

    def replay(self, now: Instant) -> GenerateRequest:
        """Build the current attempt: all open sequences, with their delivered tokens."""
        first, age = self.request, now - self.begun
        timeout = first.timeout_seconds
        outputs = tuple(map(tuple, self.open.values())) if self.delivered_tokens else ()
        sampling = first.sampling
        if sampling.prompt_logprobs is not None and not self.prompt_owed:
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            first,
            attempt=self.attempt,
            indices=tuple(self.open) if len(self.open) < first.n else (),
            outputs=outputs,
            age_seconds=first.age_seconds + age,
            timeout_seconds=None if timeout is None else max(timeout - age, TIMEOUT_SECONDS_MIN),
            sampling=sampling,
        )

    # Ends

    def over(self) -> list[tuple[int, FinishReason]]:
        """Sequences that end with the loss of the engine: withdrawn or complete."""
        reasons = ((index, self.withdrawn.get(index) or self.finish(index)) for index in self.open)
        return [(index, reason) for index, reason in reasons if reason is not None]

    def finish(self, index: int) -> FinishReason | None:
        """The finish reason if the delivered tokens complete the sequence: its instance was lost before it reported the end."""
        delivered, sampling = self.open[index], self.request.sampling
        if delivered and len(delivered) >= sampling.stop_length_min and delivered[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        if ends_by_repetition(delivered, sampling):
            return FinishReason.REPETITION
        return FinishReason.LENGTH if len(delivered) >= sampling.max_tokens else None

    def withdraw(self, index: int | None, reason: FinishReason) -> None:
        """Withdraw one sequence, or all, for the client. The first reason counts."""
        for each in self.open if index is None else (index,):
            if each in self.open:
                self.withdrawn.setdefault(each, reason)

    def close(self, index: int) -> int:
        """End the sequence and return the number of its tokens."""
        self.withdrawn.pop(index, None)
        tokens = len(self.open.pop(index))
        self.closed_tokens += tokens
        return tokens

    def end(self, index: int, reason: FinishReason) -> Ended:
        """Close the sequence and build an end that no engine reports."""
        return Ended(self.id, index, reason, len(self.request.prompt), 0, self.close(index), 0, attempt=self.attempt)
