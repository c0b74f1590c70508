"""What Ollama's clients ask before they chat: which models there are, what they can, which version answers."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from baton import __version__
from baton.api.dialect import line
from baton.api.errors import JsonResponse
from baton.api.front import Front, front_of
from baton.api.http.json_body import parse_object, read_body
from baton.api.ollama.bodies import model_name
from baton.api.ollama.dialect import OLLAMA

API_VERSION: Final = "0.12.6"
"The version of Ollama whose fields are answered: clients refuse a server that seems too old for them."
_OLLAMA_NAMES: Final = {"repetition_penalty": "repeat_penalty", "max_tokens": "num_predict"}
_NEVER: Final = "9999-12-31T00:00:00Z"


async def tags(request: Request) -> Response:
    front = front_of(request)
    return JsonResponse({"models": [_model(front, name) for name in front.model.names]})


async def ps(request: Request) -> Response:
    """The model is always in memory."""
    front = front_of(request)
    more = {"expires_at": _NEVER, "size_vram": 0, "context_length": front.model.context_tokens}
    return JsonResponse({"models": [{**_model(front, front.model.name), **more}]})


async def version(request: Request) -> Response:
    return JsonResponse({"version": API_VERSION, "baton": __version__})


async def pull(request: Request) -> Response:
    """Many clients pull a model before they chat. The served one is here; a server does not fetch others. One line of JSON is
    the whole stream, so it is the same with stream: false."""
    await _require_model(request)
    return Response(line({"status": "success"}), media_type=OLLAMA.stream_type)


async def _require_model(request: Request) -> None:
    front = front_of(request)
    with front.budget.lease() as lease:
        body = parse_object(await read_body(request, front.limits, lease), front.limits)
    name = body.get("model") if body.get("model") is not None else body.get("name")
    front.schema.require_model(model_name(front, name))


async def show(request: Request) -> Response:
    front = front_of(request)
    await _require_model(request)
    return JsonResponse(
        {
            "modified_at": _modified(front),
            "details": _details(),
            "model_info": {"general.architecture": "baton", "baton.context_length": front.model.context_tokens},
            "capabilities": _capabilities(front),
            "parameters": _parameters(front),
            "template": next(iter(front.template.sources), ""),
            "modelfile": "",
            "license": "",
        }
    )


def _parameters(front: Front) -> str:
    """One parameter per line, under Ollama's names. Continue and Zed take the context length from num_ctx."""
    named = {_OLLAMA_NAMES.get(name, name): value for name, value in front.model.sampling_defaults.items()}
    if named.get("top_k", 0) <= 0:
        named.pop("top_k", None)  # no limit, for which Ollama has no value
    return "\n".join(f"{name} {value}" for name, value in {"num_ctx": front.model.context_tokens, **named}.items())


def _model(front: Front, name: str) -> dict[str, Any]:
    digest = hashlib.sha256(front.model.fingerprint.encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(front),
        "size": 0,  # the front knows nothing of the weights
        "digest": digest,
        "details": _details(),
    }


def _capabilities(front: Front) -> list[str]:
    able = {
        "completion": True,
        "embedding": True,
        "tools": front.style.has_calls,
        "thinking": front.style.has_thoughts,
    }
    return [name for name, yes in able.items() if yes]


def _details() -> dict[str, Any]:
    unknown = {"parameter_size": "", "quantization_level": ""}
    return {"parent_model": "", "format": "", "family": "", "families": [], **unknown}


def _modified(front: Front) -> str:
    return datetime.fromtimestamp(front.model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
