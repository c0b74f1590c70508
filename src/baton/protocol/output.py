"""What an instance tells the fronts: tokens, what the model thought of them, and the one end of each sequence."""

from __future__ import annotations

from msgspec import Struct

from baton.protocol.ids import RequestId
from baton.protocol.request import FinishReason
from baton.protocol.step import RowLogprobs


class Ended(Struct, frozen=True, array_like=True):
    """The one end of one sequence, with its usage."""

    request: RequestId
    index: int
    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    detail: str = ""
    "For an error: what happened, fit for the client."


class Emit(Struct, frozen=True, array_like=True):
    """Everything clients are told by one event: tokens, what the model thought of them, then ends."""

    tokens: list[tuple[RequestId, int, int]]
    "(request, sequence index, token id), in order."
    ended: list[Ended]
    logprobs: list[tuple[RequestId, int, RowLogprobs]] = []
    "Of the tokens above, or of prompts; only for requests that asked."
