"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from baton.api.errors import JsonResponse
from baton.api.front import Front, front_of


async def list_models(request: Request) -> Response:
    front = front_of(request)
    return JsonResponse({"object": "list", "data": [_model(front, name) for name in front.model.names]})


async def get_model(request: Request) -> Response:
    front = front_of(request)
    name = request.path_params["name"]
    front.schema.require_model(name)
    return JsonResponse(_model(front, name))


def _model(front: Front, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": front.model.created,
        "owned_by": "baton",
        "root": front.model.name,
        "parent": None,
        "max_model_len": front.model.context_tokens,
        "sampling_defaults": dict(front.model.sampling_defaults),
    }
