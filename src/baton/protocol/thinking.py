"""How long a model may think before it answers, if a request limits it.

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
    "The token that closes a thought."
    budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    "Tokens of a thought, its marks not counted. None: no limit."
    start: _TokenId | None = None
    "The token that opens one, at the beginning of the answer. None: only the prompt opens it."
    is_open: bool = False
    "The prompt has opened the thought."


THINKING_BYTES_MAX = 64
"""Upper bound of the encoded size."""
