"""The events of a streamed response. Each has a number, from 0, without a gap.

response.created  response.in_progress
    response.output_item.added  response.content_part.added  response.output_text.delta...  .done  response.output_item.done
    (reasoning: response.reasoning_text.delta, or reasoning_summary_part and reasoning_summary_text.delta where it is asked for;
    a call: response.function_call_arguments.delta, and no content part)
response.completed or response.incomplete, with the whole answer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from baton.api.dialect import named_event, one_line, text_frame
from baton.api.front import Front
from baton.api.generate.blocks import BlockKind, Blocks, kind_of, text_of
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.shape import Put
from baton.api.responses.output_items import Item, OutputItems, text_part
from baton.api.responses.rows import Rows
from baton.protocol.request import FinishReason
from baton.text.parsers.base import Content, Part, Reasoning, ToolCallDelta, join_parts


@dataclass(frozen=True, slots=True)
class _Words:
    """How events call a kind of block."""

    text: str
    part: str = ""
    index: str = ""
    "The place of the part in its item."


_WORDS: Final = {
    "text": _Words("response.output_text", "response.content_part", "content_index"),
    "reasoning": _Words("response.reasoning_text", "response.content_part", "content_index"),
    "summary": _Words("response.reasoning_summary_text", "response.reasoning_summary_part", "summary_index"),
    "call": _Words("response.function_call_arguments"),
}


class Answer(Protocol):
    """The response whose events these are (shape.py)."""

    front: Front
    items: OutputItems

    def response(self, status: str, output: list[Item]) -> dict[str, Any]: ...

    def finished(self, piece: Piece, output: list[Item], usage: Usage) -> dict[str, Any]: ...


class ResponseEvents:
    def __init__(self, shape: Answer, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._generation = generation
        self._put = put
        self._blocks = Blocks(self)
        self._number = -1
        self._begun = False
        self._output: list[Item] = []
        "Items that are done."
        self._open: list[Part] = []
        "Parts of the item that is open."
        self._rows = Rows(shape.front.tokenizer)
        self._logprobs: list[Any] = []
        "Of the item that is open."
        self._frame: tuple[bytes, bytes] | None = None
        self._whole = Piece(0)
        "All of the answer, for the store."
        self._cut = False

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def add_text(self, choice: int, text: str) -> None:
        if self._frame is None:
            self.add(Piece.of_text(choice, text))
            before, after = text_frame(lambda mark: named_event({**self._delta(Content(mark), []), "sequence_number": 0}))
            self._frame = before, after.removesuffix(b"0}\n\n")
            return
        before, after = self._frame
        self._open.append(Content(text))
        self._put(before + one_line(text) + after + b"%d}\n\n" % self.next_number())

    def add(self, piece: Piece) -> None:
        self._begin()
        self._rows.add(piece)
        self._blocks.add(piece)
        if piece.finish is not None:
            self._whole.finish, self._whole.unfinished = piece.finish, piece.unfinished

    def end(self) -> None:
        self._begin()
        self._cut = self._whole.known_finish is not FinishReason.STOP  # the item that is open was not ended by the model
        self._blocks.end()
        if not self._output:  # an empty answer is a message without text
            self.open(Content(""))
            self.close("text")
        answer = self._shape.finished(self._whole, self._output, self._generation.usage)
        kind = "response.completed" if answer["status"] == "completed" else "response.incomplete"
        self._tell({"type": kind, "response": answer})

    def open(self, part: Part) -> None:
        self._open, self._logprobs, place, items, kind = [], [], len(self._output), self._shape.items, kind_of(part)
        if isinstance(part, ToolCallDelta):
            self._open = [ToolCallDelta(part.index, part.id, part.name)]
            opened = items.call(place, part, "in_progress")
        elif kind == "reasoning":
            opened = items.reasoning(place, "", "in_progress")
        else:
            opened = items.message(place, "", [], "in_progress")
        self._item_id: str = opened["id"]
        self._tell({"type": "response.output_item.added", "output_index": place, "item": opened})
        if kind != "call":
            self._tell({"type": f"{self._words(kind).part}.added", **self._place(kind), "part": self._part(kind, "", [])})

    def more(self, part: Part) -> None:
        rows = self._rows.of(part)
        self._open.append(part)
        self._logprobs += rows
        if text_of(part):
            self._tell(self._delta(part, rows))

    def close(self, kind: BlockKind) -> None:
        self._frame = None
        place, words, logprobs, part = len(self._output), self._words(kind), self._logprobs, _joined(self._open, kind)
        join_parts(self._whole.parts, [part])
        text = text_of(part)
        if isinstance(part, ToolCallDelta):
            called = self._shape.items.called(part)
            self._tell({"type": f"{words.text}.done", **self._place(kind), **called, "arguments": text})
        else:
            done = {"type": f"{words.text}.done", **self._place(kind), "text": text}
            self._tell({**done, "logprobs": logprobs} if kind == "text" else done)
            self._tell({"type": f"{words.part}.done", **self._place(kind), "part": self._part(kind, text, logprobs)})
        item = self._shape.items.item(place, part, logprobs, cut=self._cut)
        self._tell({"type": "response.output_item.done", "output_index": place, "item": item})
        self._output.append(item)

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        response = self._shape.response("in_progress", [])
        self._tell({"type": "response.created", "response": response})
        self._tell({"type": "response.in_progress", "response": response})

    def _tell(self, content: dict[str, Any]) -> None:
        self._put(named_event({**content, "sequence_number": self.next_number()}))

    def _words(self, kind: BlockKind) -> _Words:
        return _WORDS["summary" if kind == "reasoning" and self._shape.items.summary else kind]

    def _delta(self, part: Part, logprobs: list[Any]) -> dict[str, Any]:
        kind = kind_of(part)
        delta = {"type": f"{self._words(kind).text}.delta", **self._place(kind), "delta": text_of(part)}
        return {**delta, "logprobs": logprobs} if kind == "text" else delta

    def _place(self, kind: BlockKind) -> dict[str, Any]:
        place = {"item_id": self._item_id, "output_index": len(self._output)}
        return place if kind == "call" else {**place, self._words(kind).index: 0}

    def _part(self, kind: BlockKind, text: str, logprobs: list[Any]) -> Item:
        return self._shape.items.reasoning_part(text) if kind == "reasoning" else text_part(text, logprobs)


def _joined(parts: list[Part], kind: BlockKind) -> Part:
    """All of one item. An item without parts is a message without text."""
    if kind != "call":
        text = "".join(map(text_of, parts))
        return Content(text) if kind == "text" else Reasoning(text)
    joined: list[Part] = []
    join_parts(joined, parts)
    return joined[0]
