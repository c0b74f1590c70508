"""The queue of one router, by its own order: which request may be placed before which (34), and which finds it full (22).

    queue       A (urgent)   B   C
    placed on a pair: C      wrong, if A or B needs no more than C does, and was never tried anywhere

A request may be passed over for reasons of its own: an instance that refused it or lost it, or pools that are too small for it.
So only requests that no instance has had yet, and that are no larger than the placed one, count against the router. A request
on a pair uses a prefill instance, which they could have used; a request placed whole may need none, so those are checked only
if no instance prefills for others. If some instances cannot read from others, the pairs matter: then nothing is checked.
"""

from __future__ import annotations

from typing import Any

from baton.config import RouterConfig
from baton.core.cluster.events import Deliver, FailRequest, RejectRequest
from baton.errors import InvariantBroken
from baton.protocol.handoff import Reserve
from baton.protocol.request import GenerateRequest


class LineWatch:
    def __init__(self, config: RouterConfig, *, pairs: bool) -> None:
        """`pairs`: whether some instances prefill for others."""
        self._config = config
        self._pairs = pairs
        self._orders: dict[str, tuple[int, int]] = {}
        self._untried: dict[str, GenerateRequest] = {}
        "Requests in the queue that no instance has had yet."
        self._attempts: dict[str, int] = {}
        "Last attempt of each request that was placed."

    def clear(self) -> None:
        """Forget everything: the router restarts."""
        for table in (self._orders, self._untried, self._attempts):
            table.clear()

    def arrives(self, request: GenerateRequest) -> None:
        priority = request.priority if self._config.order == "priority" else 0
        self._orders[request.id] = (priority, len(self._orders))
        self._untried[request.id] = request

    def answered(self, request: GenerateRequest, queued: int, effects: list[Any]) -> None:
        """Check the answer to the request's arrival, after which `queued` sequences are in the queue."""
        refused = next((e.refused for e in effects if type(e) is RejectRequest and e.request == request.id), None)
        needed, limit = queued + (len(request.wanted) if refused is not None else 0), self._config.queue_requests_max
        if refused is None or refused.reason == "queue_full":
            sent = (refused.needed, refused.limit) if refused is not None else None
            if (sent is None) != (needed <= limit) or (sent is not None and sent != (needed, limit)):
                answer = "let in" if refused is None else f"turned away with {sent}"
                raise InvariantBroken(f"{request.id} is {answer}: {needed} would be in a line of {limit}", invariant=22)

    def effect(self, effect: Any) -> None:
        match effect:
            case RejectRequest() | FailRequest():
                self._untried.pop(effect.request, None)
            case Deliver(emit):
                for ended in emit.ended:
                    self._untried.pop(ended.request, None)

    def sent(self, message: Any, *, readable: bool) -> None:
        """Check the placement of a request. `readable`: every instance can read from every other, as far as the router knew
        before."""
        match message:
            case GenerateRequest():
                self._placed(message, exact=not self._pairs)
            case Reserve(request=request):
                self._placed(request, exact=readable)

    def _placed(self, request: GenerateRequest, *, exact: bool) -> None:
        self._untried.pop(request.id, None)
        if self._attempts.get(request.id) == request.attempt:
            return  # only a lease renewal
        self._attempts[request.id] = request.attempt
        if not exact:
            return
        order, tokens = self._orders[request.id], len(request.prompt) + request.sampling.max_tokens
        for other in self._untried.values():
            smaller = len(other.prompt) <= len(request.prompt) and len(other.prompt) + other.sampling.max_tokens <= tokens
            if smaller and self._orders[other.id] < order:
                raise InvariantBroken(f"{request.id} is placed before {other.id}, which needs no more", invariant=34)
