"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}} and a fitting status.

A message names the field and the numbers. A message never repeats a prompt, an output, a key or an internal name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil
from typing import Any

import orjson
from starlette.responses import Response

from baton.api.foreign_paths import FOREIGN_PATHS
from baton.api.generate.engine_client import EngineRefused
from baton.errors import CallerError, EngineError, Overloaded, Unavailable

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# HTTP status by reason of refusal: 4xx for the caller's fault, 429 and 503 where a retry can help.
_STATUS_OF_REFUSAL = {
    "never_fits": 400,
    "never_planned": 400,
    "never_queued": 400,
    "queue_full": 429,
    "queue_tokens_full": 429,
    "queued_too_long": 429,
    "duplicate_id": 409,
    "draining": 503,
    "paused": 503,
    "worker_gone": 503,
    "no_room": 503,
}


class ApiError(EngineError):
    """An answer other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.http_status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.http_status, "invalid_request_error" if self.http_status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def not_found(routers: Sequence[str] = (), path: str = "") -> ApiError:
    """The error for a path without a route. `routers`: addresses of this instance's routers, if it serves only those. `path`:
    the path that the client requested."""
    message = f"no such route: {_address_hint(path)}"
    if routers:
        message = (
            "no such route: this is an instance of a cluster, with /health, /ready, /metrics and the like; requests go to its "
            f"router, whose cluster port is {' or '.join(routers)}"
        )
    return ApiError(404, message, code="not_found")


def _address_hint(path: str) -> str:
    """A hint about the address: OpenAI's clients need one that ends in /v1, those of Anthropic and Ollama one that does not. Or
    the route to use for a path of another server."""
    if path.startswith(("/v1/v1/", "/v1/api/")):
        return "this client adds the path itself; configure the server's address without /v1"
    if path in ("/chat/completions", "/completions", "/responses", "/embeddings", "/models", "/messages"):
        return f"it is /v1{path}; configure an OpenAI client with /v1 at the end of the server's address"
    if (instead := FOREIGN_PATHS.get(path)) is not None:
        return f"use {instead}" if instead.startswith(("GET ", "POST ")) else instead
    return "try POST /v1/chat/completions, POST /v1/completions or GET /v1/models"


def as_api_error(error: Exception) -> ApiError:
    """The error as the client may see it. Internal and unknown errors become a 500 without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineRefused):
        refused, status = error.refused, _STATUS_OF_REFUSAL[error.refused.reason]
        known = error.retry_seconds is not None and status in (429, 503)
        headers = {"retry-after": str(max(1, ceil(error.retry_seconds or 0.0)))} if known else None
        return ApiError(status, str(refused), code=refused.reason, headers=headers)
    if isinstance(error, CallerError):
        return ApiError(400, str(error), param=_field_named_by(str(error)))
    if isinstance(error, Overloaded | Unavailable):
        return ApiError(error.http_status, str(error) or "try again later", code=type(error).__name__.lower())
    return ApiError(500, "an internal error ended this request", code="internal_error")


def _field_named_by(message: str) -> str | None:
    """The field that an error is about. Messages of text/ begin with it: "stop[3] is empty", "messages[0].role must be"."""
    word = message.split(" ", 1)[0].split("[", 1)[0].split(".", 1)[0].rstrip(":")
    return word if word in ("stop", "messages", "chat_template_kwargs", "add_generation_prompt") else None


def error_response(
    error: ApiError, *, retry_after_seconds: int, request_id: str | None = None, body: dict[str, Any] | None = None
) -> Response:
    """An error as a response. `body`: the error in another dialect than OpenAI's."""
    headers = {}
    if error.http_status in (429, 503):
        headers["retry-after"] = str(retry_after_seconds)
    if error.http_status in (408, 413, 415) or error.code == "too_many_bytes":
        headers["connection"] = "close"  # the rest of the body is not read
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    if request_id is not None:
        headers["x-request-id"] = request_id
    return JsonResponse(body or error.body, status_code=error.http_status, headers={**headers, **error.headers})


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class JsonRows:
    """A JSON list whose entries are built while they are written, so that a large answer is never in memory as a whole."""

    __slots__ = ("_entries", "_make")

    def __init__(self, make: Callable[[Any], Any], entries: Sequence[Any]) -> None:
        self._make = make
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._entries)


def to_json(content: Any) -> bytes:
    try:
        return orjson.dumps(content, default=_listed)
    except orjson.JSONEncodeError:  # a lone surrogate or a huge int in an error message must not become a 500
        return json.dumps(content, default=lambda value: _listed(value, str)).encode("ascii")


def _listed(value: Any, otherwise: Callable[[Any], Any] | None = None) -> Any:
    if isinstance(value, JsonRows):
        return list(value)
    if otherwise is None:
        raise TypeError(f"no JSON for {type(value).__name__}")
    return otherwise(value)


def too_long(tokens: int, context_tokens: int) -> ApiError:
    """Clients know this error by its words, and shorten the chat: those of Anthropic by the first sentence, litellm with other
    servers by the second."""
    return bad(
        f"prompt is too long: {tokens} tokens > {context_tokens - 1} maximum. "
        f"This model's maximum context length is {context_tokens} tokens, prompt and output together",
        "prompt",
        code="context_length_exceeded",
    )
