"""Requests for scores of pairs of texts, and their answers. For the engine they are pooled prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from baton.api.errors import ApiError, bad, too_long
from baton.api.fields import shown, whole_number
from baton.api.front import Front
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, embedding_job
from baton.api.generate.prompts import within_total
from baton.api.generate.shape import Events, Put, Shape, require_vectors
from baton.api.http.auth import ApiCaller
from baton.api.limits import FieldRange
from baton.api.rerank.fields import COHERE, RERANK, SCORE
from baton.api.translate import Table, translated
from baton.text.pair_scores import Cuts, Pair, PairModel, PairRefused, PairTooLong, Scorer, scorer_of

_COUNT: Final = FieldRange(1, 2**31 - 1)
COHERE_DOCUMENT_TOKENS: Final = 4096


class PairShape(Shape):
    table: ClassVar[Table]

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self._scorer: Scorer | None = None
        self._model = pair_model(front)

    @abstractmethod
    def pairs(self, body: dict[str, Any]) -> list[Pair]: ...

    @abstractmethod
    def answer(self, scores: list[float], usage: dict[str, int]) -> dict[str, Any]: ...

    def cuts(self, body: dict[str, Any]) -> Cuts:
        return Cuts(self._model, _truncation(body))

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        settings = translated(body, self.table)
        self.front.schema.require_model(body.get("model"))
        try:
            scorer, prompts = self._prompts(body)
        except PairRefused as error:
            raise _refusal(error, self._model) from None
        self._scorer = scorer
        asked = {**settings, "model": body.get("model"), "prompt": prompts, "max_tokens": 1, "temperature": 0, "stream": False}
        completion = self.front.schema.completion(asked, prompts_max=len(prompts))
        return embedding_job(self.front, completion, scorer.pooling, caller, labels=scorer.labels)

    def _prompts(self, body: dict[str, Any]) -> tuple[Scorer, list[list[int]]]:
        scorer = scorer_of(self._model, _text(body.get("instruction"), "instruction", optional=True))
        pairs, most = self.pairs(body), self.front.limits.embedding_inputs
        if len(pairs) > most:
            raise bad(f"there are {len(pairs)} pairs of texts and at most {most} are allowed", "documents")
        prompts = within_total(self.front, scorer.prompts(pairs, self.cuts(body)), "documents")
        return scorer, [list(ids) for ids in prompts]

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        assert self._scorer is not None
        scores = self._scorer.scores([piece.embedding for piece in require_vectors(pieces)])
        return self.answer(scores, {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens})

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        raise NotImplementedError  # the table refuses `stream`


class RerankShape(PairShape):
    """POST /rerank and /v1/rerank, as in vLLM, Jina and Cohere's first version."""

    kind = "rerank"
    id_prefix = "rerank-"
    table = RERANK
    returns_documents: ClassVar[bool] = True

    def pairs(self, body: dict[str, Any]) -> list[Pair]:
        query = _text(body.get("query"), "query")
        documents = body.get("documents")
        if not isinstance(documents, list) or not documents:
            raise bad(f"documents must be a list of texts, not {'empty' if documents == [] else shown(documents)}", "documents")
        self._documents = [_document(each, f"documents[{place}]") for place, each in enumerate(documents)]
        top_n = body.get("top_n")
        self._top_n = len(documents) if top_n is None else whole_number(top_n, _COUNT, "top_n")
        returns = body.get("return_documents")
        if not isinstance(returns, bool | None):
            raise bad(f"return_documents must be true or false, not {shown(returns)}", "return_documents")
        self._returns = self.returns_documents if returns is None else returns
        return [(query, document) for document in self._documents]

    def cuts(self, body: dict[str, Any]) -> Cuts:
        most = body.get("max_tokens_per_doc")
        tokens = None if most is None else whole_number(most, _COUNT, "max_tokens_per_doc")
        return Cuts(self._model, _truncation(body), tokens)

    def answer(self, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
        results: list[dict[str, Any]] = [{"index": place, "relevance_score": scores[place]} for place in order[: self._top_n]]
        if self._returns:
            results = [{**each, "document": {"text": self._documents[each["index"]]}} for each in results]
        return {"id": self.id, "model": self.front.model.name, "results": results, "usage": usage}


class CohereRerankShape(RerankShape):
    """POST /v2/rerank, as at Cohere: long documents are truncated, and the answer does not repeat them."""

    table = COHERE
    returns_documents = False

    def cuts(self, body: dict[str, Any]) -> Cuts:
        most = body.get("max_tokens_per_doc")
        tokens = COHERE_DOCUMENT_TOKENS if most is None else whole_number(most, _COUNT, "max_tokens_per_doc")
        asked = _truncation(body)
        return Cuts(self._model, -1 if asked is None else asked, tokens)

    def answer(self, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
        meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": usage["prompt_tokens"], "output_tokens": 0}}
        return {**super().answer(scores, usage), "meta": meta}


class ScoreShape(PairShape):
    """POST /score and /v1/score, as in vLLM."""

    kind = "score"
    id_prefix = "score-"
    table = SCORE

    def pairs(self, body: dict[str, Any]) -> list[Pair]:
        ones, others = (_texts(body, *names) for names in (("text_1", "queries"), ("text_2", "documents")))
        if len(ones) == 1:
            ones = ones * len(others)
        if len(ones) != len(others):
            raise bad(f"text_1 has {len(ones)} texts and text_2 {len(others)}: give as many, or one text_1", "text_2")
        return list(zip(ones, others, strict=True))

    def answer(self, scores: list[float], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.front.model.name,
            "data": [{"index": place, "object": "score", "score": score} for place, score in enumerate(scores)],
            "usage": usage,
        }


def pair_model(front: Front) -> PairModel:
    model = front.model
    return PairModel(
        name=model.name,
        tokenizer=front.tokenizer,
        context_tokens=model.context_tokens,
        head_width=model.head_width,
        scoring=model.scoring,
        pooling=model.pooling,
        generates=model.generates,
        characters_per_token=front.limits.characters_per_token,
    )


def _refusal(error: PairRefused, model: PairModel) -> ApiError:
    if isinstance(error, PairTooLong):
        return too_long(error.tokens, model.context_tokens)
    return bad(str(error), error.param, error.code)


def _truncation(body: dict[str, Any]) -> int | None:
    value = body.get("truncate_prompt_tokens")
    return value if value is None or value == -1 else whole_number(value, _COUNT, "truncate_prompt_tokens")


def _text(value: Any, name: str, *, optional: bool = False) -> str:
    if optional and value is None:
        return ""
    if not isinstance(value, str) or not (value or optional):
        raise bad(f"{name} must be a text, not {'an empty one' if value == '' else shown(value)}", name.split("[", 1)[0])
    return value


def _document(value: Any, place: str) -> str:
    return _text(value.get("text") if isinstance(value, dict) else value, place)


def _texts(body: dict[str, Any], name: str, other: str) -> list[str]:
    used = other if body.get(name) is None else name
    value = body.get(used)
    if isinstance(value, list):
        if not value:
            raise bad(f"{used} is an empty list", used)
        return [_text(each, f"{used}[{place}]") for place, each in enumerate(value)]
    return [_text(value, name if value is None else used)]
