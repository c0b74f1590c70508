"""The tokens of a model in llguidance's form. Built once per process: 50,000 tokens take a quarter of a second.

id        0 ... width - 1     the model's tokens; special ones and those without text never match
id        width               not a token: "the text may end here". A request names the model's tokens for it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Final

from llguidance import LLTokenizer, TokenizerWrapper

from baton.grammar.expected_text import Expected
from baton.grammar.vocabulary_source import tokens_of
from baton.text.tokenizer import Tokenizer

END: Final = b"<end>"
GUESS_BYTES_MAX: Final = 24
"""Bytes of the longest token that `guess` looks for."""
GUESS_TEXT_MAX: Final = 256
"""Maximum bytes of a text that `guess` reads: more than any step drafts."""
GUESSES_MAX: Final = 1024
"""Number of guesses that are cached: sequences with the same schema use the same names."""


class Vocabulary:
    def __init__(
        self,
        tokens: Sequence[bytes],
        special_ids: Iterable[int],
        width: int,
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """`width`: of the model's head. A tokenizer may have fewer tokens, or more. `encode`: tokens of a text, for guesses."""
        self.width = width
        self._encode = encode
        self._guesses: dict[bytes, list[int]] = {}
        known = [*tokens[:width], *[b""] * (width - len(tokens)), END]
        special = sorted({token for token in special_ids if token < width} | {width})
        self.tokenizer = LLTokenizer(TokenizerWrapper(_Tokens(known, special)), n_vocab=width + 1, eos_token=width)
        self._known = known[:width]
        self._special = frozenset(special)

    @property
    def words(self) -> int:
        """Number of 32-bit words of a mask: a bit per token and one for the end."""
        return (self.width + 32) // 32

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        """Ids of ordinary tokens by their bytes, the first of equal ones."""
        ids: dict[bytes, int] = {}
        for token, text in enumerate(self._known):
            if text and len(text) <= GUESS_BYTES_MAX and token not in self._special:
                ids.setdefault(text, token)
        return ids

    @cached_property
    def single_bytes(self) -> list[int | None]:
        """A token of each single byte. None: there is none."""
        return [self._ids.get(bytes((byte,))) for byte in range(256)]

    def text_of(self, token: int) -> bytes:
        """The token's bytes. Special tokens have none."""
        return self._known[token] if 0 <= token < self.width and token not in self._special else b""

    def leading(self, expected: Expected, own: Sequence[int]) -> tuple[list[int], Expected]:
        """The first of these tokens, as far as they write the expected text, and the rest of it."""
        tokens, length = list[int](), 0
        for token in own:
            text = self.text_of(token)
            if not text or not expected.text.startswith(text, length):
                break
            tokens.append(token)
            length += len(text)
        return tokens, expected._replace(text=expected.text[length:])

    def guess_expected(self, expected: Expected) -> list[int]:
        """Tokens of the beginning of an expected text: those that are the same whatever follows it. If that is not known, the
        last token is left out: the model may join it with what follows."""
        if expected.is_last:
            return self.guess(expected.text)
        if expected.is_cut or not expected.ends:
            return self.guess(expected.text)[:-1]
        tokens, length = list[int](), 0
        for token, *others in zip(*(self.guess(expected.text + end) for end in expected.ends), strict=False):
            length += len(self._known[token])
            if length > len(expected.text) or any(other != token for other in others):
                break
            tokens.append(token)
        return tokens

    def guess(self, text: bytes) -> list[int]:
        """Tokens of the beginning of this text, as the tokenizer chooses them; where it would write something else, or is not
        known, the longest first."""
        text = text[:GUESS_TEXT_MAX]
        found = self._guesses.get(text)
        if found is None:
            if len(self._guesses) >= GUESSES_MAX:
                self._guesses.clear()
            found = self._guesses[text] = self._encoded(text) or self._longest_first(text)
        return found

    def _encoded(self, text: bytes) -> list[int]:
        words = text.decode(errors="ignore")  # the text may end within a character
        tokens = [] if self._encode is None else self._encode(words)
        ordinary = all(token < self.width and token not in self._special for token in tokens)
        return tokens if ordinary and b"".join(self._known[token] for token in tokens) == words.encode() else []

    def _longest_first(self, text: bytes) -> list[int]:
        tokens: list[int] = []
        while text:
            ends = range(min(len(text), GUESS_BYTES_MAX), 0, -1)
            length = next((end for end in ends if text[:end] in self._ids), None)
            if length is None:
                break
            tokens.append(self._ids[text[:length]])
            text = text[length:]
        return tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, width: int) -> Vocabulary:
        encode = partial(
            tokenizer.encode, add_special_tokens=False, parse_special=True
        )  # special tokens are no text, and no guess
        return cls(*tokens_of(tokenizer), width, encode)


class _Tokens:
    """The interface that TokenizerWrapper needs. It tokenises nothing (language.py: no_forcing)."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = len(tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        return []
