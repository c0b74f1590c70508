"""Behind a proxy that passes the routes below a path on (--root-path /llm), with the path still in front or cut off.

/llm/v1/models   ->  /v1/models
/v1/models       ->  /v1/models
/llm             ->  /
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Cut off before anything else looks: routes, rights and logs see the same path either way."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._root or path.startswith(self._root + "/"):
                scope = {**scope, "path": path[len(self._root) :] or "/"}
        await self._app(scope, receive, send)
