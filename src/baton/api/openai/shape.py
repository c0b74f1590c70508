"""The answers of OpenAI's two older endpoints, /v1/chat/completions and /v1/completions: whole, and as chunks of a stream."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from baton.api.dialect import event, one_line, text_frame
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, chat_job, completion_job
from baton.api.generate.shape import Events, Put, Shape
from baton.api.generate.usage import usage_json
from baton.api.http.auth import ApiCaller
from baton.api.openai.logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from baton.protocol.request import FinishReason
from baton.text.parsers.base import ToolCallDelta

DONE = b"data: [DONE]\n\n"


class OpenAIShape(Shape):
    object_chunk: ClassVar[str]
    "Value of `object` in a chunk; `kind` is that of a whole answer."

    @abstractmethod
    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        """One entry of `choices` in a whole answer."""

    @abstractmethod
    def delta(self, job: Job, piece: Piece, *, first: bool) -> dict[str, Any]:
        """One entry of `choices` in a chunk. `first`: nothing of this choice has been sent yet."""

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        return {
            **self._head(self.kind),
            "choices": [self.choice(job, piece) for piece in pieces],
            "usage": usage_json(usage),
        }

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        return Chunks(self, job, generation, put)

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None, *, with_usage: bool) -> dict[str, Any]:
        """One chunk of a stream. `with_usage`: the client requested usage, so every chunk has the key, as at OpenAI."""
        chunk = {**self._head(self.object_chunk), "choices": choices}
        if with_usage:
            chunk["usage"] = usage
        return chunk

    def ended(self, job: Job, piece: Piece, choice: dict[str, Any], *, whole: bool, first: bool) -> dict[str, Any]:
        """Adds the finish reason and vLLM's optional fields to a choice. `first`: as in `delta`."""
        choice["finish_reason"] = finish_word(piece)
        if piece.stop_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if piece.finish is not None and piece.ended_by is not None:
            choice["ended_by"] = piece.ended_by
        if job.options.return_token_ids:
            choice["token_ids"] = piece.tokens
            if first:
                choice["prompt_token_ids"] = list(job.requests[piece.choice // job.options.n].prompt)
        if whole and piece.prompt_logprobs is not None and job.options.sampling.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.front.tokenizer, piece.prompt_logprobs)
        return choice

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.front.model.name,
            "system_fingerprint": self.front.model.fingerprint,
        }


def finish_word(piece: Piece) -> str | None:
    """One of OpenAI's finish reasons: typed clients fail on others (`ended_by` has the actual one)."""
    word = piece.known_finish
    if word is FinishReason.STOP and piece.called:
        return "tool_calls"
    return None if word is None else word.value


class ChatShape(OpenAIShape):
    id_prefix = "chatcmpl-"
    kind = "chat.completion"
    object_chunk = "chat.completion.chunk"
    renders = True

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        return chat_job(self.front, self.front.schema.chat(body), caller)

    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.reasoning:
            # DeepSeek's name, which most clients read, and vLLM's current one.
            message |= {"reasoning_content": piece.reasoning, "reasoning": piece.reasoning}
        if piece.tool_calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [_call(call) for call in piece.tool_calls]
        return self.ended(job, piece, self._choice(job, piece, {"message": message}), whole=True, first=True)

    def delta(self, job: Job, piece: Piece, *, first: bool) -> dict[str, Any]:
        """A chunk. The role comes with the first text, not before it: clients take the first chunk for the first token."""
        text, reasoning, calls = piece.by_kind()
        delta: dict[str, Any] = {"role": "assistant", "content": text} if first else {}
        if text:
            delta["content"] = text
        if reasoning:
            # Under one name only: Zed appends the texts of both.
            delta["reasoning_content"] = reasoning
        if calls:
            delta["tool_calls"] = [_call_delta(call) for call in calls]
        if first and len(delta) > 2:
            delta["content"] = text or None
        return self.ended(job, piece, self._choice(job, piece, {"delta": delta}), whole=False, first=first)

    def _choice(self, job: Job, piece: Piece, content: dict[str, Any]) -> dict[str, Any]:
        asked = job.options.sampling.logprobs is not None
        rows = chat_logprobs(self.front.tokenizer, piece.logprobs) if asked else None
        return {"index": piece.choice, **content, "logprobs": rows}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    """The first delta of a call has all keys, later ones only the new text, as at OpenAI."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call(call)}


class CompletionShape(OpenAIShape):
    id_prefix = "cmpl-"
    kind = "text_completion"
    object_chunk = "text_completion"

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        return completion_job(self.front, self.front.schema.completion(body), caller)

    def choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        return self.ended(job, piece, self._choice(job, piece), whole=True, first=True)

    def delta(self, job: Job, piece: Piece, *, first: bool) -> dict[str, Any]:
        return self.ended(job, piece, self._choice(job, piece), whole=False, first=first)

    def _choice(self, job: Job, piece: Piece) -> dict[str, Any]:
        asked = job.options.sampling.logprobs
        columns = None
        if asked is not None:
            columns = completion_logprobs(self.front.tokenizer, piece.tokens, piece.logprobs, piece.offsets, asked)
        return {"index": piece.choice, "text": piece.text, "logprobs": columns}


class Chunks:
    """Converts pieces to chunks. A piece without text (half a character, perhaps a stop string) waits for the next one with
    text."""

    def __init__(self, shape: OpenAIShape, job: Job, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._put = put
        self._job = job
        self._generation = generation
        self._waiting: dict[int, Piece] = {}
        self._begun: set[int] = set()
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        "Bytes before and after the text in an event that carries only text, as most do, by choice."

    def add_text(self, choice: int, text: str) -> None:
        frame = self._frames.get(choice)
        if frame is not None:
            before, after = frame
            self._put(before + one_line(text) + after)
            return
        self.add(Piece.of_text(choice, text))
        self._frames[choice] = text_frame(lambda mark: self._event(Piece.of_text(choice, mark)))

    def add(self, piece: Piece) -> None:
        if piece.choice in self._waiting:
            earlier = self._waiting.pop(piece.choice)
            earlier.add(piece)
            piece = earlier
        if not piece.worth_sending:
            self._waiting[piece.choice] = piece
            return
        for ordered in (piece,) if len(piece.parts) < 2 else piece.in_order():
            self._put(self._event(ordered))
            self._begun.add(piece.choice)

    def _event(self, piece: Piece) -> bytes:
        options = self._job.options.stream
        usage = _usage_so_far(piece) if options.continuous_usage else None
        choice = self._shape.delta(self._job, piece, first=piece.choice not in self._begun)
        return event(self._shape.chunk([choice], usage, with_usage=options.include_usage))

    def end(self) -> None:
        if self._job.options.stream.include_usage:
            self._put(event(self._shape.chunk([], usage_json(self._generation.usage), with_usage=True)))
        self._put(DONE)


def _usage_so_far(piece: Piece) -> dict[str, Any]:
    """Usage of this chunk's choice. Cached tokens are reported in the last chunk."""
    prompt, output = piece.usage
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
