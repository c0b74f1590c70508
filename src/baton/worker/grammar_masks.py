"""Masks of the sequences that have a grammar, worked out beside the model.

    collect(N)      tokens of step N are known: masks for the next tokens are asked for
                        |---- mask thread: advance, fill ----|
    launch(N+1)         |------------- forward pass -------------|  sampling takes the masks

A sequence that comes in is compiled on a thread of its own, so that the masks of the others do not wait for that; its prompt is
computed meanwhile. All that a state is made of is the grammar and the tokens after the prompt (NewSequence), so a worker that
gets a sequence in the middle is where any other would be. Nothing in here ever raises for a grammar: a state that failed says
why, and its row fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from time import thread_time
from typing import Final

import numpy as np

from baton.grammar.matcher import Matcher, Words
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.protocol.progress import ProgressWord
from baton.protocol.request import SamplingParams
from baton.protocol.thinking import Thinking

WAIT_SECONDS_MAX: Final = 30.0
"""For a mask. Its work is bounded in steps (matcher.LIMITS), so only a machine that stands still takes so long."""
_BEAT_SECONDS: Final = 0.25
MASK_SECONDS: Final = 0.005
"""Of a processor, that a row's mask may take in the long run: the others of its step wait for it. An honest one takes 0.02 to
1 ms. Counts alone do not hold this (docs/notes/grammar.md)."""
MASK_SECONDS_OVER: Final = 0.25
"""So much more a row may have taken, in one mask or in many."""
TOO_SLOW: Final = f"its masks take more than {1000 * MASK_SECONDS:g} ms each: make it less ambiguous"
COMPILED_MAX: Final = 64
"""Compiled grammars that are kept for the next who ask for them."""
NO_VOCABULARY: Final = "this worker has no tokenizer, which a grammar needs"


class GrammarState:
    """Of one sequence in a slot."""

    __slots__ = ("_masks", "error", "matcher", "pending", "seconds_over", "words")

    def __init__(self, masks: GrammarMasks) -> None:
        self._masks = masks
        self.matcher: Matcher | None = None
        self.words: Words = _NO_WORDS
        "Which tokens may come next, when nothing is pending."
        self.error = ""
        self.seconds_over = 0.0
        "That its masks took beyond MASK_SECONDS each."
        self.pending: Future[None] | None = None

    @property
    def ran_out(self) -> bool:
        """Whether it is the grammar that leaves no way on, and not this worker."""
        return self.matcher is not None and bool(self.matcher.error)

    def mask(self) -> Words:
        """Waits for it. No bit is set where the grammar has failed: `error` says why."""
        if self.pending is not None:
            self._masks.wait(self)
        return self.words

    def mask_of(self, vocabulary: int) -> Words:
        """The same, of that many tokens."""
        words, count = self.mask(), -(-vocabulary // 32)
        return words[:count] if words.size else np.zeros(count, np.uint32)


class GrammarMasks:
    """Of one worker. Called from its one thread; the work is done on two others, which share only states with it: those that
    are not pending are the caller's."""

    def __init__(self, vocabulary: Callable[[], Vocabulary] | None) -> None:
        """`vocabulary`: called once, on a thread."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar masks")
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar compile")
        self._source = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._compiled: dict[Grammar, Matcher] = {}
        self._advance: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Reads the vocabulary, beside whatever else is to be read."""
        self._compiling.submit(self._load)

    def report_progress(self, word: ProgressWord) -> None:
        self._advance = word.advance

    def seat(self, params: SamplingParams, outputs: Sequence[int]) -> GrammarState | None:
        """A sequence that has these tokens already. None: it has no grammar."""
        if params.grammar is None:
            return None
        state = GrammarState(self)
        state.pending = self._compiling.submit(self._begin, state, params.grammar, params.thinking, outputs)
        return state

    def advance(self, sampled: list[tuple[GrammarState, int]]) -> None:
        """Their next tokens are known: the masks after them are wanted soon."""
        task = self._threads.submit(_continue, sampled)
        for state, _ in sampled:
            state.pending = task

    def wait(self, state: GrammarState) -> None:
        """Until its mask is there."""
        task = state.pending
        assert task is not None
        for _ in range(int(WAIT_SECONDS_MAX / _BEAT_SECONDS)):
            if task.done() or wait([task], _BEAT_SECONDS).done:
                break
            self._advance()  # the worker waits, and does not hang
        state.pending = None
        if not task.done():
            state.error, state.words = "its grammar takes too long", np.zeros_like(state.words)
        elif (error := task.exception()) is not None:
            state.error = state.error or f"its grammar failed: {type(error).__name__}"
            state.words = np.zeros_like(state.words)

    def close(self) -> None:
        for threads in (self._threads, self._compiling):
            threads.shutdown(wait=False, cancel_futures=True)

    # On the compiling thread

    def _load(self) -> None:
        if self._vocabulary is None and self._source is not None:
            self._vocabulary = self._source()

    def _begin(self, state: GrammarState, grammar: Grammar, thinking: Thinking | None, outputs: Sequence[int]) -> None:
        self._load()
        if self._vocabulary is None:
            state.error = NO_VOCABULARY
            return
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = Matcher(self._vocabulary, grammar)
            if len(self._compiled) > COMPILED_MAX:
                del self._compiled[next(iter(self._compiled))]
        state.words = np.zeros(self._vocabulary.words, np.uint32)
        state.matcher = compiled.copy(thinking)
        state.matcher.advance(outputs)
        _fill(state)


def _continue(sampled: list[tuple[GrammarState, int]]) -> None:
    """On the mask thread."""
    for state, token in sampled:
        if state.matcher is not None and not state.error:
            begin = thread_time()
            state.matcher.advance((token,))
            _fill(state)
            state.seconds_over = max(0.0, state.seconds_over + thread_time() - begin - MASK_SECONDS)
            if state.seconds_over > MASK_SECONDS_OVER and not state.error:
                state.error = state.matcher.error = TOO_SLOW
                state.words[:] = 0


def _fill(state: GrammarState) -> None:
    assert state.matcher is not None
    state.matcher.fill(state.words)
    state.error = state.matcher.error


_NO_WORDS: Final[Words] = np.zeros(0, np.uint32)
