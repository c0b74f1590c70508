"""Azure's paths of OpenAI's routes. Clients add `?api-version=...`, which changes nothing here.

/openai/deployments/NAME/chat/completions   ->  /v1/chat/completions, of the model NAME
/openai/v1/chat/completions                 ->  /v1/chat/completions
"""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_DEPLOYMENT = re.compile(r"/openai/deployments/([^/]+)(/chat/completions|/completions|/embeddings)/?")
_DEPLOYMENT_KEY = "azure_deployment"


class AzurePaths:
    """Rewrites the path before routing: routes, rights and logs see OpenAI's path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/openai/"):
            scope = _rewritten(scope)
        await self._app(scope, receive, send)


def _rewritten(scope: Scope) -> Scope:
    path = scope["path"]
    if found := _DEPLOYMENT.fullmatch(path):
        return {**scope, "path": "/v1" + found[2], _DEPLOYMENT_KEY: found[1]}
    return {**scope, "path": path.removeprefix("/openai")} if path.startswith("/openai/v1/") else scope


def deployment_of(scope: Scope) -> str | None:
    """The deployment in the path: it is the model, regardless of `model` in the body, as at Azure."""
    name: str | None = scope.get(_DEPLOYMENT_KEY)
    return name
