"""API keys. This module identifies the caller; access.py decides what the key opens.

A key comes as `Authorization: Bearer KEY`, as `x-api-key: KEY` (Anthropic's clients) or as `api-key: KEY` (Azure's). So that a
browser can open the chat page, the key is also accepted as the password of Basic authentication, but only from pages of this
server: a browser sends Basic by itself, also for foreign pages.

Keys are compared as SHA-256 digests, all of them, in constant time. Timing, logs and errors reveal neither their text nor their
length.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

from baton.api.config import ApiConfig

Headers = list[tuple[bytes, bytes]]

_KEY_HEADERS: Final = (b"x-api-key", b"api-key")


@dataclass(frozen=True, slots=True)
class ApiCaller:
    """The caller of a request. `tenant` is a digest, the root of the cache salt; empty where no key was needed or given."""

    tenant: bytes = b""
    admin: bool = False
    "Whether the key is an admin key."
    by_bearer: bool = False
    "Whether the key was given in a way that a browser does not use by itself."


class Keys:
    def __init__(self, config: ApiConfig) -> None:
        self._bytes_max = config.limits.api_key_bytes
        self._tenants = [_digest(key.encode()) for key in config.api_keys]
        self._admins = [_digest(key.encode()) for key in config.admin_api_keys]

    @property
    def required(self) -> bool:
        return bool(self._tenants)

    @property
    def has_admins(self) -> bool:
        return bool(self._admins)

    def caller(self, headers: Headers) -> ApiCaller | None:
        """The caller with the key in these headers; None for a missing or unknown key."""
        given = [value for name, value in headers if name == b"authorization"]
        named = [value for name, value in headers if name in _KEY_HEADERS]
        if not given + named or len(given) > 1 or len(max(given + named, key=len)) > 2 * self._bytes_max:
            return None
        key, by_bearer = _key_of(given[0], headers) if given else (named[0].strip(), True)
        if any(key != other.strip() for other in named):
            return None  # ambiguous: two different keys
        digest = _digest(key)
        # Both lists are compared in full, so that the time reveals nothing about the keys.
        is_tenant = sum([hmac.compare_digest(digest, known) for known in self._tenants])
        is_admin = sum([hmac.compare_digest(digest, known) for known in self._admins])
        if not is_tenant and not is_admin:
            return None
        return ApiCaller(tenant=digest, admin=bool(is_admin), by_bearer=by_bearer)


def _key_of(value: bytes, headers: Headers) -> tuple[bytes, bool]:
    """The key in an Authorization header (empty, which matches none, if there is none), and whether it is a bearer key."""
    scheme, _, rest = value.partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip(), True
    if scheme.lower() == b"basic" and _from_own_page(headers):
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2], False
        except (binascii.Error, ValueError):
            return b"", False
    return b"", False


def _from_own_page(headers: Headers) -> bool:
    sites = [value for name, value in headers if name == b"sec-fetch-site"]
    return all(site in (b"same-origin", b"none") for site in sites)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(b"baton-api-key\0" + key).digest()
