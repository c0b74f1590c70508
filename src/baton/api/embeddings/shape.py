"""Requests for embeddings and their answers. For the engine an embedding is a prompt whose hidden states are pooled
(worker/pooling.py): scheduled, preempted and replayed like any other."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from baton.api.embeddings.fields import OLLAMA, OLLAMA_OLDER, OPENAI
from baton.api.errors import JsonRows, bad
from baton.api.fields import expect, shown, whole_number
from baton.api.front import Front
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, embedding_job
from baton.api.generate.shape import Events, Put, Shape, require_vectors
from baton.api.http.auth import ApiCaller
from baton.api.limits import FieldRange
from baton.api.ollama.fields import model_name
from baton.api.translate import Table, errors_named_by, translated
from baton.protocol.request import POOLINGS, Pooling
from baton.protocol.vectors import floats

_DIMENSIONS: Final = FieldRange(1, 2**31 - 1)


class EmbeddingShape(Shape):
    """POST /v1/embeddings."""

    kind = "embedding"
    id_prefix = "embd-"
    table: ClassVar[Table] = OPENAI
    labels: tuple[int, ...] = ()
    "Classes whose logits replace the vector."

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self.cuts_by_default = True
        "Whether too long inputs are cut: an encoder does so, as sentence-transformers does."
        self._model = front.model.name
        self._base64 = False
        self._dimensions: int | None = None

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        encoding = body.get("encoding_format") or "float"
        if encoding not in ("float", "base64"):
            raise bad('encoding_format must be "float" or "base64"', "encoding_format")
        self._require_task()
        pooling = self._pooling(body.get("pooling"))
        if not self.front.model.generates and self.cuts_by_default:
            body = {"truncate_prompt_tokens": -1, **body}
        self._base64 = encoding == "base64"
        if (dimensions := body.get("dimensions")) is not None:
            self._dimensions = whole_number(dimensions, _DIMENSIONS, "dimensions")
        asked = {**translated(body, self.table), "model": self._asked_model(body), "max_tokens": 1, "temperature": 0}
        asked["stream"] = False
        most = self.front.limits.embedding_inputs
        with errors_named_by((self.table, "")):
            completion = self.front.schema.completion(asked, prompts_max=most)
            return embedding_job(self.front, completion, pooling, caller, labels=self.labels)

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        for piece in require_vectors(pieces):
            if self._dimensions is not None and self._dimensions > (width := len(piece.embedding) // 4):
                raise bad(f"dimensions must be at most {width}, the width of the model, not {self._dimensions}", "dimensions")
        return self.answer(pieces, usage)

    def answer(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        tokens = usage.prompt_tokens
        return {
            "object": "list",
            "model": self.front.model.name,
            "data": JsonRows(self._row, pieces),
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        raise NotImplementedError  # the table refuses `stream`

    def _require_task(self) -> None:
        if self.front.model.labels:
            words = "classifies texts and gives no vectors: ask /classify, /rerank or /score"
            raise bad(f"{self.front.model.name} {words}", "model", code="unsupported")

    def _asked_model(self, body: dict[str, Any]) -> Any:
        return body.get("model")

    def _pooling(self, asked: Any) -> Pooling:
        names = ", ".join(f'"{name}"' for name in POOLINGS)
        pooling: str = asked or self.front.model.pooling
        if pooling in POOLINGS:
            return pooling
        if asked:
            raise bad(f"pooling must be one of {names}, not {shown(asked)}", "pooling")
        raise bad(f"the model's files want embeddings pooled by {pooling}: give pooling, one of {names}", "pooling")

    def _vector(self, piece: Piece) -> list[float]:
        numbers = floats(piece.embedding)
        return numbers if self._dimensions is None else shortened(numbers, self._dimensions)

    def _row(self, piece: Piece) -> dict[str, Any]:
        if self._base64 and self._dimensions is None:  # unconverted, because bulk indexing takes this path
            vector: str | list[float] = base64.b64encode(piece.embedding).decode()
        else:
            numbers = self._vector(piece)
            vector = base64.b64encode(packed(numbers)).decode() if self._base64 else numbers
        return {"object": "embedding", "index": piece.choice, "embedding": vector}


class OllamaEmbedShape(EmbeddingShape):
    """POST /api/embed."""

    kind = "ollama.embed"
    table = OLLAMA

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        if expect(bool, True if body.get("truncate") is None else body["truncate"], "truncate"):
            body = {"truncate_prompt_tokens": -1, **body}
        self.cuts_by_default = False
        return super().job(body, caller)

    def _asked_model(self, body: dict[str, Any]) -> Any:
        if isinstance(body.get("model"), str):
            self._model = body["model"]
        return model_name(self.front, body.get("model"))

    def answer(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return {
            "model": self._model,
            "embeddings": JsonRows(self._vector, pieces),
            "total_duration": int((usage.prompt_seconds + usage.output_seconds) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
        }


class OllamaEmbeddingsShape(OllamaEmbedShape):
    """POST /api/embeddings, the older route: one text, one vector."""

    kind = "ollama.embeddings"
    table = OLLAMA_OLDER

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        expect(str, body.get("prompt"), "prompt")
        return super().job(body, caller)

    def answer(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return {"embedding": self._vector(pieces[0])}


def packed(numbers: list[float]) -> bytes:
    """The vector as little-endian float32."""
    vector = array("f", numbers)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector.tobytes()


def shortened(numbers: list[float], dimensions: int) -> list[float]:
    """The first `dimensions` numbers of a vector, scaled to length 1. Matryoshka models have most of the meaning there."""
    begin = numbers[:dimensions]
    length = math.sqrt(math.fsum(number * number for number in begin)) or 1.0
    return floats(packed([number / length for number in begin]))
