"""GET and DELETE /v1/responses/{id}, and what an answer was given: of answers that were kept."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from baton.api.errors import ApiError, JsonResponse, bad
from baton.api.front import caller_of, front_of
from baton.api.responses.store import Stored
from baton.api.responses.stored_items import input_items

_PAGE_MAX = 100


async def stored_response(request: Request) -> Response:
    store, tenant, name = front_of(request).responses, caller_of(request).tenant, request.path_params["id"]
    if request.method == "DELETE":
        if not store.drop(tenant, name):
            raise _not_here()
        return JsonResponse({"id": name, "object": "response", "deleted": True})
    return Response(_stored(request).response, media_type="application/json")


async def stored_input(request: Request) -> Response:
    """A page of it: the newest first, unless order=asc; `after` is the id of the item before."""
    query, name = request.query_params, request.path_params["id"]
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= _PAGE_MAX):
        raise bad(f"limit must be a whole number from 1 to {_PAGE_MAX}", "limit")
    if order not in ("asc", "desc"):
        raise bad('order must be "asc" or "desc"', "order")
    items = input_items(name, _stored(request))
    items = items if order == "asc" else items[::-1]
    if after := query.get("after"):
        places = [place for place, item in enumerate(items, start=1) if item["id"] == after]
        items = items[places[0] :] if places else []
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JsonResponse({"object": "list", "data": page, **ends, "has_more": len(page) < len(items)})


def _stored(request: Request) -> Stored:
    stored = front_of(request).responses.get(caller_of(request).tenant, request.path_params["id"])
    if stored is None:
        raise _not_here()
    return stored


def _not_here() -> ApiError:
    return ApiError(404, "there is no stored response with that id", param="response_id", code="response_not_found")
