"""One client's request, as the client sees it."""

from __future__ import annotations

from baton.core.engine.request import Sequence
from baton.protocol.request import FinishReason, GenerateRequest
from baton.sim.scenario import VOCAB, Client
from baton.sim.tags import Oracle


class Trip:
    __slots__ = ("aborted", "client", "delivered", "ended", "ended_at", "hit", "oracles", "refused", "request", "sequences",
                 "submitted", "thrash")  # fmt: skip

    def __init__(self, client: Client) -> None:
        self.client = client
        self.request: GenerateRequest = client.request()
        self.oracles = [Oracle(self.request, index, VOCAB) for index in range(client.n)]
        self.delivered: list[list[int]] = [[] for _ in range(client.n)]
        self.ended: list[FinishReason | None] = [None] * client.n
        self.ended_at: float | None = None
        self.hit: list[int | None] = [None] * client.n
        "Prompt tokens that the first admission skipped."
        self.thrash = [0] * client.n
        "Preemptions, none of them forced, since its last token."
        self.sequences: list[Sequence] = []
        "What the instance made of it."
        self.submitted = self.aborted = False
        self.refused: str | None = None
