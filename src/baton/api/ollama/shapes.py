"""Answers of /api/chat and /api/generate: a line of JSON a piece, and the figures with the last one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from baton.api.dialect import line, one_line, text_frame
from baton.api.front import Front
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.options import ChatBody
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, chat_job, completion_job
from baton.api.generate.shape import Events, NothingToGenerate, Put, Shape
from baton.api.http.auth import Caller
from baton.api.ollama.bodies import chat_body, generate_body
from baton.protocol.request import FinishReason
from baton.text.parsers.base import Content, ToolCallDelta

Json = dict[str, Any]


class OllamaShape(Shape):
    id_prefix = "ollama-"
    renders = True

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self._asked_for = front.model.name
        self._created_at = datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def content(self, text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        """Text, reasoning and calls, under the names of this route."""
        raise NotImplementedError

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        piece = pieces[0]
        calls = [_call(call) for call in piece.tool_calls if call.is_whole]
        return self._line(self.content(piece.text, piece.reasoning, calls), self._end(piece, usage))

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        return Lines(self, generation, put)

    def line(self, text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> bytes:
        return line(self._line(self.content(text, thinking, calls), {"done": False}))

    def last_line(self, piece: Piece, usage: Usage) -> bytes:
        return line(self._line(self.content(), self._end(piece, usage)))

    def load(self) -> NothingToGenerate:
        return NothingToGenerate(self._line(self.content(), {"done": True, "done_reason": "load"}))

    def named(self, body: dict[str, Any]) -> None:
        """Answers use the name that the client used."""
        if isinstance(body.get("model"), str):
            self._asked_for = body["model"]

    def _line(self, content: Json, end: Json) -> Json:
        return {"model": self._asked_for, "created_at": self._created_at, **content, **end}

    def _end(self, piece: Piece, usage: Usage) -> Json:
        prompt_ns, output_ns = int(usage.prompt_seconds * 1e9), int(usage.output_seconds * 1e9)
        return {
            "done": True,
            "done_reason": "length" if piece.known_finish is FinishReason.LENGTH else "stop",
            **({} if piece.ended_by is None else {"ended_by": piece.ended_by}),
            "total_duration": prompt_ns + output_ns,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": prompt_ns,
            "eval_count": usage.output_tokens,
            "eval_duration": output_ns,
        }


class ChatShape(OllamaShape):
    kind = "ollama.chat"

    def job(self, body: dict[str, Any], caller: Caller) -> Job:
        asked = chat_body(self.front, body)
        self.named(body)
        if asked is None:
            raise self.load()
        return chat_job(self.front, asked, caller)

    def content(self, text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return {"message": message}


class GenerateShape(OllamaShape):
    kind = "ollama.generate"

    def job(self, body: dict[str, Any], caller: Caller) -> Job:
        asked = generate_body(self.front, body)
        self.named(body)
        if asked is None:
            raise self.load()
        make = chat_job if isinstance(asked, ChatBody) else completion_job
        return make(self.front, asked, caller)  # type: ignore[arg-type]

    def content(self, text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class Lines:
    """Text and reasoning as they come; a call when something else follows it or the answer ends, because its arguments are an
    object here. A call that was cut off is not sent: a client would run it."""

    def __init__(self, shape: OllamaShape, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._generation = generation
        self._put = put
        self._frame: tuple[bytes, bytes] | None = None
        self._call: ToolCallDelta | None = None
        "It may go on."
        self._last = Piece(0)

    def add_text(self, choice: int, text: str) -> None:
        if self._frame is None:
            self._frame = text_frame(lambda mark: self._shape.line(mark))
        before, after = self._frame
        self._put(before + one_line(text) + after)

    def add(self, piece: Piece) -> None:
        for part in piece.parts:
            if isinstance(part, ToolCallDelta) and self._call is not None and self._call.index == part.index:
                self._call.arguments += part.arguments
                continue
            self._send_call()
            if isinstance(part, ToolCallDelta):
                self._call = part
            else:
                text, thinking = (part.text, "") if isinstance(part, Content) else ("", part.text)
                self._put(self._shape.line(text, thinking))
        if piece.finish is not None:
            self._send_call()
        self._last = piece

    def end(self) -> None:
        self._put(self._shape.last_line(self._last, self._generation.usage))

    def _send_call(self) -> None:
        if self._call is not None and self._call.is_whole:
            self._put(self._shape.line(calls=[_call(self._call)]))
        self._call = None


def _call(call: ToolCallDelta) -> Json:
    return {"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": call.parsed}}
