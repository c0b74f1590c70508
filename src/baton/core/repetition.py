"""Detects an answer that repeats itself, from its token ids alone, so that every instance ends it at the same token.

No state is kept from token to token. A check of the last tokens decides whether the answer ends here, and how many tokens must
follow before it can end: until then no check is needed.

    tokens    ... a b c d | a b c d | a b c d | a b       pattern of 4 tokens, 14 covered
    needed    |---------------- 20 ----------------|      so at least 6 tokens must follow, whatever they are

A replay, a hand-off or a preemption only changes when the checks happen, never their result: a check at or before the end finds
it. In a text without repetitions the first check is at token 128; then one follows every 80 tokens or so and compares one token
per pattern length: a third of a microsecond per token of an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.protocol.repetition import RepetitionStop
from baton.protocol.request import SamplingParams


def ends_by_repetition(outputs: Sequence[int], sampling: SamplingParams) -> bool:
    """Whether the answer ends with the last of these tokens because it repeats itself."""
    rule = sampling.repetition_stop
    if rule is None or not outputs or len(outputs) < sampling.min_tokens:
        return False
    return not tokens_until_repetition(outputs, 0, rule)


def tokens_until_repetition(tokens: Sequence[int], start: int, rule: RepetitionStop) -> int:
    """Fewest tokens that must follow before the answer can end as a repetition. 0: the answer ends here. The answer is
    `tokens[start:]`, which has at least one token."""
    last, answer = len(tokens) - 1, len(tokens) - start
    least = max(rule.count_min * rule.pattern_min, rule.tokens_min)
    if answer < least:
        return least - answer
    newest, count, floor = tokens[last], rule.count_min, rule.tokens_min
    fewest = max(count * rule.pattern_max, floor)
    for pattern in range(rule.pattern_min, rule.pattern_max + 1):
        needed = count * pattern if count * pattern > floor else floor
        covered = pattern
        if pattern < answer and tokens[last - pattern] == newest:  # rare: most patterns end at this comparison
            covered += _matching(tokens, max(start + pattern, last + 1 + pattern - needed), pattern)
        missing = needed - (covered if covered < answer else answer)
        if missing < fewest:
            fewest = missing
    return fewest


def _matching(tokens: Sequence[int], first: int, pattern: int) -> int:
    """Count the last tokens, none before `first`, that equal the token one pattern earlier."""
    place = last = len(tokens) - 1
    while place >= first and tokens[place] == tokens[place - pattern]:
        place -= 1
    return last - place
