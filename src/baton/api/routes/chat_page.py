"""GET /: a chat page. Sent as one file; its policy forbids to fetch anything from elsewhere.

static/chat.html    the elements           static/markdown.js   an answer's text as elements
static/chat.css     the style              static/answer.js     server-sent events into a message
static/history.js   chats in the browser   static/messages.js   a message as elements    static/chat.js   the behaviour
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

SCRIPTS = ("markdown.js", "history.js", "answer.js", "messages.js", "chat.js")
"Scripts in loading order: later scripts use definitions of earlier ones."


@cache
def page() -> tuple[bytes, str]:
    """The page, and a content security policy that allows exactly its own script and style."""
    static = resources.files("baton.api.routes").joinpath("static")
    style = static.joinpath("chat.css").read_bytes()
    script = b'"use strict";\n' + b"\n".join(static.joinpath(name).read_bytes() for name in SCRIPTS)
    html = static.joinpath("chat.html").read_bytes()
    html = html.replace(b"<style></style>", b"<style>%b</style>" % style)
    html = html.replace(b"<script></script>", b"<script>%b</script>" % script)
    policy = (
        f"default-src 'none'; script-src '{_hash_of(script)}'; style-src '{_hash_of(style)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def _hash_of(content: bytes) -> str:
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
