"""POST /tokenize and /detokenize, in vLLM's shapes; tokens of a prompt: Anthropic's POST /v1/messages/count_tokens and OpenAI's
POST /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from baton.api.anthropic.fields import messages_body
from baton.api.errors import JsonRows, bad
from baton.api.fields import Fields, checked_token_ids, expect, shown
from baton.api.front import Front, caller_of, front_of
from baton.api.generate.options import ChatBody
from baton.api.generate.prepare import chat_job
from baton.api.http.json_body import read_body
from baton.api.http.json_parts import send_json
from baton.api.http.request_log import record_of
from baton.api.http.streaming import ClientGone, drop_connection, while_connected
from baton.api.responses.fields import responses_body
from baton.text.chat_prompt import render_chat


class TokensRoute:
    """POST /tokenize and the like. Admitted as generating requests are, until the answer is read: it needs memory and CPU time
    too."""

    def __init__(self, work: Callable[[Request, dict[str, Any]], dict[str, Any]]) -> None:
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        front = front_of(request)
        with front.budget.lease() as lease:
            body = await read_body(request, front.limits, lease)
            with front.live.admitted(caller_of(request).tenant, ()):
                answer = await front.off_loop(
                    len(body),
                    lambda: self._work(request, front.json.parse(body)),
                    renders=True,  # messages are known only after parsing, so the body may be a chat
                )
                lease.take(_size_bytes(answer))
                try:
                    sending = send_json(send, answer, headers={}, write_seconds=front.limits.write_seconds)
                    await while_connected(receive, sending)
                except ClientGone:
                    drop_connection(scope)


def _size_bytes(answer: dict[str, Any]) -> int:
    return len(answer.get("prompt", "")) + 16 * len(answer.get("tokens", ()))


def _tokenized(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    front = front_of(request)
    fields = front.schema.open(body, chat=True)
    text, chat, mark = _text(front, fields)
    limit = front.limits.tokenize_bytes
    if len(text) > limit or len(text.encode("utf-8", "replace")) > limit:
        raise bad(f"the text has more than {limit} bytes: cut it into pieces", "prompt", code="text_too_large")
    ids = front.tokenizer.encode(
        text, add_special_tokens=fields.boolean("add_special_tokens", default=not chat), parse_special=True, mark=mark
    )
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": front.model.context_tokens, "tokens": ids, "token_strs": None}
    if fields.boolean("return_token_strs"):
        answer["token_strs"] = JsonRows(lambda token: front.tokenizer.id_to_bytes(token).decode("utf-8", "replace"), ids)
    record_of(request).ignored = fields.finish(front.config.unknown_fields)
    return answer


def _text(front: Front, fields: Fields) -> tuple[str, bool, str]:
    """The text to tokenise, whether it is a rendered chat, and the mark of its special tokens."""
    prompt, messages = fields.raw("prompt"), fields.raw("messages")
    if (prompt is None) == (messages is None):
        raise bad("give either prompt or messages", "prompt")
    if messages is None:
        return expect(str, prompt, "prompt"), False, ""
    continue_final, tools = fields.boolean("continue_final_message"), front.schema.tools(fields)
    text, mark = render_chat(
        front.template,
        front.tokenizer,
        messages,
        add_generation_prompt=fields.boolean("add_generation_prompt", default=True) and not continue_final,
        continue_final_message=continue_final,
        tools=None if tools is None else tools.listed,
        tools_in_words=not front.style.template_knows_tools,
        extras=front.schema.thinking(fields)[1],
    )
    return text, True, mark


def _detokenized(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    front = front_of(request)
    fields = front.schema.open(body)
    tokens = fields.raw("tokens")
    if not isinstance(tokens, list):
        raise bad(f"tokens must be a list of token ids, not {shown(tokens)}", "tokens")
    if len(tokens) > front.model.context_tokens:
        raise bad(f"tokens has {len(tokens)} ids and at most {front.model.context_tokens} are allowed", "tokens")
    ids = checked_token_ids(tokens, front.model.head_width, "tokens")
    record_of(request).ignored = fields.finish(front.config.unknown_fields)
    return {"prompt": front.tokenizer.decode(ids, skip_special_tokens=False)}


def _counted(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    return {"input_tokens": _prompt_tokens(request, messages_body(front_of(request), body))}


def _counted_response(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    asked = responses_body(front_of(request), body, caller_of(request).tenant)
    return {"object": "response.input_tokens", "input_tokens": _prompt_tokens(request, asked.chat)}


def _prompt_tokens(request: Request, asked: ChatBody) -> int:
    record_of(request).ignored = asked.options.ignored
    return len(chat_job(front_of(request), asked, caller_of(request)).requests[0].prompt)


tokenize = TokensRoute(_tokenized)
detokenize = TokensRoute(_detokenized)
count_tokens = TokensRoute(_counted)
input_tokens = TokensRoute(_counted_response)
