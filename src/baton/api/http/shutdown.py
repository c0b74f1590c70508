"""Ends requests that are still open at shutdown.

The front first ends what runs in the engine (runtime/front/process.py): streams with an error event, whole answers with 503. A
request that is still open then waits for its client (a slow body, a reader that does not read), and its task is cancelled.
Without this file it would end with a plain-text 500 and a traceback in the log.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.errors import ApiError, error_response

RETRY_AFTER_SECONDS = 1


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down and did not finish this request; send it again", code="shutting_down")


class EndedByShutdown:
    """The outermost layer of the app: responds with 503 if the task of a request is cancelled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if started:
                await _drop_connection(scope)
            else:
                response = error_response(shutting_down(), retry_after_seconds=RETRY_AFTER_SECONDS)
                response.headers["connection"] = "close"
                await response(scope, receive, send)


async def _drop_connection(scope: Scope) -> None:
    """Drops the connection without the end of the body, so that a truncated answer does not look complete."""
    abort = scope.get("state", {}).get("abort_connection")
    if abort is not None:
        abort()
        await asyncio.sleep(0)  # uvicorn notices in the next turn of the loop
