"""Scores of pairs of texts (`LLM.score`) and classes of texts (`LLM.classify`): pooled prompts, as over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from baton.errors import CallerError
from baton.llm.call import ClientCall
from baton.llm.outputs import Classes, Classification, Embedding, PairScore, Score
from baton.protocol.request import SamplingParams
from baton.protocol.vectors import floats
from baton.text.pair_scores import Cuts, Pair, PairModel, probabilities_of, scorer_of

CHARACTERS_PER_TOKEN: Final = 64
"""Characters per token of the context, as in api/limits.py: longer texts are refused before they are tokenised."""


class PairScores:
    """The prompts of a call, and the scores that follow from their vectors."""

    def __init__(self, model: PairModel, instruction: str, prompt_tokens: int | None) -> None:
        self._scorer = scorer_of(model, instruction)
        self._cuts = Cuts(model, prompt_tokens)
        self.sampling = SamplingParams(max_tokens=1, pooling=self._scorer.pooling, label_ids=self._scorer.labels)

    def prompts(self, data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[list[int]]:
        return [list(ids) for ids in self._scorer.prompts(pairs_of(data_1, data_2), self._cuts)]

    def scores(self, call: ClientCall) -> list[PairScore]:
        return [PairScore(Score(score)) for score in self._scorer.scores(vectors_of(call))]


def pairs_of(data_1: str | Sequence[str], data_2: str | Sequence[str]) -> list[Pair]:
    """Pairs of texts: one text of `data_1` is paired with every text of `data_2`."""
    ones, others = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
    if not all(isinstance(text, str) and text for text in (*ones, *others)):
        raise CallerError("score takes texts, and none may be empty")
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise CallerError(f"{len(ones)} and {len(others)} texts: give as many of both, or one of the first")
    return list(zip(ones, others, strict=True))


def classes_of(call: ClientCall, labels: Sequence[str], scoring: str) -> list[Classification]:
    found = []
    for answer, vector in zip(call.answers.values(), vectors_of(call), strict=True):
        probs = probabilities_of(floats(vector), scoring)
        classes = Classes(probs, labels[max(range(len(probs)), key=probs.__getitem__)])
        found.append(Classification(answer.prompt_token_ids, classes, answer.prompt, answer.request_id))
    return found


def vectors_of(call: ClientCall) -> list[bytes]:
    """One vector per prompt. Raises EngineError if one is missing."""
    for request, answer in call.answers.items():
        Embedding.of(answer, call.vectors.get(request, b""))
    return [call.vectors[request] for request in call.answers]
