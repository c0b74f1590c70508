"""The outer layer of every request: its id, one log line at its end, and a 500 for uncaught errors.

A line names the request, never its content: the route is the pattern in the table, not the client's path.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api.dialect import dialect_of
from baton.api.errors import ApiError, as_api_error, error_response, not_found
from baton.api.front import Front, front_of, logger
from baton.api.limits import Limits

IGNORED_HEADER = "x-baton-ignored"
_IGNORED_NAMES_MAX = 32
_IGNORED_CHARACTERS_MAX = 64
_CLOSED = 499
"Status in the log if the client disconnected before the response had one."


class TokenCounts(Protocol):
    """Tokens of a request so far, for its log line."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int | None: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def preemptions(self) -> int: ...


@dataclass(slots=True)
class RequestRecord:
    """Facts for the log line beyond the status. Filled in by the route."""

    request_id: str
    usage: Callable[[], TokenCounts] | None = None
    "Tokens so far, for requests that generate."
    ended: Callable[[], str] | str = ""
    "How the request ended: a finish reason, the code of an error, or how the client left."
    ignored: tuple[str, ...] = ()
    "Unknown fields of the body. A response header lists their names."

    def facts(self, method: str, route: str, status: int, seconds: float) -> dict[str, Any]:
        facts: dict[str, Any] = {"id": self.request_id, "method": method, "route": route, "status": status}
        if self.usage is not None:
            usage = self.usage()
            facts |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
            facts |= {"preemptions": usage.preemptions} if usage.preemptions else {}
            facts["completion_tokens"] = usage.output_tokens
        facts["seconds"] = round(seconds, 3)
        ended = self.ended() if callable(self.ended) else self.ended
        return {**facts, "end": ended} if ended else facts

    def headers(self) -> dict[str, str]:
        headers = {"x-request-id": self.request_id}
        if self.ignored:
            names = [quote(name[:_IGNORED_CHARACTERS_MAX], safe="[]") for name in self.ignored[:_IGNORED_NAMES_MAX]]
            more = len(self.ignored) - _IGNORED_NAMES_MAX
            headers[IGNORED_HEADER] = ", ".join([*names, *([f"and {more} more"] if more > 0 else [])])
        return headers


def record_of(request: Request) -> RequestRecord:
    record: RequestRecord = request.state.record
    return record


def request_id_of(scope: Scope, limits: Limits) -> str:
    """The client's X-Request-Id if it is safe to echo, else a new one. The engine never sees it."""
    given = [value for name, value in scope["headers"] if name == b"x-request-id"]
    text: str = given[0].decode("latin-1") if len(given) == 1 else ""
    return text if is_name(text, limits) else uuid.uuid4().hex


def is_name(text: str, limits: Limits) -> bool:
    return 0 < len(text) <= limits.name_bytes and text.isascii() and text.isprintable()


async def on_error(request: Request, error: Exception) -> Response:
    front, record = front_of(request), record_of(request)
    known = _of_starlette(error) if isinstance(error, HTTPException) else as_api_error(error)
    record.ended = record.ended or known.code or ""
    body = dialect_of(request.scope).error_body(known, record.request_id)
    return error_response(known, retry_after_seconds=front.config.retry_after_seconds, body=body)


def _of_starlette(error: HTTPException) -> ApiError:
    """The response to an error that the framework raised. Routes raise ApiError."""
    return not_found() if error.status_code == 404 else ApiError(error.status_code, error.detail, headers=error.headers)


class RequestLog:
    """Counts and logs responses by route, and turns uncaught errors into a plain 500."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":  # websockets are not served
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the app for one request, turns an uncaught error into a response, and logs the request at its end."""
        record = RequestRecord(request_id_of(scope, self._front.limits))
        scope.setdefault("state", {})["record"] = record
        status, began = 0, time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(record.headers())
            await send(message)

        try:
            await self._routed(scope, receive, watched)
        except asyncio.CancelledError:  # shutdown.py responds
            record.ended = "shutting_down"
            raise
        except ClientDisconnect:
            record.ended = record.ended or "disconnected"
        except Exception as error:
            known = as_api_error(error).http_status
            if known >= 500:
                logger.error("request %s failed: %s", record.request_id, type(error).__name__, exc_info=error)
            elif status == known:  # the caller's error, already sent
                return
            if status:
                raise
            response = await on_error(Request(scope), error)
            await response(scope, receive, watched)
        finally:
            self._log(scope, record, status or _CLOSED, time.monotonic() - began)

    async def _routed(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if not path.isprintable():
            raise ApiError(400, "the path has characters that do not print", code="bad_path")
        if path.endswith("/") and not path.endswith("//"):
            scope["path"] = path[:-1] or "/"  # same as without the slash
        await self._app(scope, receive, send)

    def _log(self, scope: Scope, record: RequestRecord, status: int, seconds: float) -> None:
        found = scope.get("route")
        route = getattr(found, "path", None) or ("(refused)" if status in (401, 403) else "(none)")
        self._front.metrics.http_response(route, status)
        # Probes come every few seconds: they are logged at DEBUG unless they fail.
        quiet = getattr(found, "right", "key") != "key" and scope["method"] == "GET" and status < 500
        level = logging.DEBUG if quiet else logging.INFO
        if logger.isEnabledFor(level):
            facts = record.facts(scope["method"][:16], route, status, seconds)
            logger.log(level, "request", extra={"facts": facts})
