"""Output of an instance for the fronts: tokens, their log-probabilities, and the one end of each sequence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from baton.protocol.ids import RequestId
from baton.protocol.numbers import Natural, Seconds
from baton.protocol.request import Count, FinishReason, TokenId
from baton.protocol.step import RowError, RowLogprobs, TokenLogprob

EndError = Literal[RowError, "poison", "worker_gone"]
"""Causes of an end with an error, for programs; `detail` is text for users.

row_failed    the model cannot compute it (NaN logits): it would fail elsewhere too
dead_end      the request excludes every token (bad words or bias against its grammar, say): the client's own fault
poison        it was the only suspect of two worker losses: no other worker may be lost for it
worker_gone   the instance has no worker any more: another instance can continue it
"""
OTHER_WEIGHTS: Final = "other weights are served now: the answer cannot go on"
"""Detail of the end of a begun answer."""
RETRYABLE: Final[frozenset[EndError]] = frozenset({"worker_gone"})
"""Ends after which the same request, with its delivered tokens, can continue elsewhere."""


class Ended(Struct, frozen=True, array_like=True):
    """The one end of one sequence, with its usage."""

    request: RequestId
    index: Natural
    reason: FinishReason
    prompt_tokens: Natural
    cached_tokens: Natural
    output_tokens: Natural
    preemptions: Natural
    error: EndError | None = None
    "Kind of the error; set if the reason is error."
    detail: str = ""
    "Detail of an error, fit for the client."
    attempt: Count = 1
    host_tokens: Natural = 0
    "Cached tokens that came from the host tier."
    storage_tokens: Natural = 0
    "Cached tokens that came from storage."
    drafted_tokens: Natural = 0
    "Number of verified draft tokens (speculative decoding)."
    accepted_tokens: Natural = 0
    "Number of accepted draft tokens: they are among the output tokens."


class Begun(Struct, frozen=True, array_like=True):
    """Cached part of a prompt. Sent with the first token of a sequence; Ended repeats it."""

    request: RequestId
    attempt: Count
    index: Natural
    cached_tokens: Natural
    host_tokens: Natural = 0
    storage_tokens: Natural = 0
    "Tokens from the host tier and from storage, as in Ended."
    prefill_seconds: Seconds = 0.0
    "Seconds from the sequence's first admission to its first token."


RowTokens = TokenId | Annotated[list[TokenId], Meta(min_length=1)]
"""One token, or a list of several in order (speculative decoding). Most rows have one token, and a list for each of them
would cost an engine with 256 sequences a twentieth of its step."""
TokenRow = tuple[RequestId, Count, Natural, Natural, RowTokens]
"""(request, attempt, sequence index, position of the first token in its output, tokens). A receiver accepts each position
once."""


class Emit(Struct, frozen=True, array_like=True):
    """All output of one event: tokens, their log-probabilities, then ends."""

    tokens: list[TokenRow]
    "Rows of tokens, in order."
    ended: list[Ended]
    logprobs: list[tuple[RequestId, int, RowLogprobs]] = []
    "Log-probabilities of the tokens above, or of prompts; only if the request wants them. One per token, in order."
    begun: list[Begun] = []
    "Cached parts of prompts, for each sequence whose first token is above."


class Delta(Struct):
    """New output of one sequence, for its client."""

    index: int
    "Index of the sequence among the n of its request."
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    "Log-probabilities, one per token, if the request wants them; else empty."
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Log-probabilities of the prompt, one per token, the first one None. Delivered once, with sequence 0, if the request wants
    them."""
    ended: Ended | None = None
    begun: Begun | None = None
    "Cached part of the prompt, with the first token."
    embedding: bytes = b""
    "The pooled prompt, if the request wants it: with the token, float32."


def tokens_of(tokens: int | list[int]) -> list[int]:
    """The tokens of a row, as a list."""
    return [tokens] if isinstance(tokens, int) else tokens


def each_token(rows: Iterable[TokenRow]) -> Iterator[tuple[RequestId, int, int, int, int]]:
    """The tokens of an emit one by one: (request, attempt, sequence index, position, token)."""
    for request, attempt, index, first, tokens in rows:
        for position, token in enumerate(tokens_of(tokens), first):
            yield request, attempt, index, position, token
