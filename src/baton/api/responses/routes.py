"""GET and DELETE /v1/responses/{id}: answers that were kept."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.api.errors import ApiError, JsonResponse
from baton.api.front import caller_of, front_of


async def stored_response(request: Request) -> Response:
    store, tenant, name = front_of(request).responses, caller_of(request).tenant, request.path_params["id"]
    if request.method == "DELETE":
        if not store.drop(tenant, name):
            raise _not_here()
        return JsonResponse({"id": name, "object": "response", "deleted": True})
    stored = store.get(tenant, name)
    if stored is None:
        raise _not_here()
    return Response(stored.response, media_type="application/json")


def _not_here() -> ApiError:
    return ApiError(404, "there is no stored response with that id", param="response_id", code="response_not_found")
