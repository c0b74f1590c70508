"""How long a model may think before it answers, where a request says so.

What is forced when is a function of the tokens after the prompt. So a sequence that is preempted, replayed or handed over goes
on as if nothing had happened: nothing of it travels.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

_TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class Thinking(Struct, frozen=True, omit_defaults=True):
    """Where a thought is, in token ids. A grammar is about what follows it. With a budget it ends after so many tokens: the
    next one is `end`, whatever the model likes best."""

    end: _TokenId
    "The token that closes a thought."
    budget: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    "Tokens of a thought, its marks not counted. None: as many as it likes."
    start: _TokenId | None = None
    "The token that opens one, at the beginning of the answer. None: it is only opened by the prompt."
    is_open: bool = False
    "The prompt has opened the thought."


THINKING_BYTES_MAX = 64
"""On a wire."""
