"""A row whose masks take long is ended, alone: the others of its step wait for each of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import count

import numpy as np
import pytest

from baton.grammar.expected_text import Expected
from baton.grammar.matcher import Matcher, Words
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.protocol.progress import ProgressWord
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
    state = masks.assign_slot(SamplingParams(grammar=Grammar("lark", text, ends=(END,))), ())
    assert state is not None
    assert state.mask().any()
    return state


class Clock:
    """A step of one sequence takes as many seconds as is said: half of them to consume its token, half for its mask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self._looks = count()
        self._now = 0.0
        monkeypatch.setattr(grammar_masks, "thread_time", self._look)

    def _look(self) -> float:
        self._now += self.seconds / 2 * (next(self._looks) % 2)
        return self._now


class Machine:
    """Every clock that a program can read. Only `thread_time` stands still while the thread does not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.thread = self.others = 0.0
        clocks = {"thread_time": lambda: self.thread}
        clocks |= dict.fromkeys(("monotonic", "perf_counter", "process_time", "time"), lambda: self.thread + self.others)
        for name, clock in clocks.items():
            monkeypatch.setattr(grammar_masks, name, clock, raising=False)  # whichever of them the module imports
        for name in ("advance", "fill"):
            monkeypatch.setattr(Matcher, name, self._taking(getattr(Matcher, name)))
        self.runs = self.stopped = 0.0
        "Seconds that each part of a mask computes, and in which other threads of the process compute."

    def _taking(self, part: Callable[..., None]) -> Callable[..., None]:
        def takes(*args: object) -> None:
            self.thread += self.runs
            self.others += self.stopped
            part(*args)

        return takes


def masks_until_error(masks: GrammarMasks, state: GrammarState, most: int) -> int:
    for number in range(most):
        masks.advance([(state, ord("a"))])
        if not state.mask().any():
            return number + 1
    return most


def test_masks_that_stay_slow_end_their_row(masks, monkeypatch):
    clock = Clock(monkeypatch)
    slow, other = seated(masks, "start: /a*/\n"), seated(masks, "start: /a*/\n")
    clock.seconds = 0.031
    ended = masks_until_error(masks, slow, 100)
    assert ended == 1 + int(MASK_SECONDS_OVER / (0.031 - MASK_SECONDS))
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


def test_a_stopped_thread_is_not_too_slow_and_a_busy_one_is(masks, monkeypatch):
    """A loaded machine, or a process that was stopped, is not the client's doing."""
    machine, state = Machine(monkeypatch), seated(masks, "start: /a*/\n")
    machine.stopped = 100 * MASK_SECONDS_OVER
    assert masks_until_error(masks, state, 20) == 20
    assert not state.error
    machine.stopped, machine.runs = 0.0, 0.02
    assert masks_until_error(masks, state, 20) == 1 + int(MASK_SECONDS_OVER / (2 * 0.02 - MASK_SECONDS))
    assert state.error == TOO_SLOW


def test_drafts_are_refused_for_masks_of_a_busy_thread_and_not_of_a_stopped_one(masks, monkeypatch):
    machine, state, drafts = Machine(monkeypatch), seated(masks, "start: /a*/\n"), [ord("a")] * 4
    machine.stopped = 100 * MASK_SECONDS_OVER
    for _ in range(3):
        assert all(words.any() for words in state.masks_ahead(drafts, len(TOKENS)))
    machine.stopped, machine.runs = 0.0, MASK_SECONDS_OVER
    state.masks_ahead(drafts, len(TOKENS))
    assert not any(words.any() for words in state.masks_ahead(drafts, len(TOKENS))[1:])


def test_an_ambiguous_grammar_comes_to_its_end_by_time(masks):
    """By its counts it may go on until a mask takes most of a second."""
    state = seated(masks, AMBIGUOUS)
    assert masks_until_error(masks, state, 1000) < 1000
    assert state.error == TOO_SLOW


