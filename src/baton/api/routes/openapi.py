"""GET /openapi.json: the routes and their bodies, from the tables that read them.

Answers are plain objects here: the dialects publish their own descriptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from baton import __version__
from baton.api.anthropic.fields import MESSAGES
from baton.api.embeddings import fields as embeddings
from baton.api.errors import JsonResponse
from baton.api.http.access import ApiRoute
from baton.api.infill.fields import INFILL
from baton.api.limits import RANGES
from baton.api.ollama import fields as ollama
from baton.api.openai import field_types
from baton.api.openai.known_fields import ALIASES
from baton.api.rerank import fields as rerank
from baton.api.responses.fields import RESPONSES
from baton.api.translate import Field, Table

Json = dict[str, Any]

_CHAT_NUMBERS: Final = tuple(name for name in RANGES if name not in ("logprobs", "drain_seconds"))
_COMPLETION_NUMBERS: Final = tuple(
    name for name in RANGES if name not in ("max_completion_tokens", "top_logprobs", "drain_seconds")
)


def number_schema(name: str) -> Json:
    """JSON schema of a field in RANGES."""
    allowed = RANGES[name]
    least = "exclusiveMinimum" if allowed.low_excluded else "minimum"
    return {"type": "integer" if allowed.whole else "number", least: allowed.low, "maximum": allowed.high}


def type_schema(kind: str) -> Json:
    """JSON schema of a type such as "string or array"."""
    kinds = kind.split(" or ")
    return {"type": kinds[0] if len(kinds) == 1 else kinds}


def _openai(types: Mapping[str, str], numbers: tuple[str, ...]) -> Json:
    fields = {name: type_schema(kind) for name, kind in types.items()} | {name: number_schema(name) for name in numbers}
    for name, others in ALIASES.items():
        fields |= {other: {**fields[name], "description": f"another name of {name}"} for other in others}
    return fields


CHAT: Final = _openai(field_types.CHAT, _CHAT_NUMBERS)
COMPLETION: Final = _openai(field_types.COMPLETION, _COMPLETION_NUMBERS)


def _properties_of(table: Table) -> Json:
    return {name: _schema_of_field(field) for name, field in table.items() if field.rule in ("same", "own", "harmless")}


def _schema_of_field(field: Field) -> Json:
    schema = type_schema(field.kind) if field.kind else dict({**COMPLETION, **CHAT}.get(field.to, {}))
    return {**schema, "description": field.about} if field.about else schema


_TEXT: Final = {"prompt": {"type": "string"}, "messages": {"type": "array"}, "add_special_tokens": {"type": "boolean"}}
_DRAIN: Final = {"drain_seconds": number_schema("drain_seconds")}
_MODEL: Final = {"model": {"type": "string"}}
_OPTIONS: Final = {"options": {"type": "object", "properties": _properties_of(ollama.OPTIONS)}}

BODIES: Final[dict[str, Json]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/embeddings": _properties_of(embeddings.OPENAI),
    "/infill": {**COMPLETION, **_properties_of(INFILL)},
    "/pooling": _properties_of(embeddings.POOLING),
    "/rerank": _properties_of(rerank.RERANK),
    "/v1/rerank": _properties_of(rerank.RERANK),
    "/v2/rerank": _properties_of(rerank.COHERE),
    "/score": _properties_of(rerank.SCORE),
    "/v1/score": _properties_of(rerank.SCORE),
    "/api/embed": _properties_of(embeddings.OLLAMA),
    "/api/embeddings": _properties_of(embeddings.OLLAMA_OLDER),
    "/v1/responses": _properties_of(RESPONSES),
    "/v1/responses/input_tokens": _properties_of(RESPONSES),
    "/v1/messages": _properties_of(MESSAGES),
    "/v1/messages/count_tokens": _properties_of(MESSAGES),
    "/api/chat": {**_properties_of(ollama.CHAT), **_OPTIONS},
    "/api/generate": {**_properties_of(ollama.GENERATE), **_OPTIONS},
    "/api/show": _MODEL,
    "/api/pull": _MODEL,
    "/tokenize": {**_MODEL, **_TEXT, "return_token_strs": {"type": "boolean"}},
    "/detokenize": {**_MODEL, "tokens": {"type": "array", "items": {"type": "integer"}}},
    "/v1/abort": {"id": {"type": "string"}},
    "/v1/pause": _DRAIN,
    "/v1/sleep": _DRAIN,
    "/v1/weights": {**_MODEL, **_DRAIN},
}
"""Fields of the body, by route. Bodies of other routes have no fields that matter."""


def document(routes: list[Any], model: str) -> Json:
    paths: dict[str, Json] = {}
    for route in routes:
        if isinstance(route, ApiRoute) and not route.page:
            path = re.sub(r"\{(\w+)(:\w+)?\}", r"{\1}", route.path)
            for method in sorted(route.methods or ()):
                if method != "HEAD":
                    paths.setdefault(path, {})[method.lower()] = _operation(route, method, path)
    scheme = {"key": {"type": "http", "scheme": "bearer"}, "header": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": __version__, "description": f"Serves {model}."},
        "paths": paths,
        "components": {"securitySchemes": scheme},
    }


def _operation(route: ApiRoute, method: str, path: str) -> Json:
    name = f"{method.lower()}_{re.sub(r'[^a-z0-9]+', '_', path.lower()).strip('_') or 'root'}"
    operation: Json = {
        "operationId": name,
        "tags": ["admin" if route.right == "admin" else route.dialect.name],
        "security": [] if route.right == "open" else [{"key": []}, {"header": []}],
        "responses": {"200": {"description": "the answer"}, "default": {"description": f"an error, as {route.dialect.name}'s"}},
    }
    parameters = re.findall(r"\{(\w+)\}", path)
    if parameters:
        operation["parameters"] = [
            {"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in parameters
        ]
    if method == "POST":
        schema = {"type": "object", "properties": BODIES.get(path, {})}
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
    return operation


async def openapi(request: Request) -> Response:
    app = request.app
    return JsonResponse(document(app.routes, app.state.front.model.name))
