"""The answers of /v1/responses: whole, as a stream, and stored ones (GET, DELETE, input_items).

Events of a stream. Each has a number, from 0, without a gap.

response.created  response.in_progress
    response.output_item.added  response.content_part.added  response.output_text.delta...  .done  response.output_item.done
    (reasoning: response.reasoning_text.delta, or reasoning_summary_part and reasoning_summary_text.delta where requested;
    a call: response.function_call_arguments.delta, and no content part)
response.completed or response.incomplete, with the whole answer
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from baton.api.dialect import named_event, one_line, text_frame
from baton.api.errors import ApiError, JsonResponse, bad
from baton.api.front import Front, caller_of, front_of
from baton.api.generate.blocks import BlockKind, Blocks, kind_of, text_of
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.options import Options
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, chat_job
from baton.api.generate.shape import Events, Put, Shape
from baton.api.generate.usage import drafts_json, preemptions_json
from baton.api.http.auth import ApiCaller
from baton.api.limits import Limits
from baton.api.openai.logprobs import chat_logprobs
from baton.api.responses.fields import THEIRS, ResponsesRequest, responses_body
from baton.api.responses.store import RESPONSE_PREFIX, Item, OutputItems, Stored, input_items, text_part
from baton.protocol.request import FinishReason
from baton.text.parsers.base import Content, Part, Reasoning, ToolCallDelta, join_parts
from baton.text.tokenizer import Tokenizer


class ResponseShape(Shape):
    kind = "response"
    id_prefix = RESPONSE_PREFIX
    renders = True

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self._asked: ResponsesRequest | None = None
        self._echoed: dict[str, Any] = {}
        self._tenant = b""
        self._events: ResponseEvents | None = None
        self.items = OutputItems(self.id)

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        self._tenant = caller.tenant
        self._asked = responses_body(self.front, body, caller.tenant)
        self._echoed = _echoed(body, self._asked, self.front.limits)
        self.items = OutputItems(self.id, summary=self._asked.summary, namespaces=self._asked.namespaces)
        return chat_job(self.front, self._asked.chat, caller)

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        piece = pieces[0]
        output: list[Item] = []
        rows = OutputRows(self.front.tokenizer)
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
        """The error in both forms that clients look for: an event of type error, and a body with an error."""
        number = self._events.next_number() if self._events is not None else 0
        error = body["error"]
        fields = {name: error[name] for name in ("code", "message", "param")}
        return named_event({"type": "error", **fields, **body, "sequence_number": number})

    def finished(self, piece: Piece, output: list[Item], usage: Usage) -> dict[str, Any]:
        """Builds the final answer, and stores it if requested."""
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
            **self._echoed,
        }


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0, **drafts_json(usage)},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        **preemptions_json(usage),
    }


def _message(piece: Piece) -> dict[str, Any]:
    """The answer as a message, for conversations that continue it."""
    message: dict[str, Any] = {"role": "assistant", "content": piece.text}
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if piece.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in piece.tool_calls
        ]
    return message


_SCHEMA_PARTS: Final = ("name", "description", "strict")
_METADATA_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class _EventNames:
    """Event names of a kind of block."""

    text: str
    part: str = ""
    index: str = ""
    "Name of the part's index in its item."


_EVENT_NAMES: Final = {
    "text": _EventNames("response.output_text", "response.content_part", "content_index"),
    "reasoning": _EventNames("response.reasoning_text", "response.content_part", "content_index"),
    "summary": _EventNames("response.reasoning_summary_text", "response.reasoning_summary_part", "summary_index"),
    "call": _EventNames("response.function_call_arguments"),
}


class ResponseEvents:
    def __init__(self, shape: ResponseShape, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._generation = generation
        self._put = put
        self._blocks = Blocks(self)
        self._number = -1
        self._begun = False
        self._output: list[Item] = []
        "Completed items."
        self._open: list[Part] = []
        "Parts of the open item."
        self._rows = OutputRows(shape.front.tokenizer)
        self._logprobs: list[Any] = []
        "Log-probabilities of the open item."
        self._frame: tuple[bytes, bytes] | None = None
        self._whole = Piece(0)
        "The whole answer so far, for the store."
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
        self._cut = self._whole.known_finish is not FinishReason.STOP  # the model did not end the open item
        self._blocks.end()
        if not self._output:  # an empty answer is a message without text
            self.open(Content(""))
            self.close("text")
        answer = self._shape.finished(self._whole, self._output, self._generation.usage)
        kind = "response.completed" if answer["status"] == "completed" else "response.incomplete"
        self._emit({"type": kind, "response": answer})

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
        self._emit({"type": "response.output_item.added", "output_index": place, "item": opened})
        if kind != "call":
            self._emit({"type": f"{self._names_of(kind).part}.added", **self._place(kind), "part": self._part(kind, "", [])})

    def more(self, part: Part) -> None:
        rows = self._rows.of(part)
        self._open.append(part)
        self._logprobs += rows
        if text_of(part):
            self._emit(self._delta(part, rows))

    def close(self, kind: BlockKind) -> None:
        self._frame = None
        place, words, logprobs, part = len(self._output), self._names_of(kind), self._logprobs, _joined(self._open, kind)
        join_parts(self._whole.parts, [part])
        text = text_of(part)
        if isinstance(part, ToolCallDelta):
            name = self._shape.items.tool_name(part)
            self._emit({"type": f"{words.text}.done", **self._place(kind), **name, "arguments": text})
        else:
            done = {"type": f"{words.text}.done", **self._place(kind), "text": text}
            self._emit({**done, "logprobs": logprobs} if kind == "text" else done)
            self._emit({"type": f"{words.part}.done", **self._place(kind), "part": self._part(kind, text, logprobs)})
        item = self._shape.items.item(place, part, logprobs, cut=self._cut)
        self._emit({"type": "response.output_item.done", "output_index": place, "item": item})
        self._output.append(item)

    def _begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        response = self._shape.response("in_progress", [])
        self._emit({"type": "response.created", "response": response})
        self._emit({"type": "response.in_progress", "response": response})

    def _emit(self, content: dict[str, Any]) -> None:
        self._put(named_event({**content, "sequence_number": self.next_number()}))

    def _names_of(self, kind: BlockKind) -> _EventNames:
        return _EVENT_NAMES["summary" if kind == "reasoning" and self._shape.items.summary else kind]

    def _delta(self, part: Part, logprobs: list[Any]) -> dict[str, Any]:
        kind = kind_of(part)
        delta = {"type": f"{self._names_of(kind).text}.delta", **self._place(kind), "delta": text_of(part)}
        return {**delta, "logprobs": logprobs} if kind == "text" else delta

    def _place(self, kind: BlockKind) -> dict[str, Any]:
        place = {"item_id": self._item_id, "output_index": len(self._output)}
        return place if kind == "call" else {**place, self._names_of(kind).index: 0}

    def _part(self, kind: BlockKind, text: str, logprobs: list[Any]) -> Item:
        return self._shape.items.reasoning_part(text) if kind == "reasoning" else text_part(text, logprobs)


def _joined(parts: list[Part], kind: BlockKind) -> Part:
    """Joins the parts of one item. An item without parts is a message without text."""
    if kind != "call":
        text = "".join(map(text_of, parts))
        return Content(text) if kind == "text" else Reasoning(text)
    joined: list[Part] = []
    join_parts(joined, parts)
    return joined[0]


class OutputRows:
    """Log-probabilities of the parts of an answer. A part consumes one row per token; only rows of text are sent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rows: list[Any] = []

    def add(self, piece: Piece) -> None:
        """Add the rows of a piece. Must be called before `of` is called for the piece's parts."""
        if piece.logprobs:
            self._rows += chat_logprobs(self._tokenizer, piece.logprobs)["content"]

    def of(self, part: Part) -> list[Any]:
        if not self._rows:
            return []
        taken = self._rows[: part.tokens]
        del self._rows[: part.tokens]
        return taken if isinstance(part, Content) else []


