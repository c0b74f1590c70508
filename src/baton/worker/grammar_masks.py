"""Token masks of sequences with a grammar, computed in parallel with the model.

    collect(N)      tokens of step N are known: masks for the next tokens are requested
                        |- advance -|------- mask thread: fill -------|
    launch(N+1)                     |------------- forward pass -------------|  sampling reads the masks

A new sequence's grammar is compiled on a separate thread, so that the masks of others do not wait; its prompt is computed in
parallel. A state depends only on the grammar and the tokens after the prompt (NewSequence), so a worker that gets a sequence in
the middle has the same state as any other. Nothing here raises for a grammar: a failed state has an error, and only its row
fails.

Drafts need the expected text before the forward pass. So all sequences consume their tokens before the first mask is computed,
and expected text, if it is drafted, is found then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from math import inf
from threading import Event
from time import thread_time
from typing import Final

import numpy as np

from baton.grammar.expected_text import NOTHING
from baton.grammar.json_layout import JsonLayout, Layout
from baton.grammar.matcher import Matcher, Words
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.protocol.progress import ProgressWord
from baton.protocol.request import SamplingParams
from baton.protocol.thinking import Thinking

log = logging.getLogger(__name__)

WAIT_SECONDS_MAX: Final = 30.0
"""Timeout of a mask. Its work is bounded in steps (matcher.LIMITS), so only a stalled machine takes this long."""
_BEAT_SECONDS: Final = 0.25
LONG_SECONDS: Final = 0.002
"""Seconds of waiting for a mask after which other work is done first (`before_wait`). An ordinary mask takes less."""
MASK_SECONDS: Final = 0.005
"""Average CPU time of a row's mask: the other rows of its step wait for it. An ordinary one takes 0.02 to 1 ms. Step counts
alone do not ensure this (docs/internals/notes/grammar.md), and llguidance does not report the work of a mask. So this limit
depends on the machine, and a sequence that is computed again begins with a new budget: the only exception to "the tokens of an
undisturbed run" (docs/structured-output.md)."""
MASK_SECONDS_OVER: Final = 0.25
"""Extra CPU time of a row, in one mask or in many."""
TOO_SLOW: Final = f"its masks take more than {1000 * MASK_SECONDS:g} ms each: make it less ambiguous"
COMPILED_MAX: Final = 64
"""Compiled grammars that are cached."""
NO_VOCABULARY: Final = "this worker has no tokenizer, which a grammar needs"


class MaskWork:
    """State that the threads write. A caller that stops waiting leaves it to them, and uses a new one."""

    __slots__ = ("error", "expected", "expected_over", "matcher", "seconds_over", "words")

    def __init__(self, words: Words | None = None, error: str = "") -> None:
        self.matcher: Matcher | None = None
        self.words: Words = _NO_WORDS if words is None else words
        self.error = error
        self.expected = NOTHING
        "Text that is expected next; set if drafts are wanted."
        self.expected_over = 0.0
        "CPU time of finding expected texts beyond MASK_SECONDS each."
        self.seconds_over = 0.0
        "CPU time of its masks beyond MASK_SECONDS each."


