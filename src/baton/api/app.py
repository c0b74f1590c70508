"""Assembles the app. ROUTES is the whole surface; every other path is 404, and even that needs a key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from baton.api.anthropic.shape import ANTHROPIC, MessageShape
from baton.api.config import ApiConfig, ServedModel
from baton.api.embeddings.pooling import PoolingShape
from baton.api.embeddings.shape import EmbeddingShape, OllamaEmbeddingsShape, OllamaEmbedShape
from baton.api.errors import ApiError
from baton.api.front import Front
from baton.api.generate.answer import GenerateRoute
from baton.api.generate.engine_client import EngineClient
from baton.api.http.access import LOCAL_ORIGIN, Access, ApiRoute, NoRoute, takes_local_origins
from baton.api.http.azure_paths import AzurePaths
from baton.api.http.layers import Cors
from baton.api.http.request_log import RequestLog, on_error
from baton.api.infill.shape import InfillShape
from baton.api.ollama import shape as ollama
from baton.api.ollama.shape import OLLAMA
from baton.api.openai.shape import ChatShape, CompletionShape
from baton.api.rerank.classify import ClassifyShape
from baton.api.rerank.shape import CohereRerankShape, RerankShape, ScoreShape
from baton.api.responses.shape import ResponseShape, stored_input, stored_response
from baton.api.routes import admin, models, tokens
from baton.api.routes.chat_page import chat_page
from baton.api.routes.openapi import openapi
from baton.text.chat_template import ChatTemplate
from baton.text.tokenizer import Tokenizer

ROUTES: Sequence[ApiRoute] = (
    ApiRoute("/health", admin.health, methods=["GET"], right="open"),
    ApiRoute("/live", admin.live, methods=["GET"], right="open"),
    ApiRoute("/ready", admin.ready, methods=["GET"], right="open"),
    ApiRoute("/v1/chat/completions", GenerateRoute(ChatShape), methods=["POST"]),
    ApiRoute("/v1/completions", GenerateRoute(CompletionShape), methods=["POST"]),
    ApiRoute("/v1/models", models.list_models, methods=["GET"]),
    ApiRoute("/v1/models/{name:path}", models.get_model, methods=["GET"]),
    ApiRoute("/v1/abort", admin.abort, methods=["POST"]),
    ApiRoute("/tokenize", tokens.tokenize, methods=["POST"]),
    ApiRoute("/detokenize", tokens.detokenize, methods=["POST"]),
    ApiRoute("/v1/embeddings", GenerateRoute(EmbeddingShape), methods=["POST"]),
    ApiRoute("/pooling", GenerateRoute(PoolingShape), methods=["POST"]),
    ApiRoute("/classify", GenerateRoute(ClassifyShape), methods=["POST"]),
    ApiRoute("/rerank", GenerateRoute(RerankShape), methods=["POST"]),
    ApiRoute("/v1/rerank", GenerateRoute(RerankShape), methods=["POST"]),
    ApiRoute("/v2/rerank", GenerateRoute(CohereRerankShape), methods=["POST"]),
    ApiRoute("/score", GenerateRoute(ScoreShape), methods=["POST"]),
    ApiRoute("/v1/score", GenerateRoute(ScoreShape), methods=["POST"]),
    ApiRoute("/infill", GenerateRoute(InfillShape), methods=["POST"]),
    ApiRoute("/v1/responses", GenerateRoute(ResponseShape), methods=["POST"]),
    ApiRoute("/v1/responses/{id}", stored_response, methods=["GET", "DELETE"]),
    ApiRoute("/v1/responses/{id}/input_items", stored_input, methods=["GET"]),
    ApiRoute("/v1/responses/input_tokens", tokens.input_tokens, methods=["POST"]),
    ApiRoute("/v1/messages", GenerateRoute(MessageShape), methods=["POST"], dialect=ANTHROPIC),
    ApiRoute("/v1/messages/count_tokens", tokens.count_tokens, methods=["POST"], dialect=ANTHROPIC),
    ApiRoute("/api/chat", GenerateRoute(ollama.OllamaChatShape), methods=["POST"], dialect=OLLAMA),
    ApiRoute("/api/generate", GenerateRoute(ollama.GenerateShape), methods=["POST"], dialect=OLLAMA),
    ApiRoute("/api/embed", GenerateRoute(OllamaEmbedShape), methods=["POST"], dialect=OLLAMA),
    ApiRoute("/api/embeddings", GenerateRoute(OllamaEmbeddingsShape), methods=["POST"], dialect=OLLAMA),
    ApiRoute("/api/tags", ollama.tags, methods=["GET"], dialect=OLLAMA),
    ApiRoute("/api/ps", ollama.ps, methods=["GET"], dialect=OLLAMA),
    ApiRoute("/api/show", ollama.show, methods=["POST"], dialect=OLLAMA),
    ApiRoute("/api/pull", ollama.pull, methods=["POST"], dialect=OLLAMA),
    ApiRoute("/api/version", ollama.version, methods=["GET"], dialect=OLLAMA),
    ApiRoute("/openapi.json", openapi, methods=["GET"]),
    ApiRoute("/version", admin.version, methods=["GET"]),
    ApiRoute("/metrics", admin.metrics, methods=["GET"], right="admin"),
    ApiRoute("/config", admin.config, methods=["GET"], right="admin"),
    ApiRoute("/v1/pause", admin.pause, methods=["POST"], right="admin"),
    ApiRoute("/v1/resume", admin.resume, methods=["POST"], right="admin"),
    ApiRoute("/v1/cache/clear", admin.clear_cache, methods=["POST"], right="admin"),
    ApiRoute("/reset_prefix_cache", admin.clear_cache, methods=["POST"], right="admin"),
    ApiRoute("/v1/sleep", admin.sleep, methods=["POST"], right="admin"),
    ApiRoute("/v1/wake", admin.wake, methods=["POST"], right="admin"),
    ApiRoute("/v1/weights", admin.weights, methods=["POST"], right="admin"),
    ApiRoute("/v1/orders", admin.orders, methods=["GET"], right="admin"),
)
PAGE = ApiRoute("/", chat_page, methods=["GET"], page=True)

MEMBER_ROUTES = [route for route in ROUTES if route.right != "key" or route.path == "/version"]
"""Routes of an instance that serves a router: health, metrics, administration."""


def make_app(
    engine: EngineClient,
    tokenizer: Tokenizer,
    chat_template: ChatTemplate,
    model: ServedModel,
    config: ApiConfig,
    *,
    routes: Sequence[ApiRoute] = (),
    collector: Collector | None = None,
) -> Starlette:
    """Builds the app for both ports (access.py distinguishes them). `app.state.front` holds what the routes share. A router
    adds `routes` and replaces the engine's metrics by its `collector`."""
    front = Front(engine, tokenizer, chat_template, model, config, collector)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        front.close()

    app = Starlette(
        routes=[*(MEMBER_ROUTES if config.routers else ROUTES), *routes, *([PAGE] if config.chat_page else [])],
        # CORS outside of access: a browser sends its preflight request without a key.
        middleware=[*_cors(config), Middleware(AzurePaths), Middleware(RequestLog, front=front)],
        exception_handlers={HTTPException: on_error, ApiError: on_error, Exception: on_error},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.router.default = NoRoute({"/api/": OLLAMA, "/v1/messages/": ANTHROPIC})
    app.state.front = front
    app.state.access = Access(config)
    return app


def _cors(config: ApiConfig) -> list[Middleware]:
    local = takes_local_origins(config)
    if not config.allowed_origins and not local:
        return []
    return [
        Middleware(
            Cors,
            allow_origins=list(config.allowed_origins),
            allow_origin_regex=LOCAL_ORIGIN if local else None,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],  # clients send headers of their own (x-stainless-*)
            expose_headers=["x-request-id", "retry-after", "x-baton-ignored"],
        )
    ]
