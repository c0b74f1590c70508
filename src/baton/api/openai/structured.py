"""The fields that constrain an answer's format -> a Grammar. Several families of names for the same five kinds.

    OpenAI       response_format {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": ...}}
    vLLM         structured_outputs {"json" | "regex" | "choice" | "grammar" | "json_object": ...}; guided_json, ...
    llama.cpp    grammar (GBNF), json_schema; response_format {"type": "json_object", "schema": ...}
    SGLang       regex, ebnf, json_schema as a string
    TGI          response_format {"type": "json_object" | "json" | "regex" | "json_schema", "value": ...}

Only the types of the fields are checked here; schemas and grammars are checked when they are compiled (prepare.py). At most one
constraint may be given: two have no agreed meaning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from baton.api.errors import bad
from baton.api.fields import Fields, expect, shown
from baton.api.limits import Limits
from baton.protocol.grammar import Grammar


@dataclass(frozen=True, slots=True)
class RequestedGrammar:
    field: str
    grammar: Grammar
    part: str = ""
    "Name of the part, if the field has several."

    @property
    def place(self) -> str:
        return f"{self.field}.{self.part}" if self.part else self.field


def grammar_of(fields: Fields, limits: Limits) -> RequestedGrammar | None:
    asked = [*_top_level(fields, limits), *_structured_outputs(fields, limits), *_response_format(fields)]
    if len(asked) > 1 and any(one.grammar != asked[0].grammar for one in asked):
        raise bad(f"{asked[0].place} and {asked[1].place} each constrain the answer: give one of them", asked[1].field)
    return asked[0] if asked else None


def grammar_of_format(value: Any, limits: Limits) -> Grammar | None:
    """The grammar of a response_format. None: it constrains nothing."""
    asked = list(_response_format(Fields({"response_format": value}, limits, 0)))
    return asked[0].grammar if asked else None


def _top_level(fields: Fields, limits: Limits) -> Iterator[RequestedGrammar]:
    for name, kind in _TOP_LEVEL.items():
        value = fields.raw(name)
        if value is not None and value != "":
            yield from _of_kind(kind, value, name, limits)


_TOP_LEVEL: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "grammar": "grammar",
    "ebnf": "grammar",
    "json_schema": "json",
    "json_object": "json_object",
    "regex": "regex",
}


CONSTRAINTS: Final = (*_TOP_LEVEL, "structured_outputs", "response_format")
"""All fields that this module reads."""


def _structured_outputs(fields: Fields, limits: Limits) -> Iterator[RequestedGrammar]:
    kinds = ("json", "regex", "choice", "grammar", "json_object")
    value = fields.object("structured_outputs", (*kinds, "structural_tag", "whitespace_pattern", *_BACKEND_SETTINGS))
    if value is None:
        return
    for name in ("structural_tag", "whitespace_pattern"):
        if value.get(name) is not None:
            raise bad(f"structured_outputs.{name} is not supported", "structured_outputs", code="unsupported")
    for kind in kinds:
        if value.get(kind) is not None:
            for asked in _of_kind(kind, value[kind], f"structured_outputs.{kind}", limits):
                yield RequestedGrammar("structured_outputs", asked.grammar, kind)


_BACKEND_SETTINGS: Final = ("disable_fallback", "_backend", "_backend_was_auto")
"""vLLM's backend settings, which change no answer."""


def _response_format(fields: Fields) -> Iterator[RequestedGrammar]:
    name = "response_format"
    value = fields.object(name, ("type", "json_schema", "schema", "value"))
    if value is None:
        return
    kind = value.get("type")
    if value.get("value") is not None:
        yield from _with_value(kind, value, name)
    elif kind == "json_object" and value.get("schema") is None:
        yield RequestedGrammar(name, Grammar("json_object"))
    elif kind == "json_object":
        yield _json(value["schema"], name, f"{name}.schema")
    elif kind == "json_schema":
        inner = value.get("json_schema")
        if inner is None and value.get("schema") is not None:  # llama.cpp's form
            yield _json(value["schema"], name, f"{name}.schema")
        else:
            inner = expect(dict, inner, f"{name}.json_schema", name)
            if inner.get("strict") not in (None, True, False):
                raise bad(f"{name}.json_schema.strict must be true or false, not {shown(inner['strict'])}", name)
            yield _json(inner.get("schema"), name, f"{name}.json_schema.schema")
    elif kind != "text":
        shown_kind = ascii(kind) if isinstance(kind, str) and len(kind) <= 64 else shown(kind)
        raise bad(f"{name}.type must be text, json_object or json_schema, not {shown_kind}", name)


def _with_value(kind: Any, value: dict[str, Any], name: str) -> Iterator[RequestedGrammar]:
    """TGI's form. huggingface_hub's InferenceClient makes it of OpenAI's json_schema."""
    inner, place = value["value"], f"{name}.value"
    if value.get("json_schema") is not None or value.get("schema") is not None:
        raise bad(f"{place} and a schema beside it each constrain the answer: give one of them", name)
    if kind in ("json", "json_object"):
        yield _json(inner, name, place)
    elif kind == "json_schema":
        yield _json(expect(dict, inner, place, name).get("schema"), name, f"{place}.schema")
    elif kind == "regex":
        yield RequestedGrammar(name, Grammar("regex", _text(expect(str, inner, place, name), place)))
    else:
        raise bad(f"{name}.type must be json, json_object, json_schema or regex where there is a value", name)


def _of_kind(kind: str, value: Any, place: str, limits: Limits) -> Iterator[RequestedGrammar]:
    match kind:
        case "json":
            yield _json(value, place, place)
        case "json_object":
            if expect(bool, value, place):
                yield RequestedGrammar(place, Grammar("json_object"))
        case "choice":
            yield RequestedGrammar(place, Grammar("choice", _choices(value, place, limits)))
        case "regex":
            yield RequestedGrammar(place, Grammar("regex", _text(value, place)))
        case _:
            text = _text(value, place)
            yield RequestedGrammar(place, Grammar("gbnf" if "::=" in text else "lark", text))


def _json(value: Any, field: str, place: str) -> RequestedGrammar:
    """A schema, or a string that holds one. The string is parsed when it is compiled."""
    if isinstance(value, str):
        return RequestedGrammar(field, Grammar("json_schema", _text(value, place)))
    if isinstance(value, dict):
        return RequestedGrammar(field, Grammar("json_schema", json.dumps(value, ensure_ascii=False, separators=(",", ":"))))
    raise bad(f"{place} must be a JSON schema, not {shown(value)}", field)


def _choices(value: Any, place: str, limits: Limits) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(entry, str) for entry in value):
        raise bad(f"{place} must be a list of strings, and not an empty one", place)
    if len(value) > limits.choices_listed:
        raise bad(f"{place} has {len(value)} entries and at most {limits.choices_listed} are allowed", place)
    return json.dumps(value)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise bad(f"{place} must be a text, and not an empty one", place)
    return value
