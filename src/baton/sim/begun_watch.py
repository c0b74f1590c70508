"""The cached part of a prompt as reported to clients: 23 of docs/internals/reliability.md, with the first token."""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import InvariantBroken
from baton.protocol.output import Begun, Emit, each_token


def check_begun(emit: Emit, cached: Callable[[str, int], int | None]) -> None:
    """23: every first token comes with one Begun, and no Begun comes without one. `cached(request, index)`: the right number of
    cached tokens, None if unknown."""
    begun: dict[tuple[str, int], Begun] = {(each.request, each.index): each for each in emit.begun}
    first = [(request, index) for request, _, index, position, _ in each_token(emit.tokens) if position == 0]
    if sorted(begun) != sorted(first) or len(emit.begun) != len(first):
        raise InvariantBroken(f"the first tokens of {first} come with {emit.begun}", invariant=23)
    for key, each in begun.items():
        right, below = cached(*key), (each.host_tokens, each.storage_tokens)
        if right not in (None, each.cached_tokens) or min(below) < 0 or sum(below) > each.cached_tokens:
            raise InvariantBroken(f"{key}: {each}, where {right} tokens of the prompt were cached", invariant=23)
