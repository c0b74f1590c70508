"""A vocabulary of bytes, some longer tokens, and two special ones."""

from __future__ import annotations

import numpy as np
import pytest

from baton.grammar.matcher import Matcher, Words
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar

TOKENS = [*(bytes([byte]) for byte in range(256)), b"ab", b"ab", b"", b'{"', b'": "', b"<end>", b"<other>"]
END, OTHER = 261, 262
WIDTH = 266
"""Of the head: wider than the vocabulary, as heads are."""


def allows(words: Words, token: int) -> bool:
    return bool(int(words[token >> 5]) >> (token & 31) & 1)


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENS, [END, OTHER], WIDTH)


class Typist:
    """Writes a text a byte at a time, as far as the grammar lets it."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        self.matcher = Matcher(vocabulary, grammar)
        self.words = np.zeros(vocabulary.words, np.uint32)
        self.matcher.fill(self.words)

    def types(self, text: bytes) -> int:
        """How many bytes of it."""
        for at, byte in enumerate(text):
            if not allows(self.words, byte):
                return at
            self.matcher.advance((byte,))
            self.matcher.fill(self.words)
        return len(text)

    def allowed(self) -> list[int]:
        return [token for token in range(WIDTH) if allows(self.words, token)]

    @property
    def may_end(self) -> bool:
        return allows(self.words, END)


@pytest.fixture
def typist(vocabulary):
    def make(kind: str, text: str = "", **more) -> Typist:
        return Typist(vocabulary, Grammar(kind, text, ends=(END,), **more))

    return make