def test_a_mask_that_never_comes_is_given_up_and_meanwhile_the_worker_shows_that_it_waits(masks, monkeypatch):
    monkeypatch.setattr(grammar_masks, "WAIT_SECONDS_MAX", 0.05)
    monkeypatch.setattr(grammar_masks, "_BEAT_SECONDS", 0.01)
    word = ProgressWord.create()
    masks.report_progress(word)
    state = seated(masks, "start: /a+/\n")
    state.pending = Future()
    assert not state.mask().any(), "no token is allowed"
    assert state.error == "its grammar takes too long"
    assert word.value > 0
    word.close()


def test_a_mask_that_comes_after_it_was_given_up_changes_nothing(masks, monkeypatch):
    """The thread is still at work: the row has failed for the time that it took, and not for want of a token."""
    monkeypatch.setattr(grammar_masks, "WAIT_SECONDS_MAX", 0.05)
    monkeypatch.setattr(grammar_masks, "_BEAT_SECONDS", 0.01)
    state = seated(masks, "start: /a+/\n")
    may_go_on, held = threading.Event(), threading.Event()
    fill = Matcher.fill

    def held_up(self: Matcher, words: Words) -> None:
        held.set()
        assert may_go_on.wait(20)
        fill(self, words)

    monkeypatch.setattr(Matcher, "fill", held_up)
    masks.advance([(state, ord("a"))])
    late = state.pending
    assert late is not None
    assert held.wait(20)
    assert not state.mask().any()
    may_go_on.set()
    late.result(20)
    assert state.error == "its grammar takes too long"
    assert not state.ran_out, "the worker's doing, not the client's"
    assert not state.mask().any()


def test_a_grammar_that_is_compiled_after_it_was_given_up_changes_nothing(monkeypatch):
    monkeypatch.setattr(grammar_masks, "WAIT_SECONDS_MAX", 0.05)
    monkeypatch.setattr(grammar_masks, "_BEAT_SECONDS", 0.01)
    may_go_on = threading.Event()

    def slow_vocabulary() -> Vocabulary:
        assert may_go_on.wait(20)
        return Vocabulary(TOKENS, [END], len(TOKENS))

    masks = GrammarMasks(slow_vocabulary)
    state = masks.assign_slot(SamplingParams(grammar=Grammar("lark", "start: /a+/\n", ends=(END,))), ())
    assert state is not None
    late = state.pending
    assert late is not None
    assert not state.mask().any()
    may_go_on.set()
    late.result(20)
    assert state.error == "its grammar takes too long"
    assert not state.mask_of(len(TOKENS)).any()
    masks.close()


