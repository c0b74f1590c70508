"""The answers of /v1/messages: a list of blocks, the events that build it, and errors.

message_start   content_block_start  content_block_delta ...  content_block_stop   (a block)...   message_delta   message_stop
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from baton.api.anthropic.fields import messages_body
from baton.api.dialect import Dialect, named_event, one_line, text_frame
from baton.api.errors import ApiError
from baton.api.generate.blocks import BlockKind, Blocks, kind_of, text_of
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, chat_job
from baton.api.generate.shape import Events, Put, Shape
from baton.api.generate.usage import drafts_json, preemptions_json
from baton.api.http.auth import ApiCaller
from baton.protocol.request import FinishReason
from baton.text.parsers.base import Content, Part, ToolCallDelta


class MessageShape(Shape):
    kind = "message"
    id_prefix = "msg_"
    renders = True

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        return chat_job(self.front, messages_body(self.front, body), caller)

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        piece = pieces[0]
        blocks = [_block(part) for part in piece.parts]
        return {**self.message(blocks), **stop_of(piece), "usage": usage_json(usage)}

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        return MessageEvents(self, generation, put)

    def message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self.front.model.name}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None}


class MessageEvents:
    def __init__(self, shape: MessageShape, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._generation = generation
        self._put = put
        self._blocks = Blocks(self)
        self._index = -1
        "Index of the open block, or of the last one."
        self._begun = False
        self._frame: tuple[bytes, bytes] | None = None
        "Bytes before and after the text in an event of the open block."
        self._last = Piece(0)

    def add_text(self, choice: int, text: str) -> None:
        if self._frame is not None:
            before, after = self._frame
            self._put(before + one_line(text) + after)
            return
        self.add(Piece.of_text(choice, text))
        self._frame = text_frame(lambda mark: named_event(self._delta(Content(mark))))

    def add(self, piece: Piece) -> None:
        self._begin()
        self._blocks.add(piece)
        if piece.finish is not None:
            self._last = piece

    def end(self) -> None:
        self._begin()
        self._blocks.end()
        usage = usage_json(self._generation.usage)
        self._put(named_event({"type": "message_delta", "delta": stop_of(self._last), "usage": usage}))
        self._put(named_event({"type": "message_stop"}))

    def open(self, part: Part) -> None:
        self._index += 1
        empty = replace(part, arguments="") if isinstance(part, ToolCallDelta) else replace(part, text="")
        self._put(named_event({"type": "content_block_start", "index": self._index, "content_block": _block(empty)}))

    def more(self, part: Part) -> None:
        if text_of(part):
            self._put(named_event(self._delta(part)))

    def close(self, kind: BlockKind) -> None:
        self._frame = None
        self._put(named_event({"type": "content_block_stop", "index": self._index}))

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        usage = {**usage_json(self._generation.usage), "output_tokens": 0}
        message = {**self._shape.message([]), "usage": usage}
        self._put(named_event({"type": "message_start", "message": message}))

    def _delta(self, part: Part) -> dict[str, Any]:
        text = text_of(part)
        delta = {
            "text": {"type": "text_delta", "text": text},
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[kind_of(part)]
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def stop_of(piece: Piece) -> dict[str, Any]:
    """Anthropic's stop_reason: typed clients know no other value, and `ended_by` has the actual reason."""
    reason, sequence = "end_turn", None
    if piece.known_finish is FinishReason.LENGTH:
        reason = "max_tokens"
    elif isinstance(piece.stop_reason, str):
        reason, sequence = "stop_sequence", piece.stop_reason
    elif piece.called:
        reason = "tool_use"
    ended_by = {} if piece.ended_by is None else {"ended_by": piece.ended_by}
    return {"stop_reason": reason, "stop_sequence": sequence, **ended_by}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Token usage in Anthropic's form: cached tokens are not part of input_tokens."""
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens,
        **drafts_json(usage),
        **preemptions_json(usage),
    }


def _block(part: Part) -> dict[str, Any]:
    """A content block. The input of a tool call that was cut off is an empty object, as at Anthropic."""
    if isinstance(part, ToolCallDelta):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": part.parsed if part.is_whole else {}}
    if isinstance(part, Content):
        return {"type": "text", "text": part.text}
    return {"type": "thinking", "thinking": part.text, "signature": ""}


ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    kind = ERROR_TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}


ANTHROPIC: Final = Dialect("anthropic", _error_body, error_event=named_event)
