"""Answers of /api/chat and /api/generate: a line of JSON a piece, and the figures with the last one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from baton.api.dialect import line, one_line, text_frame
from baton.api.front import Front
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, chat_job, completion_job
from baton.api.generate.shape import Events, NothingToGenerate, Put, Shape
from baton.api.http.auth import Caller
from baton.api.ollama.bodies import chat_body, generate_body
from baton.api.openai.schemas import ChatBody
from baton.text.parsers.base import ToolCallDelta, join_calls

Content = dict[str, Any]


class OllamaShape(Shape):
    id_prefix = "ollama-"
    renders = True

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self._asked_for = front.model.name
        self._created_at = datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def content(self, text: str = "", thinking: str = "", calls: Sequence[Content] = ()) -> Content:
        """Text, reasoning and calls, under the names of this route."""
        raise NotImplementedError

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        piece = pieces[0]
        told, left = _calls(piece.tool_calls)
        return self._line(self.content(piece.text + left, piece.reasoning, told), self._end(piece, usage))

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        return Lines(self, generation, put)

    def line(self, text: str = "", thinking: str = "", calls: Sequence[Content] = ()) -> bytes:
        return line(self._line(self.content(text, thinking, calls), {"done": False}))

    def last_line(self, piece: Piece, usage: Usage) -> bytes:
        return line(self._line(self.content(), self._end(piece, usage)))

    def load(self) -> NothingToGenerate:
        return NothingToGenerate(self._line(self.content(), {"done": True, "done_reason": "load"}))

    def named(self, body: dict[str, Any]) -> None:
        """Answers use the name that the client used."""
        if isinstance(body.get("model"), str):
            self._asked_for = body["model"]

    def _line(self, content: Content, end: Content) -> Content:
        return {"model": self._asked_for, "created_at": self._created_at, **content, **end}

    def _end(self, piece: Piece, usage: Usage) -> Content:
        prompt_ns, output_ns = int(usage.prompt_seconds * 1e9), int(usage.output_seconds * 1e9)
        return {
            "done": True,
            "done_reason": piece.finish.value if piece.finish is not None else "stop",
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

    def content(self, text: str = "", thinking: str = "", calls: Sequence[Content] = ()) -> Content:
        message: Content = {"role": "assistant", "content": text}
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

    def content(self, text: str = "", thinking: str = "", calls: Sequence[Content] = ()) -> Content:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class Lines:
    """Text and reasoning as they come; a call when it is complete, for its arguments are an object here."""

    def __init__(self, shape: OllamaShape, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._generation = generation
        self._put = put
        self._frame: tuple[bytes, bytes] | None = None
        self._calls: list[ToolCallDelta] = []
        self._last = Piece(0)

    def add_text(self, choice: int, text: str) -> None:
        if self._frame is None:
            self._frame = text_frame(lambda mark: self._shape.line(mark))
        before, after = self._frame
        self._put(before + one_line(text) + after)

    def add(self, piece: Piece) -> None:
        if piece.text or piece.reasoning:
            self._put(self._shape.line(piece.text, piece.reasoning))
        join_calls(self._calls, piece.tool_calls)
        ready = len(self._calls) if piece.finish is not None else len(self._calls) - 1
        if ready > 0:
            told, left = _calls(self._calls[:ready])
            del self._calls[:ready]
            self._put(self._shape.line(left, "", told))
        self._last = piece

    def end(self) -> None:
        self._put(self._shape.last_line(self._last, self._generation.usage))


def _calls(calls: Sequence[ToolCallDelta]) -> tuple[list[Content], str]:
    """Calls with their arguments as objects; and the text of one that is no object, as it was cut off."""
    told, left = [], ""
    for call in calls:
        try:
            arguments = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            told.append({"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": arguments}})
        else:
            left += call.arguments
    return told, left
