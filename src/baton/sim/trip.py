"""One client's request, as the client sees it."""

from __future__ import annotations

from baton.core.engine.request import Sequence
from baton.protocol.request import FinishReason, GenerateRequest
from baton.sim.scenario import VOCAB, Client
from baton.sim.tags import Oracle

Order = tuple[int, int]
"""(priority, arrival): smaller comes first. Unique in a run."""


class Trip:
    __slots__ = (
        "aborted",
        "client",
        "delivered",
        "ended",
        "ended_at",
        "hit",
        "name",
        "oracles",
        "orders",
        "prompt_places",
        "refused",
        "request",
        "sequences",
        "siblings_wait",
        "submitted",
        "thrash",
    )  # fmt: skip

    def __init__(self, client: Client, name: str = "") -> None:
        self.client = client
        self.name = name or client.id
        "Unlike its id it is used once."
        self.request: GenerateRequest = client.request()
        self.oracles = [Oracle(self.request, index, VOCAB) for index in range(client.n)]
        self.delivered: list[list[int]] = [[] for _ in range(client.n)]
        self.ended: list[FinishReason | None] = [None] * client.n
        self.ended_at: float | None = None
        self.hit: list[int | None] = [None] * client.n
        "Prompt tokens that the first admission skipped."
        self.thrash = [0] * client.n
        "Preemptions, none of them forced, since its last token."
        self.orders: list[Order] = []
        "The places of its sequences, once it is taken."
        self.siblings_wait = False
        "Its leader has a token, or has ended."
        self.sequences: list[Sequence] = []
        "What the instance made of it."
        self.prompt_places = [False] * len(client.prompt)
        "Whose log-probability is told. The first token has none."
        self.submitted = self.aborted = False
        self.refused: str | None = None

    @property
    def is_answered(self) -> bool:
        return self.refused is not None or None not in self.ended
