"""POST /v1/chat/completions: the shapes of its answer."""

from __future__ import annotations

from typing import Any

from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, chat_job
from baton.api.http.auth import Caller
from baton.api.openai.logprobs import chat_logprobs, prompt_logprobs
from baton.api.openai.shape import OpenAIShape, finish_word
from baton.text.parsers.base import ToolCallDelta


class ChatShape(OpenAIShape):
    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    object_chunk = "chat.completion.chunk"
    renders = True

    def job(self, body: dict[str, Any], caller: Caller) -> Job:
        return chat_job(self.front, self.front.schema.chat(body), caller)

    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.reasoning:
            # DeepSeek's name, which most clients read, and the one that vLLM has now.
            message |= {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
        if piece.tool_calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [_call(call) for call in piece.tool_calls]
        choice = self._common(job, piece, {"message": message})
        if piece.prompt_logprobs is not None and job.options.sampling.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.front.tokenizer, piece.prompt_logprobs)
        if job.options.return_token_ids:
            choice["prompt_token_ids"] = list(job.requests[0].prompt)
        return choice

    def delta(self, job: Job, piece: Piece, *, first: bool) -> dict[str, Any]:
        """The role comes with the first text, not before it: clients take the first chunk for the first token."""
        text, reasoning, calls = piece.by_kind()
        delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {}
        if text:
            delta["content"] = text
        if reasoning:
            # Under one name only: Zed appends the text of both names to one thought.
            delta["reasoning_content"] = reasoning
        if calls:
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        if first and len(delta) > 2:
            delta["content"] = text or None
        choice = self._common(job, piece, {"delta": delta})
        if job.options.return_token_ids and first:
            choice["prompt_token_ids"] = list(job.requests[0].prompt)
        return choice

    def _common(self, job: Job, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        asked = job.options.sampling.logprobs is not None
        choice = {
            "index": piece.choice,
            **content,
            "logprobs": chat_logprobs(self.front.tokenizer, piece.logprobs) if asked else None,
            "finish_reason": finish_word(piece),
        }
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if piece.finish is not None and piece.ended_by is not None:
            choice["ended_by"] = piece.ended_by
        if job.options.return_token_ids:
            choice["token_ids"] = piece.tokens
        return choice


def _call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """The first of a call has all keys, later ones only the new text, as OpenAI's."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call)}
