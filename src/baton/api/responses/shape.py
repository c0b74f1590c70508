"""The answers of /v1/responses, whole (output_items.py makes their parts). events.py has them as a stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.api.dialect import named_event
from baton.api.front import Front
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, chat_job
from baton.api.generate.shape import Events, Put, Shape
from baton.api.generate.usage import preemptions_json
from baton.api.http.auth import Caller
from baton.api.responses.bodies import Asked, responses_body
from baton.api.responses.events import ResponseEvents
from baton.api.responses.output_items import RESPONSE_PREFIX, Item, OutputItems
from baton.api.responses.rows import Rows
from baton.protocol.request import FinishReason
from baton.text.parsers.base import Content


class ResponseShape(Shape):
    kind = "response"
    id_prefix = RESPONSE_PREFIX
    renders = True

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self._asked: Asked | None = None
        self._tenant = b""
        self._events: ResponseEvents | None = None
        self.items = OutputItems(self.id)

    def job(self, body: dict[str, Any], caller: Caller) -> Job:
        self._tenant = caller.tenant
        self._asked = responses_body(self.front, body, caller.tenant)
        self.items = OutputItems(self.id, summary=self._asked.summary, namespaces=self._asked.namespaces)
        return chat_job(self.front, self._asked.chat, caller)

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        piece = pieces[0]
        output: list[Item] = []
        rows = Rows(self.front.tokenizer)
        rows.add(piece)
        cut = piece.known_finish is not FinishReason.STOP
        for place, part in enumerate(piece.parts or [Content("")]):  # an empty answer is a message without text
            last = place + 1 >= len(piece.parts)
            output.append(self.items.item(place, part, rows.of(part), cut=cut and last))
        return self.finished(piece, output, usage)

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        self._events = ResponseEvents(self, generation, put)
        return self._events

    def error_event(self, body: dict[str, Any]) -> bytes:
        """Both ways that clients look for it: an event of the type error, and a body with an error."""
        number = self._events.next_number() if self._events is not None else 0
        error = body["error"]
        told = {name: error[name] for name in ("code", "message", "param")}
        return named_event({"type": "error", **told, **body, "sequence_number": number})

    def finished(self, piece: Piece, output: list[Item], usage: Usage) -> dict[str, Any]:
        """The answer, stored where it shall be."""
        assert self._asked is not None
        assert piece.finish is not None
        aborted = piece.finish is FinishReason.ABORT
        status = "cancelled" if aborted else "completed" if piece.known_finish is FinishReason.STOP else "incomplete"
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        ended_by = {} if piece.ended_by is None else {"ended_by": piece.ended_by}
        answer = {**self.response(status, output), **ended_by, "incomplete_details": why, "usage": usage_json(usage)}
        if self._asked.store:
            self.front.responses.put(self._tenant, self.id, answer, [*self._asked.conversation, _message(piece)])
        return answer

    def response(self, status: str, output: list[Item]) -> dict[str, Any]:
        assert self._asked is not None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.front.model.name,
            "output": output,
            "usage": None,
            **self._asked.echoed,
        }


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        **preemptions_json(usage),
    }


def _message(piece: Piece) -> dict[str, Any]:
    """The answer as a message of the chat that may go on with it."""
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if piece.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in piece.tool_calls
        ]
    return message
