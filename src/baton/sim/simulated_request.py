"""A client's request, as the client sees it."""

from __future__ import annotations

from baton.core.engine.request import Sequence
from baton.protocol.request import FinishReason, GenerateRequest
from baton.sim.scenario import Client
from baton.sim.tags import Oracle

QueueKey = tuple[int, int]
"""Order of requests: (priority, arrival), smaller first. Unique in a run."""
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
"""Finish reasons of a complete answer."""


class SimulatedRequest:
    __slots__ = (
        "_oracles",
        "aborted",
        "client",
        "delivered",
        "ended",
        "ended_at",
        "hit",
        "name",
        "orders",
        "prompt_places",
        "refused",
        "request",
        "sequences",
        "siblings_wait",
        "submitted",
        "thrash",
        "weights",
        "weights_known",
    )  # fmt: skip

    def __init__(self, client: Client, name: str = "", weights_known: tuple[int, ...] = (0,)) -> None:
        """`weights_known`: all weights that instances may compute with in this run."""
        self.client = client
        self.name = name or client.id
        "Name of the request, unique in a run, unlike the id."
        self.request: GenerateRequest = client.request()
        self.weights_known = weights_known
        self.weights: int | None = None
        "The weights that computed the delivered tokens. None: there are none."
        self._oracles: dict[int, list[Oracle]] = {}
        self.delivered: list[list[int]] = [[] for _ in range(client.n)]
        self.ended: list[FinishReason | None] = [None] * client.n
        self.ended_at: float | None = None
        self.hit: list[int | None] = [None] * client.n
        "Prompt tokens that the first admission skipped."
        self.thrash = [0] * client.n
        "Preemptions since the sequence's last token, without forced ones."
        self.orders: list[QueueKey] = []
        "Places of the request's sequences in the queue, once it is accepted."
        self.siblings_wait = False
        "Whether the siblings are in the queue: their leader has a token, or has ended."
        self.sequences: list[Sequence] = []
        "The instance's sequences of this request."
        self.prompt_places: list[tuple[int, ...]] = [()] * len(client.prompt)
        "Per prompt token, the weights of its delivered log-probability. The first token has none."
        self.submitted = self.aborted = False
        self.refused: str | None = None

    @property
    def oracles(self) -> list[Oracle]:
        """Oracle of each sequence, with the weights that began its answer."""
        return self.oracles_of(self.weights or 0)

    def oracles_of(self, weights: int) -> list[Oracle]:
        found = self._oracles.get(weights)
        if found is None:
            found = [Oracle(self.request, index, self.client.vocab, weights) for index in range(self.client.n)]
            self._oracles[weights] = found
        return found

    @property
    def is_answered(self) -> bool:
        return self.refused is not None or None not in self.ended
