"""GET /v1/cluster: the instances behind a router, with role, state and load. Only routers serve this route."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from baton.api.http.access import ApiRoute
from baton.protocol.instance import ClusterView


def cluster_route(view: Callable[[], ClusterView]) -> ApiRoute:
    async def cluster(request: Request) -> Response:
        return Response(msgspec.json.encode(view()), media_type="application/json")

    return ApiRoute("/v1/cluster", cluster, methods=["GET"], right="admin")
