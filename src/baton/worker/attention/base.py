"""What an attention backend of the torch forward pass must offer."""

from __future__ import annotations

from typing import Protocol

from baton.models.layers.attention import AttentionContext
from baton.worker.flat_batch import Spans


class AttentionBackend(Protocol):
    """Made once for a pool; asked once a step for what the model calls once a layer."""

    name: str

    def begin(self, spans: Spans) -> AttentionContext: ...
