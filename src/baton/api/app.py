"""Puts the routes together. The tables below are the whole surface; what is not in them is 404, and even that needs a key."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.api import admin, models, tokens
from baton.api.answer import GenerateRoute, request_id_of
from baton.api.auth import AuthMiddleware
from baton.api.chat import ChatShape
from baton.api.chat_page import chat_page
from baton.api.completions import CompletionShape
from baton.api.config import ApiConfig, ServedModel
from baton.api.engine_client import EngineClient
from baton.api.errors import ApiError, as_api_error, error_response
from baton.api.front import Front, front_of, logger
from baton.text.chat_template import ChatTemplate
from baton.text.tokenizer import Tokenizer

HEALTH: Sequence[BaseRoute] = (
    Route("/health", admin.health, methods=["GET"]),
    Route("/live", admin.live, methods=["GET"]),
    Route("/ready", admin.ready, methods=["GET"]),
)
PUBLIC: Sequence[BaseRoute] = (
    Route("/v1/chat/completions", GenerateRoute(ChatShape), methods=["POST"]),
    Route("/v1/completions", GenerateRoute(CompletionShape), methods=["POST"]),
    Route("/v1/models", models.list_models, methods=["GET"]),
    Route("/v1/models/{name:path}", models.get_model, methods=["GET"]),
    Route("/v1/abort", admin.abort, methods=["POST"]),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    Route("/version", admin.version, methods=["GET"]),
)
ADMIN: Sequence[BaseRoute] = (
    Route("/metrics", admin.metrics, methods=["GET"]),
    Route("/config", admin.config, methods=["GET"]),
    Route("/v1/pause", admin.pause, methods=["POST"]),
    Route("/v1/resume", admin.resume, methods=["POST"]),
)
PAGE = Route("/", chat_page, methods=["GET"])


def make_app(
    engine: EngineClient, tokenizer: Tokenizer, chat_template: ChatTemplate, model: ServedModel, config: ApiConfig
) -> Starlette:
    """The public listener's app. `app.state.front` holds what its routes share."""
    front = Front(engine, tokenizer, chat_template, model, config)
    routes = [*HEALTH, *PUBLIC, *(ADMIN if config.admin_routes else ()), *([PAGE] if config.chat_page else [])]
    return _app(front, routes)


def make_admin_app(public: Starlette) -> Starlette:
    """The same front on another listener, with the admin routes only: for ApiConfig.admin_routes off."""
    return _app(public.state.front, [*HEALTH, *ADMIN])


def _app(front: Front, routes: Sequence[BaseRoute]) -> Starlette:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        front.close()

    config = front.config
    cors = []
    if config.allowed_origins:
        cors = [
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id", "idempotency-key"],
                expose_headers=["x-request-id", "retry-after"],
            )
        ]
    app = Starlette(
        routes=list(routes),
        # CORS outside auth: a browser asks without a key whether it may ask with one.
        middleware=[*cors, Middleware(_Watch, front=front), Middleware(AuthMiddleware, config=config)],
        exception_handlers={HTTPException: _on_error, ApiError: _on_error, Exception: _on_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.front = front
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    front = front_of(request)
    if isinstance(error, HTTPException):
        known = ApiError(error.status_code, f"{request.method} is not possible here, or nothing is here: see /v1/models")
        known.code = "method_not_allowed" if error.status_code == 405 else "not_found"
    else:
        known = as_api_error(error)
    retry = front.config.retry_after_seconds
    return error_response(known, retry_after_seconds=retry, request_id=request_id_of(request, front.limits))


class _Watch:
    """Counts responses by route, and turns what nobody caught into a plain 500. Logs name the error, not the content."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self._app = app
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began = 0, time.monotonic()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            status = status or 499
        except Exception as error:
            logger.error("%s failed: %s", scope["method"], type(error).__name__, exc_info=error)
            if status:
                raise
            response = await _on_error(Request(scope), error)
            await response(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", None) or ("(refused)" if status in (401, 403) else "(none)")
            self._front.metrics.http_response(route, status or 499)
            logger.info("%s %s: %d in %.0f ms", scope["method"], route, status or 499, 1000 * (time.monotonic() - began))
