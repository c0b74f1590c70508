"""Converts pairs of texts to prompts, and vectors to scores: a class per kind of model (models/scoring.py)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import mul
from typing import Final

from baton.api.embeddings.shape import floats
from baton.api.errors import ApiError, bad, too_long
from baton.api.front import Front
from baton.api.generate.prompts import require_may_fit
from baton.errors import CallerError
from baton.protocol.request import POOLINGS, Pooling
from baton.text.tokenizer import TooManyTokens

Pair = tuple[str, str]
Prompts = Iterator[tuple[int, ...]]

QUESTION: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
ANSWER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""Qwen3-Reranker's template, from its training."""


class Cuts:
    """Truncation of documents."""

    def __init__(self, front: Front, prompt_tokens: int | None = None, document_tokens: int | None = None) -> None:
        """prompt_tokens    maximum of a whole pair; -1: what fits. None: a pair that does not fit is refused
        document_tokens  maximum of a document"""
        self._front = front
        self._context = front.model.context_tokens
        most = self._context - 1
        self.cuts = prompt_tokens is not None or not front.model.generates  # sentence-transformers cuts always
        self.prompt_tokens = most if prompt_tokens in (None, -1) else min(prompt_tokens or 0, most)
        self._document_tokens = document_tokens

    def ids(self, text: str) -> list[int]:
        """Token ids of a client's text; special tokens in it are plain text."""
        front = self._front
        if self.cuts:
            return front.tokenizer.encode_beginning(text, self.prompt_tokens)
        require_may_fit(front, len(text))
        most = None if self._document_tokens else self._context
        try:
            return front.tokenizer.encode(text, add_special_tokens=False, tokens_max=most)
        except TooManyTokens as error:
            raise too_long(max(self._context, error.tokens_at_least), self._context) from None

    def document(self, text: str) -> list[int]:
        return self.ids(text)[: self._document_tokens]

    def pair(self, query: str, document: str) -> tuple[int, ...]:
        """As the tokenizer joins both texts; the longer one is cut first."""
        try:
            ids = self._front.tokenizer.encode_pair(query, document, self.prompt_tokens, second_max=self._document_tokens)
        except CallerError as error:
            raise bad(str(error), "truncate_prompt_tokens") from None
        return tuple(ids)

    def joined(self, before: Sequence[int], document: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """The pair with its document truncated. Raises if query and template leave no room for it."""
        room = self.prompt_tokens - len(before) - len(after)
        if len(document) > room:
            if not self.cuts:
                raise too_long(len(before) + len(document) + len(after), self._context)
            if room < 1:
                others = len(before) + len(after)
                raise bad(f"query and template have {others} tokens, and a pair may have {self.prompt_tokens}", "query")
        return (*before, *document[:room], *after)


class Scorer(ABC):
    labels: tuple[int, ...] = ()
    "Token ids whose logits are the vector (SamplingParams.label_ids)."
    pooling: Pooling = "last"

    @abstractmethod
    def prompts(self, pairs: Sequence[Pair], cuts: Cuts) -> Prompts:
        """A generator, so that a request that is too long fails early."""

    @abstractmethod
    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        """One score per pair, from one vector per prompt."""


class YesNo(Scorer):
    """A decoder that answers its template's question: the score is the share of "yes" against "no". The query comes before the
    document, so documents of a query share a cached prefix."""

    def __init__(self, front: Front, instruction: str) -> None:
        tokenizer = front.tokenizer
        self.labels = tuple(_label(front, word) for word in ("yes", "no"))
        self._before = tokenizer.encode(QUESTION, add_special_tokens=False, parse_special=True)
        self._after = tokenizer.encode(ANSWER, add_special_tokens=False, parse_special=True)
        self._instruction = instruction or INSTRUCTION

    def prompts(self, pairs: Sequence[Pair], cuts: Cuts) -> Prompts:
        @lru_cache(maxsize=1)  # the documents of /rerank share one query, which may be long
        def before(query: str) -> list[int]:
            return [*self._before, *cuts.ids(f"<Instruct>: {self._instruction}\n<Query>: {query}\n<Document>:")]

        for query, document in pairs:
            # No token spans the space before the document: the ids equal those of the whole text.
            yield cuts.joined(before(query), cuts.document(f" {document}"), self._after)

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        found = []
        for vector in vectors:
            numbers = floats(vector)
            if len(numbers) != len(self.labels):
                raise ApiError(503, "an instance of an older build cannot score", code="no_vector")
            found.append(sigmoid(numbers[0] - numbers[1]))
        return found


class Cosine(Scorer):
    """An embedding model: the score is the cosine of the texts' vectors. Each distinct text is computed once."""

    def __init__(self, front: Front) -> None:
        if front.model.pooling not in POOLINGS:
            raise bad(f"the model's files want embeddings pooled by {front.model.pooling}, which is not there", "model")
        self.pooling = next(kind for kind in POOLINGS if kind == front.model.pooling)
        self._around = front.tokenizer.prefix_ids, front.tokenizer.suffix_ids
        self._places: list[tuple[int, int]] = []

    def prompts(self, pairs: Sequence[Pair], cuts: Cuts) -> Prompts:
        texts = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        self._places = [(texts[one], texts[other]) for one, other in pairs]
        before, after = self._around
        yield from (cuts.joined(before, cuts.document(text), after) for text in texts)

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        numbers = [floats(vector) for vector in vectors]
        lengths = [math.hypot(*vector) or 1.0 for vector in numbers]  # not 1 where a model's files want it so
        return [
            math.fsum(map(mul, numbers[one], numbers[other])) / (lengths[one] * lengths[other]) for one, other in self._places
        ]


class CrossEncoder(Scorer):
    """An encoder reads both texts at once, and has one class."""

    labels = (0,)
    pooling = "cls"

    def __init__(self, front: Front) -> None:
        self._sigmoid = front.model.scoring == "sigmoid"

    def prompts(self, pairs: Sequence[Pair], cuts: Cuts) -> Prompts:
        return (cuts.pair(query, document) for query, document in pairs)

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        logits = [floats(vector)[0] for vector in vectors]
        return [sigmoid(logit) for logit in logits] if self._sigmoid else logits


def scorer_of(front: Front, instruction: str) -> Scorer:
    match front.model.scoring:
        case "yes_no":
            return YesNo(front, instruction)
        case "vectors" | "sigmoid" | "logit" if instruction:
            raise bad("instruction is not supported by this model: write it before the query", "instruction")
        case "vectors":
            return Cosine(front)
        case "sigmoid" | "logit":
            return CrossEncoder(front)
    raise bad(
        f"{front.model.name} was not made to score pairs of texts: serve a reranker (bge-reranker, Qwen3-Reranker) or an "
        "embedding model",
        "model",
        code="unsupported",
    )


def sigmoid(number: float) -> float:
    return 1.0 / (1.0 + math.exp(-number)) if number >= 0 else math.exp(number) / (1.0 + math.exp(number))


def _label(front: Front, word: str) -> int:
    ids = front.tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1 or ids[0] >= front.model.head_width:
        raise bad(f'the model\'s tokenizer has no token "{word}": it cannot score by yes and no', "model", code="unsupported")
    return ids[0]
