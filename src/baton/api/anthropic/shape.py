"""The answers of /v1/messages: a list of blocks, and the events that build it.

message_start   content_block_start  content_block_delta ...  content_block_stop   (a block)...   message_delta   message_stop
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from baton.api.anthropic.bodies import messages_body
from baton.api.dialect import named_event, one_line, text_frame
from baton.api.generate.blocks import BlockKind, Blocks
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, chat_job
from baton.api.generate.shape import Events, Put, Shape
from baton.api.http.auth import Caller
from baton.protocol.request import FinishReason
from baton.text.parsers.base import ToolCallDelta


class MessageShape(Shape):
    kind = "message"
    id_prefix = "msg_"
    renders = True

    def job(self, body: dict[str, Any], caller: Caller) -> Job:
        return chat_job(self.front, messages_body(self.front, body), caller)

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        piece = pieces[0]
        blocks: list[dict[str, Any]] = []
        if piece.reasoning:
            blocks.append({"type": "thinking", "thinking": piece.reasoning, "signature": ""})
        if piece.text:
            blocks.append({"type": "text", "text": piece.text})
        blocks += [{"type": "tool_use", **_named(call), "input": _input(call)} for call in piece.tool_calls]
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
        "Of the block that is open, or was."
        self._begun = False
        self._frame: tuple[bytes, bytes] | None = None
        "Of a piece of text in the block that is open."
        self._last = Piece(0)

    def add_text(self, choice: int, text: str) -> None:
        if self._frame is not None:
            before, after = self._frame
            self._put(before + one_line(text) + after)
            return
        self.add(Piece(choice, text))
        self._frame = text_frame(lambda mark: named_event(self._delta("text", mark)))

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

    def open(self, kind: BlockKind, call: ToolCallDelta | None) -> None:
        self._index += 1
        block: dict[str, Any] = {"type": "text", "text": ""}
        if kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif call is not None:
            block = {"type": "tool_use", **_named(call), "input": {}}
        self._put(named_event({"type": "content_block_start", "index": self._index, "content_block": block}))

    def more(self, kind: BlockKind, text: str) -> None:
        self._put(named_event(self._delta(kind, text)))

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

    def _delta(self, kind: BlockKind, text: str) -> dict[str, Any]:
        delta = {
            "text": {"type": "text_delta", "text": text},
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[kind]
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def stop_of(piece: Piece) -> dict[str, Any]:
    """abort and timeout are not Anthropic's words; they tell what happened, as in the other dialects."""
    reason, sequence = "end_turn", None
    if piece.finish is FinishReason.LENGTH:
        reason = "max_tokens"
    elif piece.finish is not None and piece.finish is not FinishReason.STOP:
        reason = piece.finish.value
    elif isinstance(piece.stop_reason, str):
        reason, sequence = "stop_sequence", piece.stop_reason
    elif piece.called:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def usage_json(usage: Usage) -> dict[str, Any]:
    """Here cached tokens are counted apart from input_tokens."""
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens,
    }


def _named(call: ToolCallDelta) -> dict[str, Any]:
    return {"id": call.id, "name": call.name}


def _input(call: ToolCallDelta) -> Any:
    """A call that was cut off has what there is of it, as a text."""
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments
