"""ASGI layers around the app: Paced, Cors, RootPath.

Paced starts only a few requests, and reads a few pieces of bodies, per turn of the event loop. A turn runs everything that is
ready: with hundreds of ready requests or dozens of large bodies, every stream would wait for all of them. Queued requests cost
nothing: an unread body is not received.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PER_TURN: Final = 4
"""Requests and body pieces per turn. Each takes up to a millisecond: a small body is parsed, or 128 KiB copied some five
times."""


class RequestPacing:
    def __init__(self, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def enter(self) -> None:
        """Wait for a turn of the loop that has room, first come first served; return at once if this turn has room."""
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._next_turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_turn(self) -> None:
        self._left = self._per_turn
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():  # the waiting task may have been cancelled
                place.set_result(None)
                self._left -= 1
        self._scheduled = self._left < self._per_turn
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._next_turn)


class Paced:
    """ASGI layer that applies RequestPacing to requests and bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._pacing = RequestPacing()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        more = False

        async def paced() -> Message:
            nonlocal more
            if more:
                await self._pacing.enter()
            message = await receive()
            more = message.get("more_body", False)
            return message

        await self._pacing.enter()
        await self._app(scope, paced, send)


class Cors(CORSMiddleware):
    """Skips Starlette's CORS for a POST without `Origin`: no browser sent it, and its answer is not cached. Starlette would
    pass each event through a function that looks for headers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and all(name != b"origin" for name, _ in scope["headers"]):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class RootPath:
    """Removes the path prefix of a proxy (--root-path /llm), if the proxy has not, before routing: routes, rights and logs see
    the same path either way."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._root or path.startswith(self._root + "/"):
                scope = {**scope, "path": path[len(self._root) :] or "/"}
        await self._app(scope, receive, send)
