"""GET /v1/models and /v1/models/{id}. Anthropic's clients use the same path, so its fields are included."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from baton.api.errors import JsonResponse
from baton.api.front import Front, front_of


async def list_models(request: Request) -> Response:
    front = front_of(request)
    names = front.model.names
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return JsonResponse({"object": "list", "data": [_model(front, name) for name in names], **ends})


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
        "max_model_len": front.model.context_tokens if front.model.generates else front.model.input_tokens,
        "tasks": list(front.model.tasks),
        "sampling_defaults": dict(front.model.sampling_defaults),
        "pooling": front.model.pooling,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(front.model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
