"""Answers before the model is loaded: /live is 200, everything else 503. Afterwards passes every request to the app."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.api.errors import ApiError, JsonResponse, error_response

RETRY_AFTER_SECONDS = 1


class Reception:
    def __init__(self, why: str) -> None:
        self._why = why
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            refusal = ApiError(503, self._why, code="not_ready")
            alive = scope["path"] == "/live"
            response = error_response(refusal, retry_after_seconds=RETRY_AFTER_SECONDS)
            response.headers["connection"] = "close"  # the body was not read
            await (JsonResponse({"status": "ok"}) if alive else response)(scope, receive, send)
