"""Cross-origin requests of browsers, as Starlette answers them; other clients pay nothing for it."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send


class Cors(CORSMiddleware):
    """A POST without `Origin` is no browser's, and caches do not keep its answer: there is nothing to add to that. Starlette
    would pass each of its events through a function that looks for headers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and all(name != b"origin" for name, _ in scope["headers"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
