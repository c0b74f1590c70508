"""POST /pooling, as in vLLM: the vectors of /v1/embeddings in another frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.api.embeddings.fields import POOLING
from baton.api.embeddings.shape import EmbeddingShape
from baton.api.errors import JsonRows, bad
from baton.api.fields import shown
from baton.api.generate.generation import Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job
from baton.api.http.auth import ApiCaller


class PoolingShape(EmbeddingShape):
    kind = "pooling"
    id_prefix = "pool-"
    table = POOLING

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        if body.get("task") not in (None, "embed", "auto"):
            raise bad(f'task must be "embed", not {shown(body["task"])}', "task", code="unsupported")
        return super().job(body, caller)

    def answer(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        frame = {"id": self.id, "object": "list", "created": self.created}
        return {**frame, **super().answer(pieces, usage), "data": JsonRows(self._pooled_row, pieces)}

    def _pooled_row(self, piece: Piece) -> dict[str, Any]:
        return {"index": piece.choice, "object": "pooling", "data": self._row(piece)["embedding"]}
