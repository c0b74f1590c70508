"""Access control by route. The right is a property of the route, checked after routing: there is no second list of paths.

open     everyone: health checks. Any Host, no key
key      one of the API keys, where there are any. The default right, also of "no such route"
admin    an admin key. Where none is configured: closed if there are API keys, else for callers on this machine only

Before the key a request must show that no foreign web page sent it (`CrossSite`): a browser on our network sends requests for
any page.

Host            one of our names. With DNS rebinding a foreign name resolves to us and the page is of the same origin for a
                browser, but its Host is still that name. A bearer key is proof too: no browser adds one by itself
Origin          on everything but GET: our own, or an allowed one. A server without keys that listens on loopback also accepts
                other origins of this machine (a web app under development), but not for the admin routes
content type    JSON, on everything that has a body: other types are sent across origins without asking. Clients of Ollama send
                none (Dialect.untyped_bodies); theirs are accepted if no header is a browser's
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton.api.config import ApiConfig
from baton.api.dialect import OPENAI, Dialect, dialect_of
from baton.api.errors import ApiError, not_found
from baton.api.http.auth import ApiCaller, Keys

Right = Literal["open", "key", "admin"]

_BASIC = {"www-authenticate": 'Basic realm="baton: the password is an API key"'}
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
_PRIVATE_SUFFIXES = (".internal", ".local", ".lan", ".svc", ".home.arpa")
"""Suffixes outside of public DNS (host.docker.internal, gpu-box.local, baton.default.svc.cluster.local): no foreign page has
such a name."""
LOCAL_ORIGIN = r"https?://(localhost|[a-z0-9.-]+\.localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?"
"""Hosts in the origins of pages that this machine serves."""


class ApiRoute(Route):
    """A route with the right that it requires."""

    def __init__(
        self,
        path: str,
        endpoint: Any,
        *,
        methods: list[str],
        right: Right = "key",
        page: bool = False,
        dialect: Dialect = OPENAI,
    ) -> None:
        """`page`: a browser opens it and asks its user for the key (Basic authentication)."""
        super().__init__(path, endpoint, methods=methods)
        self.right: Right = right
        self.page = page
        self.dialect = dialect

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["dialect"] = self.dialect
        access: Access = scope["app"].state.access
        access.require(scope, self.right, page=self.page)
        if self.methods and scope["method"] not in self.methods:
            allowed = ", ".join(sorted(self.methods))
            message = f"{self.path} does not take {scope['method'][:16]}, it takes {allowed}"
            raise ApiError(405, message, code="method_not_allowed", headers={"allow": allowed})
        await super().handle(scope, receive, send)


class NoRoute:
    """Answers paths without a route. A key is needed first, so that strangers learn nothing about the routes."""

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        """`dialects`: by path prefix, the dialects whose errors differ from OpenAI's."""
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for begin, dialect in self._dialects.items():
            if scope["path"].startswith(begin):
                scope.setdefault("state", {})["dialect"] = dialect
        access: Access = scope["app"].state.access
        access.require(scope, "key")
        raise not_found(access.routers, scope["path"])


class Access:
    """Checks a request before its body is read: raises ApiError, or sets scope["state"]["caller"]."""

    def __init__(self, config: ApiConfig) -> None:
        self.routers = config.routers
        self._keys = Keys(config)
        self._admin_port = config.admin_port
        self._cross_site = CrossSite(config)

    def require(self, scope: Scope, right: Right, *, page: bool = False) -> None:
        """Checks that the request may use a route with this right, else raises ApiError; sets scope["state"]["caller"]. `page`:
        ask a browser for the key."""
        state = scope.setdefault("state", {})
        if right == "open":
            state["caller"] = ApiCaller()
            return
        if (full := state.get("connection_refusal")) is not None:
            raise ApiError(full.http_status, str(full), code=full.code, headers={"connection": "close"})
        caller = self._keys.caller(scope["headers"])
        trusted = caller is not None and caller.by_bearer
        self._cross_site.require(scope, trusted_host=trusted, admin=right == "admin")
        if caller is None and self._keys.required:
            message = "give an API key as 'Authorization: Bearer KEY'"
            raise ApiError(401, message, code="invalid_api_key", headers=_BASIC if page else None)
        caller = caller or ApiCaller()
        self._require_listener(scope, right)
        if right == "admin" and not caller.admin:
            self._require_admin(scope)
        _require_json(scope)
        state["caller"] = caller

    def _on_admin_port(self, scope: Scope) -> bool:
        """Whether the request came in on the admin port. The listening socket decides, not anything that the client sends."""
        server = scope.get("server")
        return self._admin_port is not None and server is not None and server[1] == self._admin_port

    def _require_listener(self, scope: Scope, right: Right) -> None:
        if self._on_admin_port(scope):
            if right != "admin":
                raise ApiError(404, "this is the admin port: only admin routes are here", code="not_found")
        elif right == "admin" and self._admin_port is not None:
            raise ApiError(404, "admin routes are on the admin port (--admin-port) only", code="not_found")

    def _require_admin(self, scope: Scope) -> None:
        if self._keys.has_admins:
            raise ApiError(403, "this route needs an admin key (--admin-api-key)", code="admin_only")
        if self._keys.required and not self._on_admin_port(scope):
            message = "this route is closed: start the server with --admin-api-key KEY or --admin-port PORT to open it"
            raise ApiError(403, message, code="admin_only")
        if not _is_local(scope):
            message = "this route answers this machine only: start the server with --admin-api-key KEY to open it to others"
            raise ApiError(403, message, code="admin_only")


