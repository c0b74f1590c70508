"""A tokenizer's tokens as plain values, for code that does not need llguidance."""

from __future__ import annotations

from collections.abc import Callable

from baton.text.tokenizer import Tokenizer

VocabularySource = Callable[[], tuple[list[bytes], list[int], int]]
"""Function that returns (bytes of each token, special ids, width of the model's head)."""


def tokens_of(tokenizer: Tokenizer) -> tuple[list[bytes], list[int]]:
    """The bytes of each token, and the special ids. Stop tokens count as special, even if the file does not mark them."""
    tokens = [tokenizer.id_to_bytes(token) for token in range(tokenizer.vocab_size)]
    return tokens, sorted({*tokenizer.special_ids, *tokenizer.eos_ids})


def source_of(tokenizer: Tokenizer, width: int) -> VocabularySource:
    return lambda: (*tokens_of(tokenizer), width)
