"""Divides the prompt tokens of a step among the prompts of one class.

    room      |-- oldest: at least half --|---- the rest: fewest tokens left first ----|
    queue     while another prompt of the class waits, the running ones leave half of the room to it

A long prompt alone has the whole step. Beside it a short one is computed at once, and the long one takes at most twice as long.
Two long prompts of the same length are computed one after the other: the second gains nothing if both end late. Unused room
goes back to running prompts, so a step computes as many prompt tokens as without this rule.
"""

from __future__ import annotations


def divide(room: int, wanted: list[int], remaining: list[int]) -> list[int]:
    """Tokens for each prompt, oldest first. `wanted`: limit of its chunk. `remaining`: tokens left of the prompt. The sum is
    the room, or all that is wanted."""
    if sum(wanted) <= room:
        return wanted
    given = [0] * len(wanted)
    given[0] = min(wanted[0], room - room // 2)
    left = room - given[0]
    for place in sorted(range(len(wanted)), key=lambda place: remaining[place]):
        more = min(wanted[place] - given[place], left)
        given[place] += more
        left -= more
    return given
