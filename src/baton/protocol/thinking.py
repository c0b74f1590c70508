"""Limits of a model's reasoning before it answers.

Forced tokens are a function of the tokens after the prompt. So a sequence that is preempted, replayed or handed over continues
unchanged: no state is sent.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Thinking(Struct, frozen=True, omit_defaults=True):
    """Position of a thought, in token ids. A grammar applies to the tokens after it. With a budget it ends after that many
    tokens: the next one is `end`, whatever the model prefers."""

    end: _TokenId
    "Id of the token that closes a thought."
    budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    "Maximum of tokens of a thought, its marks not counted. None: no limit."
    start: _TokenId | None = None
    "Id of the token that opens a thought at the beginning of the answer. None: only the prompt opens it."
    is_open: bool = False
    "Whether the prompt has opened the thought."


THINKING_BYTES_MAX = 64
"""Upper bound of the encoded size in bytes."""
