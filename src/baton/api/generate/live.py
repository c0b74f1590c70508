"""Requests in progress: count, tenants, and aborting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from baton.api.config import ApiConfig
from baton.api.errors import ApiError
from baton.api.generate.engine_client import EngineClient
from baton.protocol.ids import RequestId


@dataclass(slots=True, eq=False)
class LiveRequest:
    tenant: bytes
    names: tuple[str, ...]
    "Names that the client may use: the id of the answer, and X-Request-Id."
    engine_ids: list[RequestId] = field(default_factory=list)
    "Id for the engine, generated here: a client cannot choose or guess one."
    aborted: bool = False
    "Whether the request was aborted. One that the engine does not have yet is then never sent."


class LiveRequests:
    def __init__(self, engine: EngineClient, config: ApiConfig) -> None:
        self._engine = engine
        self._total_max = config.limits.streams
        self._tenant_max = config.streams_of_one_key_max
        self._open: dict[LiveRequest, None] = {}
        self._of_tenant: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def admitted(self, tenant: bytes, names: tuple[str, ...]) -> Iterator[LiveRequest]:
        """Registers a request while the context is open. Raises 429 at the limit of open requests, in total or per key."""
        own = self._of_tenant.get(tenant, 0)
        if len(self._open) >= self._total_max:
            raise ApiError(429, f"{self._total_max} requests are open, which is the limit", code="too_many_streams")
        if own >= self._tenant_max:
            raise ApiError(429, f"{own} requests of this key are open, which is the limit", code="too_many_streams")
        request = LiveRequest(tenant, names)
        self._open[request] = None
        self._of_tenant[tenant] = own + 1
        try:
            yield request
        finally:
            del self._open[request]
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    def abort(self, tenant: bytes, name: str) -> int:
        """Aborts the tenant's requests of that name, which keep their output so far. Returns their number."""
        found = [request for request in self._open if request.tenant == tenant and name in request.names]
        for request in found:
            request.aborted = True
            for engine_id in request.engine_ids:
                self._engine.abort(engine_id)
        return len(found)