def _is_local(scope: Scope) -> bool:
    """Whether the peer is on this machine and is not a proxy."""
    if any(name in (b"forwarded", b"x-forwarded-for") for name, _ in scope["headers"]):
        return False
    client = scope.get("client")
    return client is None or _is_loopback(client[0])  # None: a unix socket


def _require_json(scope: Scope) -> None:
    headers = dict(scope["headers"])
    has_body = b"transfer-encoding" in headers or headers.get(b"content-length", b"0").strip(b" 0") != b""
    if scope["method"] in _SAFE_METHODS or not has_body:
        return
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind == b"application/json" or kind.endswith(b"+json"):
        return
    if not (dialect_of(scope).untyped_bodies and not _may_be_a_page(headers)):
        raise ApiError(415, "send the body as 'Content-Type: application/json'", code="unsupported_content_type")


def _may_be_a_page(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser may have sent the request: browsers send Origin or Sec-Fetch-Site with a POST, and a user agent with
    "Mozilla"."""
    by_header = any(name in (b"origin", b"referer", b"cookie") or name.startswith(b"sec-") for name in headers)
    return by_header or b"mozilla" in headers.get(b"user-agent", b"").lower()


class CrossSite:
    """Refuses requests that a foreign web page makes a browser send."""

    def __init__(self, config: ApiConfig) -> None:
        self._names = {name.lower().rstrip(".") for name in (config.host, *config.allowed_hosts)} | {"localhost"}
        self._suffixes = (
            ".localhost",
            *_PRIVATE_SUFFIXES,
            *(name[1:] for name in config.allowed_hosts if name.startswith("*.")),
        )
        self._any_host = "*" in config.allowed_hosts
        # Other machines use any name that the network has for this one. Names without a dot are not in public DNS, so no
        # foreign page has one.
        self._names_without_dot = not _is_loopback(config.host) and config.host != "localhost"
        if self._names_without_dot:
            self._names.add(socket.gethostname().lower())
        self._origins = frozenset(config.allowed_origins)
        self._local_origins = takes_local_origins(config)

    def require(self, scope: Scope, *, trusted_host: bool, admin: bool = False) -> None:
        """Checks that no foreign page can have sent the request, else raises ApiError. `trusted_host`: a bearer key vouches for
        the Host header."""
        headers = scope["headers"]
        hosts = [value.decode("latin-1").strip().lower() for name, value in headers if name == b"host"]
        if len(hosts) > 1:
            raise ApiError(400, "more than one Host header", code="bad_host")
        host = hosts[0] if hosts else ""
        if not trusted_host and host and not self._is_ours(host):
            message = "this server is not called by that Host name: add it with --allowed-hosts NAME"
            raise ApiError(421, message, code="host_not_allowed")
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        local = self._local_origins and len(origins) == 1 and _is_local_origin(origins[0])
        if local and not _is_same_origin(origins[0], host):
            # CORS lets the page read the answer, so GET is refused too, with any Host.
            if admin and origins[0] not in self._origins:
                raise ApiError(403, "pages of other origins may not call admin routes", code="foreign_origin")
            if _is_local_name(host):
                return
        if scope["method"] not in _SAFE_METHODS and not self._origin_is_allowed(headers, host):
            message = "pages of other origins may not call this server: allow theirs with --allowed-origins ORIGIN"
            raise ApiError(403, message, code="foreign_origin")

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host)
        if self._any_host or name in self._names or name.endswith(self._suffixes) or _address(name):
            return True
        return self._names_without_dot and "." not in name

    def _origin_is_allowed(self, headers: list[tuple[bytes, bytes]], host: str) -> bool:
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        if "*" in self._origins or (len(origins) == 1 and origins[0] in self._origins):
            return True
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        if any(site not in (b"same-origin", b"none") for site in sites):
            return False
        return all(_is_same_origin(origin, host) for origin in origins)


def takes_local_origins(config: ApiConfig) -> bool:
    """Whether pages of this machine are accepted: only this machine reaches the server, and no key could distinguish pages."""
    this_machine = _is_loopback(config.host) or config.host == "localhost"
    return this_machine and not config.api_keys and not config.admin_api_keys


def _is_local_origin(origin: str) -> bool:
    return re.fullmatch(LOCAL_ORIGIN, origin) is not None


def _is_local_name(host: str) -> bool:
    """Whether pages of this machine call the server by this name. A proxy's name means that the server is open to others."""
    name = _without_port(host)
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)


def _is_same_origin(origin: str, host: str) -> bool:
    """Whether origin and Host name the same server. The scheme is not compared: a TLS proxy in front of us changes it to
    https."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host != ""


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return (host.partition(":")[0] if host.count(":") == 1 else host).rstrip(".")


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _is_loopback(name: str) -> bool:
    address = _address(name)
    return address is not None and address.is_loopback