_PAGE_MAX = 100


async def stored_response(request: Request) -> Response:
    store, tenant, name = front_of(request).responses, caller_of(request).tenant, request.path_params["id"]
    if request.method == "DELETE":
        if not store.drop(tenant, name):
            raise _not_found()
        return JsonResponse({"id": name, "object": "response", "deleted": True})
    return Response(_stored(request).response, media_type="application/json")


async def stored_input(request: Request) -> Response:
    """A page of the stored input, newest first unless order=asc; `after`: id of the item before the page."""
    query, name = request.query_params, request.path_params["id"]
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= _PAGE_MAX):
        raise bad(f"limit must be a whole number from 1 to {_PAGE_MAX}", "limit")
    if order not in ("asc", "desc"):
        raise bad('order must be "asc" or "desc"', "order")
    items = input_items(name, _stored(request))
    items = items if order == "asc" else items[::-1]
    if after := query.get("after"):
        places = [place for place, item in enumerate(items, start=1) if item["id"] == after]
        items = items[places[0] :] if places else []
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JsonResponse({"object": "list", "data": page, **ends, "has_more": len(page) < len(items)})


def _stored(request: Request) -> Stored:
    stored = front_of(request).responses.get(caller_of(request).tenant, request.path_params["id"])
    if stored is None:
        raise _not_found()
    return stored


