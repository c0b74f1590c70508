"""Requests of /infill and their answers, in llama.cpp's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from baton.api.dialect import event
from baton.api.errors import bad
from baton.api.fields import expect
from baton.api.front import Front
from baton.api.generate.generation import Generation, Usage
from baton.api.generate.output import Piece
from baton.api.generate.prepare import Job, completion_job
from baton.api.generate.prompts import cut_around_gap, require_fill_in, require_may_fit
from baton.api.generate.shape import Events, Put, Shape
from baton.api.generate.usage import preemptions_json
from baton.api.http.auth import ApiCaller
from baton.api.infill.fields import INFILL
from baton.api.translate import translated
from baton.protocol.request import FinishReason
from baton.text.fill_in import FillIn, files_before, plain, plain_after

Json = dict[str, Any]


class InfillShape(Shape):
    """POST /infill."""

    kind = "infill"
    id_prefix = "infill-"

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self._truncated = False
        self._fields: list[str] = []

    def job(self, body: Json, caller: ApiCaller) -> Job:
        marks = require_fill_in(self.front, "input_suffix")
        predict = -1 if body.get("n_predict") is None else body["n_predict"]
        warms = type(predict) is int and predict == 0
        self._fields = [
            expect(str, each, "response_fields") for each in expect(list, body.get("response_fields") or [], "response_fields")
        ]
        asked = {**translated(body, INFILL), "model": body.get("model"), "max_tokens": 1 if warms else predict}
        asked["stop_token_ids"] = [*expect(list, body.get("stop_token_ids") or [], "stop_token_ids"), *marks.ends]
        tokens = predict if type(predict) is int and predict > 0 else 1
        asked["prompt"] = self._prompt(body, marks, self.front.model.context_tokens - tokens)
        job = completion_job(self.front, self.front.schema.completion(asked), caller)
        return replace(job, prompt_only=warms)

    def _prompt(self, body: Json, marks: FillIn, room: int) -> list[int]:
        """Builds the prompt. If room is short, other files are left out first, in their order, before text near the gap."""
        tokenizer = self.front.tokenizer
        prefix, suffix, begin = (expect(str, body.get(name) or "", name) for name in ("input_prefix", "input_suffix", "prompt"))
        files = [
            _file(each, f"input_extra[{place}]")
            for place, each in enumerate(expect(list, body.get("input_extra") or [], "input_extra"))
        ]
        require_may_fit(self.front, sum(map(len, (prefix, suffix, begin))))
        require_may_fit(self.front, sum(len(name) + len(text) for name, text in files))
        began = plain_after(tokenizer, begin)
        whole = plain(tokenizer, prefix), plain_after(tokenizer, suffix)
        room -= marks.marks + len(tokenizer.prefix_ids) + len(began)
        before, after = cut_around_gap(*whole, room)
        self._truncated = (before, after) != whole
        others, kept = files_before(tokenizer, marks, files, room - len(before) - len(after))
        self._truncated |= kept < len(files)
        return [*tokenizer.prefix_ids, *others, *marks.ids(before, after), *began]

    def whole(self, job: Job, pieces: Sequence[Piece], usage: Usage) -> Json:
        return self._chosen({"content": pieces[0].text, **self.end(pieces[0], usage)})

    def events(self, job: Job, generation: Generation, put: Put) -> Events:
        return Parts(self, generation, put)

    def end(self, piece: Piece, usage: Usage) -> Json:
        """Fields of the last part of an answer, besides its text."""
        named = isinstance(piece.stop_reason, str)
        limit = piece.known_finish is FinishReason.LENGTH
        return {
            "index": 0,
            "stop": True,
            "model": self.front.model.name,
            "tokens_predicted": usage.output_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens or 0,
            "truncated": self._truncated,
            "stop_type": "limit" if limit else "word" if named else "eos",
            "stopping_word": piece.stop_reason if named else "",
            "timings": {
                "prompt_n": usage.prompt_tokens - (usage.cached_tokens or 0),
                **_pace("prompt", usage.prompt_tokens, usage.prompt_seconds),
                "predicted_n": usage.output_tokens,
                **_pace("predicted", usage.output_tokens, usage.output_seconds),
                **_drafts(usage),
            },
            **preemptions_json(usage),
        }

    def _chosen(self, answer: Json) -> Json:
        if not self._fields:
            return answer
        found = {}
        for path in self._fields:
            value: Any = answer
            for key in path.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                found[path] = value
        return found


class Parts:
    """Stream of an answer, an event per piece of text."""

    def __init__(self, shape: InfillShape, generation: Generation, put: Put) -> None:
        self._shape = shape
        self._generation = generation
        self._put = put
        self._last = Piece(0)

    def add_text(self, choice: int, text: str) -> None:
        self._put(event({"index": 0, "content": text, "stop": False}))

    def add(self, piece: Piece) -> None:
        if piece.text:
            self.add_text(0, piece.text)
        self._last = piece

    def end(self) -> None:
        self._put(event({"content": "", **self._shape.end(self._last, self._generation.usage)}))


def _drafts(usage: Usage) -> Json:
    """llama.cpp's counters of draft tokens; absent if there were none."""
    drafted = usage.drafted_tokens
    return {"draft_n": drafted, "draft_n_accepted": usage.accepted_tokens} if drafted else {}


def _pace(name: str, tokens: int, seconds: float) -> Json:
    each = seconds / tokens if tokens else 0.0
    return {f"{name}_ms": seconds * 1e3, f"{name}_per_token_ms": each * 1e3, f"{name}_per_second": 1 / each if each else 0.0}


def _file(value: Any, place: str) -> tuple[str, str]:
    file: Json = expect(dict, value, place, "input_extra")
    text = file.get("text")
    if not isinstance(text, str):
        raise bad(f"{place}.text must be a text", "input_extra")
    return expect(str, file.get("filename") or "tmp", f"{place}.filename", "input_extra"), text
