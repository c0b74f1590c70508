"""GET /: a chat page. One file, nothing fetched from elsewhere, and a policy under which nothing could be."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response


@cache
def page() -> tuple[bytes, str]:
    """The file, and the content security policy that allows exactly its own script and style."""
    html = resources.files("baton.api.routes").joinpath("static/chat.html").read_bytes()
    script, style = _hash_of(html, b"script"), _hash_of(html, b"style")
    policy = (
        f"default-src 'none'; script-src '{script}'; style-src '{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _hash_of(html: bytes, tag: bytes) -> str:
    found = re.search(rb"<%s>(.*?)</%s>" % (tag, tag), html, re.DOTALL)
    content = found[1] if found else b""
    return "sha256-" + base64.b64encode(hashlib.sha256(content).digest()).decode()


async def chat_page(request: Request) -> Response:
    html, policy = page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return Response(html, media_type="text/html", headers=headers)
