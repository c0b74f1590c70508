"""How Anthropic's API tells an error."""

from __future__ import annotations

from typing import Any, Final

from baton.api.dialect import Dialect, named_event
from baton.api.errors import ApiError

ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}


ANTHROPIC: Final = Dialect("anthropic", _error_body, error_event=named_event)
