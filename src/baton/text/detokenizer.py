"""Token ids to text, a few at a time, for one sequence.

    tokens   "Hel" "lo "  E4 BD   A0 "!"
    push  -> "Hel" "lo "  ""      "你!"        a character is emitted with its last byte
    flush -> ""                               or U+FFFD if the output ends inside one

All pushes and the flush together equal Tokenizer.decode of all ids, however they are split. Each token costs its own bytes and
at most three held-back ones, independent of the sequence's length.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from baton.text.tokenizer import Tokenizer

_new_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Converts one sequence's ids to text. Must not be used after flush()."""

    __slots__ = ("_in_character", "_shown", "_skip_special_tokens", "_strip_space", "_tokenizer", "_utf8")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        at_text_start: bool = True,
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """at_text_start False: the ids continue a prompt, and a leading space is kept (see Tokenizer.decode).

        shown_ids   special tokens that are not skipped, because a parser needs them
        """
        self._shown = shown_ids
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strip_space = at_text_start and tokenizer.strips_leading_space
        self._utf8 = _new_utf8_decoder(errors="replace")
        self._in_character = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that is complete with these ids."""
        pieces = self._tokenizer.bytes_of(ids, skip_special_tokens=self._skip_special_tokens, shown_ids=self._shown)
        text = self._utf8.decode(b"".join(pieces))
        self._in_character = self.holds_back
        return self._without_first_space(text)

    def push_one(self, token_id: int) -> str:
        """`push` of one id. Most tokens are whole characters at a character boundary, and skip the incremental decoder."""
        if not self._in_character and not self._strip_space:
            text = self._tokenizer.ascii_texts[token_id]
            if text is not None:
                return text
        return self.push((token_id,))

    def flush(self) -> str:
        """The rest at the end of the sequence: U+FFFD for an incomplete character, else an empty string."""
        return self._without_first_space(self._utf8.decode(b"", final=True))

    @property
    def holds_back(self) -> bool:
        """Whether the output ends inside a character."""
        return bool(self._utf8.getstate()[0])

    def _without_first_space(self, text: str) -> str:
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text
