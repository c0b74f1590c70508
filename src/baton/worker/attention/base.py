"""The interface of attention backends of the torch forward pass."""

from __future__ import annotations

from typing import Protocol

from baton.models.layers.attention import AttentionContext
from baton.worker.flat_batch import Spans


class AttentionBackend(Protocol):
    """Created once per pool; `begin` is called once per step, and its result once per layer."""

    name: str

    def begin(self, spans: Spans) -> AttentionContext: ...