class GrammarState:
    """The grammar of one sequence in a slot."""

    __slots__ = ("_ahead_over", "_masks", "accepted", "consumed", "drafts", "pending", "work")

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        self.work = MaskWork()
        self.pending: Future[None] | None = None
        "While set, `work` belongs to a thread."
        self.consumed: Event | None = None
        "Event of the thread: it has consumed the tokens, so `work.expected` is valid, and `work.words` is not yet."
        self.drafts = False
        "Whether expected text is drafted."
        self.accepted: list[int] = []
        "Accepted drafts, which are consumed together with the token after them."
        self._ahead_over = 0.0
        "CPU time of masks behind drafts beyond MASK_SECONDS each."

    @property
    def words(self) -> Words:
        """Mask of the next tokens, valid when nothing is pending."""
        return self.work.words

    @property
    def error(self) -> str:
        return self.work.error

    @property
    def ran_out(self) -> bool:
        """Whether the grammar itself allows no continuation, as opposed to a failure of this worker."""
        return self.work.matcher is not None and bool(self.work.matcher.error)

    def give_up(self, why: str) -> None:
        """Allows no next token. A thread may still write to the old work, which is not read any more."""
        self.work = MaskWork(np.zeros_like(self.work.words), why)

    def draft(self, most: int, own: Sequence[int] = ()) -> list[int]:
        """Up to `most` tokens of the text that is expected next. `own`: what the sequence wrote behind the same tokens before.
        As far as that is the expected text, it is the model's own choice of tokens."""
        vocabulary = self._masks.vocabulary
        if not self.drafts:  # from now on the thread computes the next mask
            self.mask()
            self.drafts = True
            if self.work.matcher is not None and not self.error:
                _expect(self.work)
        elif self.consumed is not None and not self._masks.wait_consumed(self.consumed):
            return []
        if vocabulary is None or self.error or not self.work.expected.text:
            return []
        tokens, rest = vocabulary.leading(self.work.expected, own)
        return [*tokens, *vocabulary.guess_expected(rest)][:most]

    def masks_ahead(self, drafts: Sequence[int], vocabulary: int) -> list[Words]:
        """The mask of the next token, and those behind each of the drafts, on a copy of the state. A mask is empty behind a
        draft that the grammar does not allow: no sampled token equals it. If the masks of a sequence take too long, all are
        empty: its drafts are refused, and it continues without."""
        found, matcher = [self.mask_of(vocabulary)], self.work.matcher
        late = self._masks.timed and self._ahead_over > MASK_SECONDS_OVER
        copy = None if matcher is None or self.error or late else matcher.fork()
        for token in drafts:
            words = np.zeros(max(self.words.size, found[0].size), np.uint32)
            if copy is not None and _allows(found[-1], token):
                self._masks.report_alive()
                begin = thread_time()
                copy.advance((token,))
                copy.fill(words)
                self._ahead_over = max(0.0, self._ahead_over + thread_time() - begin - MASK_SECONDS)
            found.append(words[: found[0].size])
        return found

    def accept(self, tokens: Sequence[int]) -> None:
        """Stores accepted drafts until the token behind them is known: only its mask is needed."""
        self.accepted += tokens

    def consume(self, token: int) -> None:
        """Consumes a sampled token, and computes the next mask on a thread."""
        self._masks.advance([(self, token)])

    def mask(self) -> Words:
        """Waits for the mask. No bit is set if the grammar has failed: `error` has the reason."""
        if self.pending is not None:
            self._masks.wait(self)
        return self.words

    def mask_of(self, vocabulary: int) -> Words:
        """The mask, truncated to that many tokens."""
        words, count = self.mask(), -(-vocabulary // 32)
        return words[:count] if words.size else np.zeros(count, np.uint32)


class GrammarMasks:
    """Grammars of one worker. Called only from the worker's thread; two other threads share only a state's `work` with it: if
    nothing is pending, `work` belongs to the caller."""

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None, *, timed: bool = True) -> None:
        """`vocabulary`: called once, on a thread. `timed`: masks have a budget of CPU time. Several ranks would spend it
        differently, and must agree on every mask."""
        self.timed = timed
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar masks")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar compile")
        self._source = vocabulary
        self.vocabulary: Vocabulary | None = None
        self._compiled: dict[Grammar, Matcher] = {}
        self.drafts = False
        "Whether expected text may be drafted, so that layouts are read."
        self._layout: Layout = {}
        "The layout of the answers so far."
        self._advance: Callable[[], None] = lambda: None
        self.before_wait: Callable[[], None] = lambda: None
        "Called before a long wait for a mask."

    def prepare(self) -> None:
        """Reads the vocabulary on a thread."""
        self._compiling.submit(self._load)

    def report_progress(self, word: ProgressWord) -> None:
        self._advance = word.advance

    def assign_slot(self, params: SamplingParams, outputs: Sequence[int]) -> GrammarState | None:
        """The state of a sequence with these output tokens. None: it has no grammar."""
        if params.grammar is None:
            return None
        state = GrammarState(self)
        state.pending = self._compiling.submit(self._begin, state.work, params.grammar, params.thinking, outputs)
        return state

    def advance(self, sampled: list[tuple[GrammarState, int]]) -> None:
        """Consumes the sampled tokens, and accepted drafts before them, and computes the next masks on a thread."""
        consumed = Event() if any(state.drafts for state, _ in sampled) else None
        rows = [(state.work, (*state.accepted, token), state.drafts) for state, token in sampled]
        task = self._threads.submit(_continue, rows, consumed, self.timed)
        for state, _ in sampled:
            state.pending, state.consumed = task, consumed
            state.accepted.clear()

    def wait_consumed(self, consumed: Event) -> bool:
        """Waits until tokens are consumed. False: it takes too long, as the mask would."""
        if not consumed.wait(LONG_SECONDS):
            self.before_wait()
        for _ in range(int(WAIT_SECONDS_MAX / _BEAT_SECONDS)):
            if consumed.wait(_BEAT_SECONDS):
                return True
            self.report_alive()
        return False

    def report_alive(self) -> None:
        """Reports progress: the worker waits for masks, or computes them, but is not stalled."""
        self._advance()

    def wait(self, state: GrammarState) -> None:
        """Waits until the state's mask is computed, or gives up."""
        task = state.pending
        assert task is not None
        if not (task.done() or wait([task], LONG_SECONDS).done):
            self.before_wait()
        for _ in range(int(WAIT_SECONDS_MAX / _BEAT_SECONDS)):
            if task.done() or wait([task], _BEAT_SECONDS).done:
                break
            self.report_alive()
        state.pending = state.consumed = None
        if not task.done():
            state.give_up("its grammar takes too long")
        elif (error := task.exception()) is not None:
            state.give_up(state.error or f"its grammar failed: {type(error).__name__}")

    def close(self) -> None:
        for threads in (self._threads, self._compiling):
            threads.shutdown(wait=False, cancel_futures=True)

    # On the compiling thread

    def _load(self) -> None:
        if self.vocabulary is None and self._source is not None:
            self.vocabulary = self._source()

    def _begin(self, work: MaskWork, grammar: Grammar, thinking: Thinking | None, outputs: Sequence[int]) -> None:
        self._load()
        if self.vocabulary is None:
            work.error = NO_VOCABULARY
            return
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = Matcher(self.vocabulary, grammar)
            if len(self._compiled) > COMPILED_MAX:
                del self._compiled[next(iter(self._compiled))]
        work.words = np.zeros(self.vocabulary.words, np.uint32)
        work.matcher = compiled.copy(thinking)
        work.matcher.layout = JsonLayout(self._layout) if self.drafts else None
        work.matcher.advance(outputs)
        _fill(work)


