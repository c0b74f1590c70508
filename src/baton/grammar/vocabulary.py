"""The tokens of a model in llguidance's form. Built once per process: 50,000 tokens take a quarter of a second.

id        0 ... width - 1     the model's tokens; special ones and those without text never match
id        width               not a token: "the text may end here". A request names the model's tokens for it
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from llguidance import LLTokenizer, TokenizerWrapper

from baton.grammar.vocabulary_source import tokens_of
from baton.text.tokenizer import Tokenizer

END: Final = b"<end>"


class Vocabulary:
    def __init__(self, tokens: Sequence[bytes], special_ids: Iterable[int], width: int) -> None:
        """`width`: of the model's head. A tokenizer may have fewer tokens, or more."""
        self.width = width
        known = [*tokens[:width], *[b""] * (width - len(tokens)), END]
        special = sorted({token for token in special_ids if token < width} | {width})
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(known, special)), n_vocab=width + 1, eos_token=width)

    @property
    def words(self) -> int:
        """Number of 32-bit words: a bit per token and one for the end."""
        return (self.width + 32) // 32

    @classmethod
    def of(cls, tokenizer: Tokenizer, width: int) -> Vocabulary:
        return cls(*tokens_of(tokenizer), width)


class _Tokens:
    """The interface that TokenizerWrapper needs. Nothing is tokenised here (language.py: no_forcing)."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        return []