def _not_found() -> ApiError:
    return ApiError(404, "there is no stored response with that id", param="response_id", code="response_not_found")


def _echoed(body: dict[str, Any], asked: ResponsesRequest, limits: Limits) -> dict[str, Any]:
    """Settings that the answer repeats."""
    metadata = body.get("metadata") or {}
    if not isinstance(metadata, dict) or len(metadata) > _METADATA_MAX:
        raise bad(f"metadata must be an object with at most {_METADATA_MAX} keys", "metadata")
    options = asked.chat.options
    reasoning = body.get("reasoning")
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": options.max_tokens,
        "metadata": metadata,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": reasoning if isinstance(reasoning, dict) else {"effort": None, "summary": None},
        "store": asked.store,
        "text": _echoed_text(body, options, limits),
        "temperature": options.sampling.temperature,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_logprobs": options.sampling.logprobs or 0,
        "top_p": options.sampling.top_p,
        "truncation": "disabled",
        "user": body.get("user"),
        "background": False,
    }


def _echoed_text(body: Mapping[str, Any], options: Options, limits: Limits) -> dict[str, Any]:
    text = body.get("text") or {}
    form = text.get("format") or {"type": "text"}
    return {**text, "format": _applied(body, options, limits) if form["type"] == "text" else form}


def _applied(body: Mapping[str, Any], options: Options, limits: Limits) -> dict[str, Any]:
    """The applied format. Regular expressions and grammars (guided_regex, ...) have no form in `text.format`."""
    grammar = options.sampling.grammar
    if grammar is None or grammar.kind not in ("json_object", "json_schema"):
        return {"type": "text"}
    if grammar.kind == "json_object":
        return {"type": "json_object"}
    given = (body.get(THEIRS) or {}).get("json_schema")
    named = {name: given[name] for name in _SCHEMA_PARTS if given.get(name) is not None} if isinstance(given, dict) else {}
    # OpenAI's clients expect a name, which the fields of other servers lack.
    return {"type": "json_schema", "name": options.grammar_field, **named, "schema": _schema(grammar.text, limits)}


def _schema(text: str, limits: Limits) -> Any:
    """The schema as a value. It may be any text from the client: invalid or too large ones are refused when compiled."""
    try:
        return json.loads(text) if len(text) <= limits.grammar_bytes else None
    except (ValueError, RecursionError):
        return None