def _continue(rows: list[tuple[MaskWork, tuple[int, ...], bool]], consumed: Event | None, timed: bool) -> None:
    """Computes masks on the mask thread. `rows`: tokens of a sequence, and whether its expected text is drafted."""
    seconds = [_timed(work, partial(_consume, work, tokens)) for work, tokens, _ in rows]
    for work, tokens, drafts in rows:
        if drafts:
            _expect(work, tokens)
    if consumed is not None:
        consumed.set()
    for (work, tokens, _), before in zip(rows, seconds, strict=True):
        spent = before + _timed(work, partial(_fill, work))
        work.seconds_over = max(0.0, work.seconds_over + spent - MASK_SECONDS * len(tokens))
        if timed and work.seconds_over > MASK_SECONDS_OVER and work.matcher is not None and not work.error:
            work.error = work.matcher.error = TOO_SLOW
            work.words[:] = 0


def _timed(work: MaskWork, part: Callable[[], None]) -> float:
    """CPU time of a part of the work, unless that has failed. An exception fails this sequence, and no other of the step."""
    if work.matcher is None or work.error:
        return 0.0
    begin = thread_time()
    try:
        part()
    except Exception as error:
        work.error = f"its grammar failed: {type(error).__name__}"
        work.words[:] = 0
    return thread_time() - begin


def _consume(work: MaskWork, tokens: tuple[int, ...]) -> None:
    assert work.matcher is not None
    work.matcher.advance(tokens)


def _expect(work: MaskWork, tokens: Sequence[int] = ()) -> None:
    """Finds the text that is expected behind these last tokens. Its time is not that of masks. If it fails or takes too long
    there are no drafts: an answer ends for the same reasons with drafts and without."""
    if work.matcher is None or work.expected_over > MASK_SECONDS_OVER:
        work.expected = NOTHING
        return
    begin = thread_time()
    try:
        work.expected = work.matcher.expected(work.expected, tokens)
    except Exception as error:
        work.expected, work.expected_over = NOTHING, inf
        log.warning("finding expected text failed (%s): the answer has no more drafts of it", type(error).__name__)
    work.expected_over = max(0.0, work.expected_over + thread_time() - begin - MASK_SECONDS)


def _fill(work: MaskWork) -> None:
    assert work.matcher is not None
    work.matcher.fill(work.words)
    work.error = work.matcher.error


def _allows(words: Words, token: int) -> bool:
    return token >> 5 < words.size and bool(words[token >> 5] & np.uint32(1 << (token & 31)))


_NO_WORDS: Final[Words] = np.zeros(0, np.uint32)
