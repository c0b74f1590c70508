"""POST /v1/completions: the shapes of its answer."""

from __future__ import annotations

from typing import Any

from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, completion_job
from baton.api.http.auth import Caller
from baton.api.openai.logprobs import completion_logprobs, prompt_logprobs
from baton.api.openai.shape import OpenAIShape, finish_word


class CompletionShape(OpenAIShape):
    id_prefix = "cmpl-"
    kind = "text_completion"
    object_chunk = "text_completion"

    def job(self, body: dict[str, Any], caller: Caller) -> Job:
        return completion_job(self.front, self.front.schema.completion(body), caller)

    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        choice = self._common(job, piece)
        if piece.prompt_logprobs is not None and job.options.sampling.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.front.tokenizer, piece.prompt_logprobs)
        return choice

    def delta(self, job: Job, piece: Piece, *, first: bool) -> dict[str, Any]:
        return self._common(job, piece, with_prompt_ids=first)

    def _common(self, job: Job, piece: Piece, *, with_prompt_ids: bool = True) -> dict[str, Any]:
        asked = job.options.sampling.logprobs
        columns = None
        if asked is not None:
            columns = completion_logprobs(self.front.tokenizer, piece.tokens, piece.logprobs, piece.offsets, asked)
        choice: dict[str, Any] = {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": columns,
            "finish_reason": finish_word(piece),
        }
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if piece.finish is not None and piece.ended_by is not None:
            choice["ended_by"] = piece.ended_by
        if job.options.return_token_ids:
            choice["token_ids"] = piece.tokens
            if with_prompt_ids:
                choice["prompt_token_ids"] = list(job.requests[piece.choice // job.options.n].prompt)
        return choice
