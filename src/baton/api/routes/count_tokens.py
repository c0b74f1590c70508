"""POST /v1/messages/count_tokens: how long the prompt of such a request would be."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from baton.api.anthropic.bodies import messages_body
from baton.api.front import caller_of, front_of
from baton.api.generate.prepare import chat_job
from baton.api.http.request_log import record_of
from baton.api.routes.tokens import TokensRoute


def _counted(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    front = front_of(request)
    asked = messages_body(front, body)
    record_of(request).ignored = asked.options.ignored
    return {"input_tokens": len(chat_job(front, asked, caller_of(request)).requests[0].prompt)}


count_tokens = TokensRoute(_counted)
