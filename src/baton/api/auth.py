"""API keys: default deny. Every route needs one, but /health, /live and /ready; so a route added tomorrow needs one too.

A key comes as `Authorization: Bearer KEY`. So that a browser can open the chat page, the key is also taken as the password
of Basic authentication, but only from pages of this very server: a browser sends Basic by itself, also for a page that
someone else wrote.

Keys are compared as SHA-256 digests, all of them, in constant time. Neither their text nor their length shows in time,
logs or errors.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from baton.api.config import ApiConfig
from baton.api.errors import ApiError, error_response

OPEN_PATHS = frozenset({"/health", "/live", "/ready"})
ADMIN_PATHS = frozenset({"/config", "/metrics", "/v1/pause", "/v1/resume"})


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `tenant` is a digest, empty where no keys are configured; it is the root of the cache salt."""

    tenant: bytes = b""
    admin: bool = True


class Keys:
    def __init__(self, config: ApiConfig) -> None:
        self._bytes_max = config.limits.api_key_bytes
        self._tenants = [_digest(key.encode()) for key in config.api_keys]
        self._admins = [_digest(key.encode()) for key in config.admin_api_keys]

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    def caller(self, headers: list[tuple[bytes, bytes]]) -> Caller | None:
        """None: no such key."""
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) != 1 or len(given[0]) > 2 * self._bytes_max:
            return None
        digest = _digest(_key_of(given[0], headers))
        # Both lists in full, whatever matches: time tells nothing.
        is_tenant = sum([hmac.compare_digest(digest, known) for known in self._tenants])
        is_admin = sum([hmac.compare_digest(digest, known) for known in self._admins])
        if not is_tenant and not is_admin:
            return None
        return Caller(tenant=digest, admin=bool(is_admin) or not self._admins)


def _key_of(value: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The key in an Authorization header; empty (which matches none) where there is none."""
    scheme, _, rest = value.partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() == b"basic" and _from_own_page(headers):
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return b""
    return b""


def _from_own_page(headers: list[tuple[bytes, bytes]]) -> bool:
    sites = [value for name, value in headers if name == b"sec-fetch-site"]
    return all(site in (b"same-origin", b"none") for site in sites)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"baton-api-key\0" + key).digest()


class AuthMiddleware:
    """Sets scope["state"]["caller"], or answers 401 or 403 itself, before a byte of the body is read."""

    def __init__(self, app: ASGIApp, config: ApiConfig) -> None:
        self._app = app
        self._keys = Keys(config)
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # websockets: there are none
        error = self._refusal(scope)
        if error is None:
            await self._app(scope, receive, send)
            return
        response = error_response(error, retry_after_seconds=self._config.retry_after_seconds)
        if error.http_status == 401 and scope["path"] == "/" and scope["method"] == "GET":
            response.headers["www-authenticate"] = 'Basic realm="baton: the password is an API key"'
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if self._from_foreign_page(scope):
            return ApiError(403, "pages of other origins may not call this server", code="foreign_origin")
        caller: Caller | None = Caller()
        if self._keys.required and scope["path"] not in OPEN_PATHS:
            caller = self._keys.caller(scope["headers"])
        if caller is None:
            return ApiError(401, "give an API key as 'Authorization: Bearer KEY'", code="invalid_api_key")
        if not caller.admin and scope["path"] in ADMIN_PATHS:
            return ApiError(403, "this route needs an admin key", code="admin_only")
        scope.setdefault("state", {})["caller"] = caller
        return None

    def _from_foreign_page(self, scope: Scope) -> bool:
        """A page elsewhere can make a browser inside our network post to us, without being able to read the answer."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return False
        headers = dict(scope["headers"])
        if headers.get(b"sec-fetch-site") in (None, b"same-origin", b"none"):
            return False
        return headers.get(b"origin", b"").decode("latin-1") not in self._config.allowed_origins
