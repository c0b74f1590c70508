"""Ollama's answers: /api/chat and /api/generate send a line of JSON per piece, with usage in the last one. Also the routes that
clients call first (models, capabilities, version), and the dialect's errors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from baton import __version__
from baton.api.dialect import Dialect, line, one_line, text_frame
from baton.api.errors import JsonResponse
from baton.api.front import Front, front_of
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.options import ChatBody
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, chat_job, completion_job
from baton.api.generate.shape import Events, NothingToGenerate, Put, Shape
from baton.api.generate.usage import drafts_json, preemptions_json
from baton.api.http.auth import ApiCaller
from baton.api.http.json_body import parse_object, read_body
from baton.api.ollama.fields import OPTIONS, chat_body, generate_body, model_name
from baton.protocol.request import FinishReason
from baton.text.fill_in import fill_in_tokens
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
        """Text, reasoning and calls, under this route's names."""
        raise NotImplementedError

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        piece = pieces[0]
        calls = [_call(call) for call in piece.tool_calls if call.is_whole]
        return self._line(self.content(piece.text, piece.reasoning, calls), self._end(piece, usage))

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        return NdjsonLines(self, generation, put)

    def line(self, text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> bytes:
        return line(self._line(self.content(text, thinking, calls), {"done": False}))

    def last_line(self, piece: Piece, usage: Usage) -> bytes:
        return line(self._line(self.content(), self._end(piece, usage)))

    def load(self) -> NothingToGenerate:
        return NothingToGenerate(self._line(self.content(), {"done": True, "done_reason": "load"}))

    def named(self, body: dict[str, Any]) -> None:
        """Remembers the client's name of the model for the answers."""
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
            **drafts_json(usage),
            **preemptions_json(usage),
        }


class OllamaChatShape(OllamaShape):
    kind = "ollama.chat"

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
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

    def job(self, body: dict[str, Any], caller: ApiCaller) -> Job:
        asked = generate_body(self.front, body)
        self.named(body)
        if asked is None:
            raise self.load()
        make = chat_job if isinstance(asked, ChatBody) else completion_job
        return make(self.front, asked, caller)  # type: ignore[arg-type]

    def content(self, text: str = "", thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


class NdjsonLines:
    """Lines of a streamed answer. Text and reasoning are sent at once, a call only when it is complete, because its arguments
    are an object. A truncated call is not sent: a client would run it."""

    def __init__(self, shape: OllamaShape, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._generation = generation
        self._put = put
        self._frame: tuple[bytes, bytes] | None = None
        self._call: ToolCallDelta | None = None
        "A call that may still grow."
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


OLLAMA: Final = Dialect(
    "ollama",
    lambda error, request_id: {"error": str(error)},
    error_event=line,
    stream_type="application/x-ndjson",
    untyped_bodies=True,
    keep_alive=b" ",  # a blank before the next line: clients parse every line, and an empty line is invalid
)


API_VERSION: Final = "0.12.6"
"Emulated version of Ollama: clients refuse a server that seems too old."
_OLLAMA_NAMES: Final = {field.to: name for name, field in OPTIONS.items()}
_NEVER: Final = "9999-12-31T00:00:00Z"
_SUFFIX_NOTE: Final = "{# /api/generate with a suffix: {{ .Prompt }}, the gap that is filled in, {{ .Suffix }} #}"
"""Comment of the template language."""


async def tags(request: Request) -> Response:
    front = front_of(request)
    return JsonResponse({"models": [_model(front, name) for name in front.model.names]})


async def ps(request: Request) -> Response:
    """Lists the served model: it is always in memory."""
    front = front_of(request)
    more = {"expires_at": _NEVER, "size_vram": 0, "context_length": front.model.context_tokens}
    return JsonResponse({"models": [{**_model(front, front.model.name), **more}]})


async def version(request: Request) -> Response:
    return JsonResponse({"version": API_VERSION, "baton": __version__})


async def pull(request: Request) -> Response:
    """Succeeds for the served model, because many clients pull it before they chat; other models are not downloaded. The stream
    is one line, so it is the same with stream: false."""
    await _require_model(request)
    return Response(line({"status": "success"}), media_type=OLLAMA.stream_type)


async def _require_model(request: Request) -> None:
    front = front_of(request)
    with front.budget.lease() as lease:
        body = parse_object(await read_body(request, front.limits, lease), front.limits)
    name = body.get("model") if body.get("model") is not None else body.get("name")
    front.schema.require_model(model_name(front, name))


async def show(request: Request) -> Response:
    front = front_of(request)
    await _require_model(request)
    return JsonResponse(
        {
            "modified_at": _modified(front),
            "details": _details(),
            "model_info": {"general.architecture": "baton", "baton.context_length": front.model.context_tokens},
            "capabilities": _capabilities(front),
            "parameters": _parameters(front),
            "template": _template(front),
            "modelfile": "",
            "license": "",
        }
    )


def _template(front: Front) -> str:
    """The chat template. Clients look for Ollama's variables in it: Continue fills in the middle where `.Suffix` occurs."""
    source = next(iter(front.template.sources), "")
    return f"{_SUFFIX_NOTE}{source}" if _fills_in(front) else source


def _fills_in(front: Front) -> bool:
    return front.model.generates and fill_in_tokens(front.tokenizer) is not None


def _parameters(front: Front) -> str:
    """One parameter per line, under Ollama's names. Continue and Zed read the context length from num_ctx."""
    named = {_OLLAMA_NAMES.get(name, name): value for name, value in front.model.sampling_defaults.items()}
    if named.get("top_k", 0) <= 0:
        named.pop("top_k", None)  # no limit: Ollama has no value for it
    return "\n".join(f"{name} {value}" for name, value in {"num_ctx": front.model.context_tokens, **named}.items())


def _model(front: Front, name: str) -> dict[str, Any]:
    digest = hashlib.sha256((front.model.weights or front.model.fingerprint).encode()).hexdigest()
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(front),
        "size": front.model.weights_bytes,
        "digest": digest,
        "details": _details(),
    }


def _capabilities(front: Front) -> list[str]:
    generates = front.model.generates
    able = {
        "completion": generates,
        "insert": _fills_in(front),
        "embedding": "embed" in front.model.tasks,
        "tools": generates and front.style.has_calls,
        "thinking": generates and front.style.has_thoughts,
    }
    return [name for name, yes in able.items() if yes]


def _details() -> dict[str, Any]:
    unknown = {"parameter_size": "", "quantization_level": ""}
    return {"parent_model": "", "format": "", "family": "", "families": [], **unknown}


def _modified(front: Front) -> str:
    return datetime.fromtimestamp(front.model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
