"""Reads a request's body: bytes within the cap, then JSON without the corners that parsers disagree on.

Refused: not JSON, trailing bytes, NaN and Infinity (also written as 1e400), the same key twice, more than 64 levels or 1024
keys, bytes that are not UTF-8, a top that is not an object. A lone surrogate (`"\\ud800"`) becomes U+FFFD here, in every field.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import Request

from baton.api.errors import ApiError, bad
from baton.api.http.budget import Lease
from baton.api.limits import Limits
from baton.text.clean import replace_lone_surrogates

_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_body(request: Request, limits: Limits, lease: Lease) -> bytes:
    """Reads a request's body. Raises ApiError 413, 415, 408 or 429, and starlette's ClientDisconnect.

    lease   counts the bytes as they arrive, until the caller closes it
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(415, "compressed bodies are not accepted: send plain JSON", code="unsupported_encoding")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 12 or int(declared) > limits.body_bytes):
        raise _too_large(limits)
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limits.body_bytes:
                    raise _too_large(limits)
                lease.take(len(chunk))
                body += chunk
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {limits.body_seconds:g} seconds", code="body_timeout") from None
    return bytes(body)


def _too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes", code="body_too_large")


def parse_object(body: bytes, limits: Limits) -> dict[str, Any]:
    """Parses a body that is an object. Raises ApiError 400 with the place of the error."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad(f"the body is not UTF-8: byte {error.start} is wrong", code="invalid_utf8") from None
    if text.startswith("\ufeff"):
        raise bad("the body begins with a byte order mark (BOM): send UTF-8 without it", code="invalid_json")
    value = _parsed(text, limits)
    if not isinstance(value, dict):
        raise bad(f"the body must be a JSON object, not {_kind(value)}", code="invalid_json")
    if len(value) > limits.top_level_keys:
        raise bad(f"the body has {len(value)} fields and at most {limits.top_level_keys} are allowed")
    if body.count(b"[") + body.count(b"{") > limits.json_depth:
        _require_depth(value, limits.json_depth)
    if _MAYBE_SURROGATE.search(body):
        cleaned: dict[str, Any] = _clean(value)
        return cleaned
    return value


def _parsed(text: str, limits: Limits) -> Any:
    """Parses JSON with the limits on objects and numbers. Raises ApiError 400 with the place of the error."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(items) > limits.object_keys:
            raise bad(f"an object of the body has {len(items)} keys and at most {limits.object_keys} are allowed")
        if len(result) != len(items):
            raise bad(f"the body has the key {_twice(items)} twice in one object", code="duplicate_key")
        return result

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_float=_finite, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        what = "is empty" if not text.strip() else f"is not valid JSON: {error.msg}"
        raise bad(f"the body {what} (line {error.lineno}, column {error.colno})", code="invalid_json") from None
    except RecursionError:
        raise bad(f"the body nests deeper than {limits.json_depth} levels", code="too_deep") from None
    except ValueError:  # an int with thousands of digits
        raise bad("the body has a number that is too long", code="invalid_json") from None


def _finite(literal: str) -> float:
    value = float(literal)
    if value in (float("inf"), float("-inf")):
        raise bad("the body has a number that is too large", code="invalid_json")
    return value


def _no_constant(literal: str) -> NoReturn:
    raise bad(f"the body has {literal}, which is not JSON", code="invalid_json")


def _twice(items: list[tuple[str, Any]]) -> str:
    """The repeated key, truncated: keys may be a client's text too."""
    seen: set[str] = set()
    for key, _ in items:
        if key in seen:
            return ascii(key[:64])
        seen.add(key)
    return "?"


def _require_depth(value: Any, depth_max: int) -> None:
    """Refuse JSON that is nested too deep. The check goes level by level, so that no depth exhausts the stack."""
    level = [value]
    for _ in range(depth_max):
        level = [
            child
            for container in level
            for child in (container.values() if isinstance(container, dict) else container)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise bad(f"the body nests deeper than {depth_max} levels", code="too_deep")


def _clean(value: Any) -> Any:
    """Replace lone surrogates in all strings. The recursion is safe: the depth is already limited to 64."""
    if isinstance(value, str):
        return replace_lone_surrogates(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {replace_lone_surrogates(key): _clean(item) for key, item in value.items()}
    return value


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), "this")
