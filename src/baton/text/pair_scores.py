"""Scores of pairs of texts, and classes of texts: pairs become prompts, vectors become scores (models/scoring.py)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import Final

from baton.errors import CallerError, Unavailable
from baton.protocol.request import POOLINGS, Pooling
from baton.protocol.vectors import floats
from baton.text.tokenizer import Tokenizer, TooManyTokens

Pair = tuple[str, str]
Prompts = Iterator[tuple[int, ...]]

QUESTION: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
ANSWER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""Template of Qwen3-Reranker, from its training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairModel:
    """Properties of a model that determine the prompts of pairs.

    `scoring`, `pooling`, `generates` and `head_width` are as in api/config.py (ServedModel)."""

    name: str
    tokenizer: Tokenizer
    context_tokens: int
    head_width: int
    scoring: str
    pooling: str
    generates: bool
    characters_per_token: int
    "Maximum of characters per token of the context. A longer text is refused before it is tokenised."


class PairRefused(CallerError):
    """The pair cannot be scored. `param` and `code` are those of an answer over HTTP."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class PairTooLong(PairRefused):
    def __init__(self, tokens: int, context_tokens: int) -> None:
        """`tokens`: the pair has at least this many."""
        super().__init__(f"a pair of {tokens} tokens, and at most {context_tokens - 1} fit the context", "documents")
        self.tokens = tokens


