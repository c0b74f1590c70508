"""How Ollama tells an error, and how it streams: a line of JSON for each piece."""

from __future__ import annotations

from typing import Any, Final

from baton.api.dialect import Dialect, line
from baton.api.errors import ApiError


def _error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    return {"error": str(error)}


OLLAMA: Final = Dialect(
    "ollama",
    _error_body,
    error_event=line,
    stream_type="application/x-ndjson",
    untyped_bodies=True,
    keep_alive=b" ",  # a blank before the next line: clients parse every line, and an empty one would be none
)