def test_a_mask_whose_thread_failed_allows_nothing_and_says_so(masks):
    state = seated(masks, "start: /a+/\n")
    state.pending = Future()
    state.pending.set_exception(MemoryError("on purpose"))
    assert not state.mask().any()
    assert state.error == "its grammar failed: MemoryError"
    assert np.array_equal(state.mask_of(len(TOKENS)), np.zeros(-(-len(TOKENS) // 32), np.uint32))


def test_an_exception_fails_its_sequence_and_is_not_lost_behind_later_tokens(masks, monkeypatch):
    """Neither a second task of the same step nor the other sequences of the task hide it."""
    ill, other = seated(masks, "start: /a+/\n"), seated(masks, "start: /a+/\n")
    advance, broken = Matcher.advance, ill.work.matcher

    def failing(self: Matcher, tokens: Sequence[int]) -> None:
        if self is broken:
            raise MemoryError("on purpose")
        advance(self, tokens)

    monkeypatch.setattr(Matcher, "advance", failing)
    masks.advance([(ill, ord("a")), (other, ord("a"))])
    monkeypatch.setattr(Matcher, "advance", advance)
    masks.advance([(ill, ord("a")), (other, ord("a"))])
    assert not ill.mask().any()
    assert ill.error == "its grammar failed: MemoryError"
    assert other.mask().any()
    assert not other.error


def test_accepted_drafts_are_consumed_in_one_task_with_one_mask(masks, monkeypatch):
    tasks, filled = list[object](), list[Matcher]()
    run, fill = masks._threads.submit, Matcher.fill
    monkeypatch.setattr(masks._threads, "submit", lambda *task: tasks.append(task) or run(*task))
    monkeypatch.setattr(Matcher, "fill", lambda self, words: filled.append(self) or fill(self, words))
    state, plain = seated(masks, "start: /a{5}/\n"), seated(masks, "start: /a{5}/\n")
    for _ in range(4):
        masks.advance([(plain, ord("a"))])
        plain.mask()
    tasks.clear()
    filled.clear()
    state.accept([ord("a")] * 3)
    masks.advance([(state, ord("a"))])
    assert np.array_equal(state.mask(), plain.mask())
    assert (len(tasks), len(filled)) == (1, 1)
    assert state.accepted == []


def test_forced_text_is_drafted_before_its_mask_is_computed(masks, monkeypatch):
    state = seated(masks, 'start: "ab" /[xy]/ "abcd"\n')
    assert state.draft(4) == [ord("a")]
    for token in b"ab":
        masks.advance([(state, token)])
        state.mask()
    may_fill, fill = threading.Event(), Matcher.fill

    def held_up(self: Matcher, words: Words) -> None:
        assert may_fill.wait(20)
        fill(self, words)

    monkeypatch.setattr(Matcher, "fill", held_up)
    masks.advance([(state, ord("x"))])
    assert state.draft(4) == list(b"abc")  # and the thread has no mask yet
    assert state.draft(2) == list(b"ab")
    may_fill.set()
    assert state.mask()[ord("a") >> 5] == 1 << (ord("a") & 31)


def test_no_mask_is_computed_behind_a_draft_that_is_not_allowed(masks, monkeypatch):
    state, fill, filled = seated(masks, "start: /ab+/\n"), Matcher.fill, list[Matcher]()
    monkeypatch.setattr(Matcher, "fill", lambda self, words: filled.append(self) or fill(self, words))
    found = state.masks_ahead([ord("a"), ord("b"), ord("z"), ord("b")], len(TOKENS))
    assert [bool(words.any()) for words in found] == [True, True, True, False, False]
    assert len(filled) == 2


def test_masks_behind_drafts_that_are_slow_end_drafts_and_not_the_sequence(masks, monkeypatch):
    word = ProgressWord.create()
    masks.report_progress(word)
    state, clock = seated(masks, "start: /a*/\n"), Clock(monkeypatch)
    clock.seconds = 2 * MASK_SECONDS_OVER
    drafts = [ord("a")] * 4
    some = [words.any() for words in state.masks_ahead(drafts, len(TOKENS))]
    assert word.value >= 4
    assert all(some)
    assert [bool(words.any()) for words in state.masks_ahead(drafts, len(TOKENS))] == [True] + [False] * 4
    clock.seconds = 0.0
    assert masks_until_error(masks, state, 5) == 5
    word.close()


def test_expected_text_that_is_slow_to_find_ends_drafts_and_not_the_sequence(masks, monkeypatch):
    state, clock = seated(masks, 'start: "ab"*\n'), Clock(monkeypatch)
    masks.advance([(state, ord("a"))])
    state.mask()
    state.draft(4)
    monkeypatch.setattr(Matcher, "expected", lambda *_: Expected(b"bab"))
    clock.seconds = 4 * MASK_SECONDS_OVER
    grammar_masks._expect(state.work)
    assert state.draft(4) == [ord("b"), ord("a")]
    assert state.work.seconds_over == 0, "masks have a budget of their own"
    grammar_masks._expect(state.work)
    assert state.draft(4) == []
    clock.seconds = 0.0
    for token in b"bababab":
        masks.advance([(state, token)])
        assert state.mask().any()
        assert state.draft(4) == []


def test_expected_text_that_cannot_be_found_ends_drafts_and_not_the_sequence(masks, monkeypatch, caplog):
    state = seated(masks, "start: /a+/\n")

    def failing(*_: object) -> Expected:
        raise MemoryError("on purpose")

    assert state.draft(4) == []
    with monkeypatch.context() as patch:
        patch.setattr(Matcher, "expected", failing)
        masks.advance([(state, ord("a"))])
        assert state.mask().any()
    assert state.draft(4) == []
    monkeypatch.setattr(Matcher, "expected", lambda *_: Expected(b"aaaa"))
    masks.advance([(state, ord("a"))])
    assert state.mask().any()
    assert state.draft(4) == []
    assert not state.error
    assert [record.args for record in caplog.records] == [("MemoryError",)], "said once, without the text"
