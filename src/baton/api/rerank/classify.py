"""POST /classify, as in vLLM: the probabilities of a model's classes for each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.api.embeddings.fields import CLASSIFY
from baton.api.embeddings.shape import EmbeddingShape
from baton.api.errors import JsonRows, bad
from baton.api.generate.generation import Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job
from baton.api.http.auth import ApiCaller
from baton.protocol.request import Pooling
from baton.protocol.vectors import floats
from baton.text.pair_scores import probabilities_of


class ClassifyShape(EmbeddingShape):
    kind = "classify"
    id_prefix = "classify-"
    table = CLASSIFY

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        self.labels = tuple(range(len(self.front.model.labels)))
        return super().job(body, caller)

    def answer(self, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        frame = {"id": self.id, "object": "list", "created": self.created}
        return {**frame, **super().answer(pieces, usage), "data": JsonRows(self._classified, pieces)}

    def _require_task(self) -> None:
        if not self.front.model.labels:
            raise bad(
                f"{self.front.model.name} has no classes: serve a model for sequence classification",
                "model",
                code="unsupported",
            )

    def _pooling(self, asked: Any) -> Pooling:
        """The head pools by itself. This pooling makes the engine compute the whole prompt, whatever is cached."""
        return "cls"

    def _classified(self, piece: Piece) -> dict[str, Any]:
        probabilities = probabilities_of(floats(piece.embedding), self.front.model.scoring)
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        label = self.front.model.labels[best]
        return {"index": piece.choice, "label": label, "probs": probabilities, "num_classes": len(probabilities)}
