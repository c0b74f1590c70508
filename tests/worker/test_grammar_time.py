"""A row whose masks take long is ended, alone: the others of its step wait for each of them."""

from __future__ import annotations

from itertools import count

import pytest

from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.protocol.request import SamplingParams
from baton.worker import grammar_masks
from baton.worker.grammar_masks import MASK_SECONDS, MASK_SECONDS_OVER, TOO_SLOW, GrammarMasks, GrammarState

TOKENS = [*(bytes([byte]) for byte in range(256)), b"<end>"]
END = 256
AMBIGUOUS = "start: s\ns: s s s s | s s s | s s | /a/ | /b/\n"


@pytest.fixture
def masks():
    made = GrammarMasks(lambda: Vocabulary(TOKENS, [END], len(TOKENS)))
    yield made
    made.close()


def seated(masks: GrammarMasks, text: str) -> GrammarState:
    state = masks.seat(SamplingParams(grammar=Grammar("lark", text, ends=(END,))), ())
    assert state is not None
    assert state.mask().any()
    return state


class Clock:
    """Two looks at it are as many seconds apart as is said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self._looks = count()
        self._now = 0.0
        monkeypatch.setattr(grammar_masks, "thread_time", self._look)

    def _look(self) -> float:
        self._now += self.seconds * (next(self._looks) % 2)
        return self._now


def masks_until_error(masks: GrammarMasks, state: GrammarState, most: int) -> int:
    for number in range(most):
        masks.advance([(state, ord("a"))])
        if not state.mask().any():
            return number + 1
    return most


def test_masks_that_stay_slow_end_their_row(masks, monkeypatch):
    clock = Clock(monkeypatch)
    slow, other = seated(masks, "start: /a*/\n"), seated(masks, "start: /a*/\n")
    clock.seconds = 0.03
    ended = masks_until_error(masks, slow, 100)
    assert ended == 1 + int(MASK_SECONDS_OVER / (0.03 - MASK_SECONDS))
    assert slow.error == TOO_SLOW
    assert slow.ran_out, "the client's doing"
    clock.seconds = 0.001
    assert masks_until_error(masks, other, 50) == 50
    assert not other.error


def test_a_slow_one_now_and_then_is_forgiven(masks, monkeypatch):
    clock = Clock(monkeypatch)
    state = seated(masks, "start: /a*/\n")
    for _ in range(10):
        clock.seconds = 0.2
        assert masks_until_error(masks, state, 1) == 1
        assert not state.error
        clock.seconds = 0.001
        masks_until_error(masks, state, 60)
    assert not state.error


def test_an_ambiguous_grammar_comes_to_its_end_by_time(masks):
    """By its counts it may go on until a mask takes most of a second."""
    state = seated(masks, AMBIGUOUS)
    assert masks_until_error(masks, state, 1000) < 1000
    assert state.error == TOO_SLOW
