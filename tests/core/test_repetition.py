"""An answer ends at the first token at which it repeats itself, wherever one looks for that and wherever one begins."""

from __future__ import annotations

from random import Random

import pytest

from baton.core.repetition import ends_by_repetition, tokens_until_repetition
from baton.protocol.repetition import STOP_ON_REPETITION, RepetitionStop
from baton.protocol.request import SamplingParams

from .engine import harness
from .engine.harness import make_request


def repeats(answer: list[int], rule: RepetitionStop) -> bool:
    return harness.repeats(make_request("?", repetition_stop=rule), answer)


def first_end(answer: list[int], rule: RepetitionStop) -> int | None:
    return next((count for count in range(1, len(answer) + 1) if repeats(answer[:count], rule)), None)


def found_end(prompt: list[int], answer: list[int], rule: RepetitionStop, known: int = 0) -> tuple[int | None, int]:
    """Where it ends by looks that skip ahead, beginning with `known` tokens, and how many looks that takes."""
    tokens, check, looks = [*prompt, *answer[:known]], len(prompt) + known + 1, 0
    for token in answer[known:]:
        tokens.append(token)
        if len(tokens) >= check:
            looks += 1
            missing = tokens_until_repetition(tokens, len(prompt), rule)
            if not missing:
                return len(tokens) - len(prompt), looks
            check = len(tokens) + missing
    return None, looks


def some_rule(rng: Random) -> RepetitionStop:
    low, high = sorted((rng.randint(1, 9), rng.randint(1, 9)))
    return RepetitionStop(
        pattern_min=low, pattern_max=high, count_min=rng.choice((2, 2, 3, 4)), tokens_min=rng.choice((0, 0, 5, 12, 20))
    )


def some_answer(rng: Random) -> list[int]:
    """Of few words; in some of them a passage comes again and again, with a slip now and then."""
    answer = [rng.randrange(rng.choice((1, 2, 2, 3, 50))) for _ in range(rng.randint(0, 30))]
    passage = [rng.randrange(4) for _ in range(rng.randint(1, 9))]
    for _ in range(rng.randint(0, 8)):
        answer += passage
        if rng.random() < 0.2:
            answer[-1] = 7
    return [*answer, *(rng.randrange(3) for _ in range(20))]


@pytest.mark.parametrize("seed", range(4))
def test_the_end_is_where_the_definition_has_it_whatever_is_known_at_the_beginning(seed):
    rng, ends = Random(seed), 0
    for _ in range(150):
        rule, answer = some_rule(rng), some_answer(rng)
        prompt = [rng.randrange(3) for _ in range(rng.choice((1, 5, 20)))]
        end = first_end(answer, rule)
        ends += end is not None
        upto = len(answer) if end is None else end
        for known in {0, rng.randrange(upto), rng.randrange(upto), upto - 1}:
            assert found_end(prompt, answer, rule, known)[0] == end
    assert ends > 30


def test_the_router_finds_the_same_end_in_the_tokens_alone():
    rng = Random(5)
    for _ in range(100):
        rule, answer = some_rule(rng), some_answer(rng)
        sampling = SamplingParams(repetition_stop=rule, min_tokens=rng.choice((0, 0, 10)))
        for count in range(1, len(answer) + 1):
            expected = count >= sampling.min_tokens and repeats(answer[:count], rule)
            assert ends_by_repetition(answer[:count], sampling) is expected
    assert not ends_by_repetition([], sampling)
    assert not ends_by_repetition([1] * 1000, SamplingParams())


def test_a_text_without_repetitions_is_looked_at_once_in_eighty_tokens():
    text = Random(1).sample(range(50_000), 8_000)
    end, looks = found_end([1, 2, 3], text, STOP_ON_REPETITION)
    assert end is None
    assert looks <= 100


@pytest.mark.parametrize(
    ("pattern", "end"),
    [(1, 128), (2, 128), (21, 128), (42, 128), (43, 129), (60, 180), (128, 384), (129, None)],
)
def test_what_stop_on_repetition_means(pattern, end):
    answer = list(range(1000, 1000 + pattern)) * (1 + 500 // pattern)
    assert found_end([7], answer, STOP_ON_REPETITION)[0] == end
    lead = list(range(50))
    assert found_end([7], lead + answer, STOP_ON_REPETITION)[0] == (None if end is None else end + 50)


def test_a_list_of_alike_lines_is_no_repetition():
    """The lines of a table differ in a token, here the fourth of nine."""
    table = [token for line in range(100) for token in (1, 2, 3, 1000 + line, 4, 5, 6, 7, 8)]
    assert found_end([7], table, STOP_ON_REPETITION)[0] is None


def test_a_rule_that_contradicts_itself_is_none():
    with pytest.raises(ValueError, match="pattern_min is 5, which is more than pattern_max"):
        RepetitionStop(pattern_min=5, pattern_max=4)
