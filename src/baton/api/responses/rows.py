"""Log-probabilities of the parts of an answer, as /v1/responses gives them: with the text that their tokens are."""

from __future__ import annotations

from typing import Any

from baton.api.generate.output import Piece
from baton.api.openai.logprobs import chat_logprobs
from baton.text.parsers.base import Content, Part
from baton.text.tokenizer import Tokenizer


class Rows:
    """A part takes the rows of as many tokens as it accounts for. Only those of text are sent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rows: list[Any] = []

    def add(self, piece: Piece) -> None:
        """Before its parts are asked for."""
        if piece.logprobs:
            self._rows += chat_logprobs(self._tokenizer, piece.logprobs)["content"]

    def of(self, part: Part) -> list[Any]:
        if not self._rows:
            return []
        taken = self._rows[: part.tokens]
        del self._rows[: part.tokens]
        return taken if isinstance(part, Content) else []