class Cuts:
    """Truncation of documents."""

    def __init__(self, model: PairModel, prompt_tokens: int | None = None, document_tokens: int | None = None) -> None:
        """prompt_tokens    maximum of a whole pair; -1: what fits. None: a pair that does not fit is refused
        document_tokens  maximum of a document"""
        self._model = model
        self._context = model.context_tokens
        most = self._context - 1
        self.cuts = prompt_tokens is not None or not model.generates  # sentence-transformers always cuts
        self.prompt_tokens = most if prompt_tokens in (None, -1) else min(prompt_tokens or 0, most)
        self._document_tokens = document_tokens

    def ids(self, text: str) -> list[int]:
        """Token ids of a client's text; special tokens in it are plain text."""
        tokenizer = self._model.tokenizer
        if self.cuts:
            return tokenizer.encode_beginning(text, self.prompt_tokens)
        if len(text) > self._model.characters_per_token * self._context:
            raise PairTooLong(len(text) // self._model.characters_per_token, self._context)
        most = None if self._document_tokens else self._context
        try:
            return tokenizer.encode(text, add_special_tokens=False, tokens_max=most)
        except TooManyTokens as error:
            raise PairTooLong(max(self._context, error.tokens_at_least), self._context) from None

    def document(self, text: str) -> list[int]:
        return self.ids(text)[: self._document_tokens]

    def pair(self, query: str, document: str) -> tuple[int, ...]:
        """The pair as the tokenizer joins both texts; the longer one is cut first."""
        try:
            ids = self._model.tokenizer.encode_pair(query, document, self.prompt_tokens, second_max=self._document_tokens)
        except CallerError as error:
            raise PairRefused(str(error), "truncate_prompt_tokens") from None
        return tuple(ids)

    def joined(self, before: Sequence[int], document: Sequence[int], after: Sequence[int]) -> tuple[int, ...]:
        """The pair with its document truncated. Raises if query and template leave no room for it."""
        room = self.prompt_tokens - len(before) - len(after)
        if len(document) > room:
            if not self.cuts:
                raise PairTooLong(len(before) + len(document) + len(after), self._context)
            if room < 1:
                others = len(before) + len(after)
                raise PairRefused(f"query and template have {others} tokens, and a pair may have {self.prompt_tokens}", "query")
        return (*before, *document[:room], *after)


class Scorer(ABC):
    labels: tuple[int, ...] = ()
    "Token ids whose logits are the vector (SamplingParams.label_ids)."
    pooling: Pooling = "last"

    @abstractmethod
    def prompts(self, pairs: Sequence[Pair], cuts: Cuts) -> Prompts:
        """Prompts of the pairs, as a generator: a request that is too long fails early."""

    @abstractmethod
    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        """One score per pair, from one vector per prompt."""


class YesNo(Scorer):
    """A decoder that answers its template's question: the score is the share of "yes" against "no". The query comes before the
    document, so documents of a query share a cached prefix."""

    def __init__(self, model: PairModel, instruction: str) -> None:
        tokenizer = model.tokenizer
        self.labels = tuple(_label(model, word) for word in ("yes", "no"))
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
                raise Unavailable("an instance of an older build cannot score")
            found.append(sigmoid(numbers[0] - numbers[1]))
        return found


class Cosine(Scorer):
    """An embedding model: the score is the cosine of the texts' vectors. Each distinct text is computed once."""

    def __init__(self, model: PairModel) -> None:
        if model.pooling not in POOLINGS:
            raise PairRefused(f"the model's files want embeddings pooled by {model.pooling}, which is not there", "model")
        self.pooling = next(kind for kind in POOLINGS if kind == model.pooling)
        self._around = model.tokenizer.prefix_ids, model.tokenizer.suffix_ids
        self._places: list[tuple[int, int]] = []

    def prompts(self, pairs: Sequence[Pair], cuts: Cuts) -> Prompts:
        texts = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
        self._places = [(texts[one], texts[other]) for one, other in pairs]
        before, after = self._around
        yield from (cuts.joined(before, cuts.document(text), after) for text in texts)

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        numbers = [floats(vector) for vector in vectors]
        lengths = [math.hypot(*vector) or 1.0 for vector in numbers]  # not 1 if a model's files say so
        return [
            math.fsum(map(mul, numbers[one], numbers[other])) / (lengths[one] * lengths[other]) for one, other in self._places
        ]


class CrossEncoder(Scorer):
    """An encoder reads both texts at once, and has one class."""

    labels = (0,)
    pooling = "cls"

    def __init__(self, model: PairModel) -> None:
        self._sigmoid = model.scoring == "sigmoid"

    def prompts(self, pairs: Sequence[Pair], cuts: Cuts) -> Prompts:
        return (cuts.pair(query, document) for query, document in pairs)

    def scores(self, vectors: Sequence[bytes]) -> list[float]:
        logits = [floats(vector)[0] for vector in vectors]
        return [sigmoid(logit) for logit in logits] if self._sigmoid else logits


def scorer_of(model: PairModel, instruction: str) -> Scorer:
    match model.scoring:
        case "yes_no":
            return YesNo(model, instruction)
        case "vectors" | "sigmoid" | "logit" if instruction:
            raise PairRefused("instruction is not supported by this model: write it before the query", "instruction")
        case "vectors":
            return Cosine(model)
        case "sigmoid" | "logit":
            return CrossEncoder(model)
    raise PairRefused(
        f"{model.name} was not made to score pairs of texts: serve a reranker (bge-reranker, Qwen3-Reranker) or an "
        "embedding model",
        "model",
        code="unsupported",
    )


def sigmoid(number: float) -> float:
    return 1.0 / (1.0 + math.exp(-number)) if number >= 0 else math.exp(number) / (1.0 + math.exp(number))


def _label(model: PairModel, word: str) -> int:
    ids = model.tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1 or ids[0] >= model.head_width:
        raise PairRefused(
            f'the model\'s tokenizer has no token "{word}": it cannot score by yes and no', "model", code="unsupported"
        )
    return ids[0]


def probabilities_of(logits: list[float], scoring: str) -> list[float]:
    """Probabilities of the classes of a model that classifies."""
    if scoring == "logit":
        return logits
    if scoring != "softmax":
        return [sigmoid(logit) for logit in logits]
    shares = [math.exp(logit - max(logits)) for logit in logits]
    return [share / math.fsum(shares) for share in shares]
