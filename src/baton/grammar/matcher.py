"""Computes the allowed next tokens, one bit each, from a grammar and the tokens so far, and from nothing else.

The limits here count steps, not time: a grammar that exceeds them does so on every machine, at the same token. A worker ends
slower ones by time (worker/grammar_masks.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from msgspec import structs
from numpy.typing import NDArray

from baton.errors import BadGrammar
from baton.grammar.expected_text import NOTHING, Expected, expected_text
from baton.grammar.json_layout import JsonLayout
from baton.grammar.language import canonical, lark_of, reason_of
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.protocol.thinking import Thinking

Words = NDArray[np.uint32]
"""Bits of a mask: bit i % 32 of word i // 32 is token i."""

LIMITS: Final = LLParserLimits(
    max_items_in_row=2_500,  # four per optional property of an object
    initial_lexer_fuel=500_000,
    step_lexer_fuel=100_000,  # about 7 ms
    step_max_items=20_000,  # about 1 ms
    max_lexer_states=20_000,  # 1 to 2 KiB each
    max_grammar_size=50_000,
    verbose_errors=False,
)


@lru_cache(64)
def checked(grammar: Grammar) -> Grammar:
    """The grammar in a form that workers accept, compiled in this process. Raises BadGrammar."""
    made = canonical(grammar)
    is_error, words = LLMatcher.validate_grammar_with_warnings(lark_of(made), None, limits=LIMITS)
    if is_error:
        raise BadGrammar(reason_of(words[0], kind=made.kind))
    return made


class Matcher:
    """The grammar's state of one sequence. Not thread-safe; llguidance releases the interpreter lock."""

    __slots__ = ("_ends", "_ends_late", "_matcher", "_thought", "_vocabulary", "_width", "ended", "error", "layout")

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        """Compiles the grammar. Never raises: `error` has the reason."""
        self._vocabulary = vocabulary
        self._width = vocabulary.width
        self._ends = [end for end in grammar.ends if end < vocabulary.width]
        self._ends_late = grammar.ends_late
        self._thought: Thinking | None = None
        "State of the reasoning before the text. None: the text has begun."
        self.ended = False
        "Whether a token that ends the text was drawn."
        self.error = ""
        self.layout: JsonLayout | None = None
        "Reads the consumed text, if text is to be expected behind it."
        try:
            self._matcher = LLMatcher(vocabulary.tokenizer, lark_of(grammar), log_level=0, limits=LIMITS)
        except (BadGrammar, ValueError) as error:
            self.error = reason_of(str(error), kind=grammar.kind)
            return
        self._record_error(grammar.kind)

    def copy(self, thinking: Thinking | None = None) -> Matcher:
        """A matcher for another sequence, without compiling again. `thinking`: the reasoning before the answer is
        unconstrained."""
        other = self.fork()
        other._thought = thinking if thinking is not None and (thinking.is_open or thinking.start is not None) else None
        return other

    def fork(self) -> Matcher:
        """A second matcher in the same state, without a layout."""
        other = Matcher.__new__(Matcher)
        other._vocabulary, other.layout = self._vocabulary, None
        other._width, other._ends, other._ends_late = self._width, self._ends, self._ends_late
        other.ended, other.error, other._thought = self.ended, self.error, self._thought
        if not self.error:
            other._matcher = self._matcher.deep_copy()
        return other

    def advance(self, tokens: Sequence[int]) -> None:
        """Consumes drawn tokens."""
        for token in tokens:
            if self.error or self.ended:
                return
            if token in self._ends:
                self.ended = True
            elif self._thought is not None and self._thinks(self._thought, token):
                continue
            elif not self._matcher.consume_token(token):
                self._record_error()
                self.error = self.error or f"token {token} is not one that the grammar allows"
            elif self.layout is not None:
                self.layout.read(self._vocabulary.text_of(token))

    def expected(self, before: Expected = NOTHING, tokens: Sequence[int] = ()) -> Expected:
        """The text that is expected next: what must come, and with a layout also what follows it behind the usual white space.
        The state does not change. `before`: what was expected before these last tokens were consumed."""
        if self.error or self.ended or self._thought is not None:
            return NOTHING
        rest = before.after(b"".join(map(self._vocabulary.text_of, tokens)))
        return rest if rest is not None else expected_text(self._matcher, self.layout, self._vocabulary.single_bytes)

    def fill(self, words: Words) -> None:
        """Writes the mask of allowed next tokens to `words`, of length Vocabulary.words. After an error none is allowed."""
        if self.error or self.ended:
            words[:] = 0
            return
        if self._thought is not None and self._thought.is_open:
            words[:] = 0xFFFFFFFF
            for token in (*self._ends, *range(self._width, 32 * len(words))):
                _take_bit(words, token)
            return
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._record_error()
        if self.error:
            words[:] = 0
            return
        may_end = _take_bit(words, self._width)
        if may_end and not (self._ends_late and words.any()):
            for end in self._ends:
                words[end >> 5] |= np.uint32(1 << (end & 31))
        if self._thought is not None and self._thought.start is not None and self._thought.start < self._width:
            words[self._thought.start >> 5] |= np.uint32(1 << (self._thought.start & 31))
        if not words.any():
            self.error = "the grammar allows no token that the model has"

    def _thinks(self, thought: Thinking, token: int) -> bool:
        """Whether the token belongs to the reasoning. If the prompt has not opened it, the first token may."""
        if thought.is_open:
            self._thought = None if token == thought.end else thought
            return True
        self._thought = structs.replace(thought, is_open=True) if token == thought.start else None
        return token == thought.start

    def _record_error(self, kind: str = "") -> None:
        """Records an error of the compiled grammar. `kind`: kind of the grammar."""
        if self._matcher.is_error():
            self.error = reason_of(self._matcher.get_error(), kind=kind)


def _take_bit(words: Words, at: int) -> bool:
    """Clears the bit, and returns whether it was set."""
    bit = np.uint32(1 << (at & 31))
    was = bool(words[at >> 5] & bit)
    words[at >> 5] &= ~bit
    return was


def allows_only(words: Words, tokens: NDArray[np.int64]) -> bool:
    """Whether all other tokens are forbidden."""
    if not words.size:
        return False
    others = words.copy()
    for token in tokens.tolist():
        others[token >> 5] &= ~np.uint32(1 << (token & 31))
    return not others.any()


def allowed(words: Words, width: int) -> NDArray[np.bool_]:
    """Whether each token is allowed, by token id."""
    return np.unpackbits(words.view(np.uint8), count=width, bitorder="little").view(np.bool_)


def ceilings(words: Words, width: int) -> NDArray[np.float32]:
    """Infinity for allowed tokens, minus infinity for the others: an upper bound of the logits. np.minimum with it is ten times
    faster than masked assignment."""
    return _CEILINGS.take(words.view(np.uint8), axis=0).reshape(-1)[:width]


_BITS: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_CEILINGS: Final[NDArray[np.float32]] = np.where(_BITS == 1, np.float32(np.inf), np.float32(-np.inf)).astype(np.float32)
"""Ceilings of the eight tokens of a byte."""
