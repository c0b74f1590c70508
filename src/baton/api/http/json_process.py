"""Parses large bodies in a separate process (json_child.py, text/helper.py), started for the first of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final, cast

from baton.api.errors import ApiError
from baton.api.http.json_body import parse_object
from baton.api.limits import Limits
from baton.errors import Unavailable
from baton.text.helper import Helper, HelperCrash, HelperTimeout

INLINE_BYTES: Final = 128 * 1024
"""Maximum bytes of bodies that are parsed on the calling thread, in some milliseconds."""

_MEMORY_BYTES: Final = 256 * 1024 * 1024
_MEMORY_PER_BYTE: Final = 64
"""Bytes of memory per byte of JSON, at most: an empty list has 80 bytes for three."""


class JsonProcess:
    """Thread-safe; `parse` blocks its thread."""

    def __init__(self, limits: Limits, context_tokens: int) -> None:
        self._limits = limits
        self.helper = Helper(
            "baton.api.http.json_child",
            "large bodies",
            memory_bytes_max=_MEMORY_BYTES + _MEMORY_PER_BYTE * limits.body_bytes,
            turn_seconds_max=limits.prepare_seconds,
            start_with=lambda: [asdict(limits), context_tokens],
        )

    def parse(self, body: bytes) -> dict[str, Any]:
        """Parse a body with the errors of `parse_object`, and 503 if the child process is not available."""
        if len(body) <= INLINE_BYTES:
            return parse_object(body, self._limits)
        try:
            value, error = self.helper.ask(body, self._limits.prepare_seconds)
        except (HelperTimeout, HelperCrash):
            raise ApiError(503, "a large body could not be parsed; try again later", code="prepare_failed") from None
        except Unavailable:
            raise ApiError(503, "too many large requests are being prepared", code="prepare_timeout") from None
        if error is not None:
            status, message, param, code = error
            raise ApiError(status, message, param=param, code=code)
        return cast(dict[str, Any], value)

    def close(self) -> None:
        self.helper.close()
