"""What an answer must look like, as /v1/responses has it: `text.format` in the request, and again in the answer.

Chat completions call the same setting `response_format`. Clients that bring it along mean it, so it is taken. Whatever name a
JSON format came under, the answer's `text.format` is the one that was applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from baton.api.errors import bad
from baton.api.generate.options import Options
from baton.api.limits import Limits
from baton.api.openai.structured import grammar_of_format

OURS: Final = "text.format"
THEIRS: Final = "response_format"
_TOLD: Final = ("name", "description", "strict")
"""Of a schema's companions."""


def response_format_of(body: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """As chat completions have it, and the name of the field that the client gave. None: it gave none."""
    form = _format(body.get("text"))
    if form is None:
        return body.get(THEIRS), THEIRS
    if form.get("type") != "json_schema":
        return form, OURS
    if form.get("schema") is None:
        raise bad(f"{OURS}.schema must be a JSON schema, not null", OURS)
    return {"type": "json_schema", "json_schema": {key: part for key, part in form.items() if key != "type"}}, OURS


def refuse_two_formats(body: Mapping[str, Any], used: dict[str, Any] | None, limits: Limits) -> None:
    """`used` is a good one; response_format may be given beside it where it asks for the same."""
    other = body.get(THEIRS)
    if other is None or used is None or other is used:
        return
    if grammar_of_format(other, limits) != grammar_of_format(used, limits):
        raise bad(f"{OURS} and {THEIRS} are the same setting and differ: give one of them", THEIRS)


def unused_of_text(body: Mapping[str, Any]) -> list[str]:
    """What else `text` holds (verbosity), which no model here knows."""
    text = body.get("text") or {}
    return [f"text.{name}" for name, value in text.items() if name != "format" and value is not None]


def echoed_text(body: Mapping[str, Any], options: Options, limits: Limits) -> dict[str, Any]:
    text = body.get("text") or {}
    form = text.get("format") or {"type": "text"}
    return {**text, "format": _applied(body, options, limits) if form["type"] == "text" else form}


def _format(text: Any) -> dict[str, Any] | None:
    if text is None:
        return None
    form = text.get("format") if isinstance(text, dict) else None
    if not isinstance(text, dict) or (form is not None and not isinstance(form, dict)):
        raise bad("text must be an object with a format, which is an object", "text")
    return form


def _applied(body: Mapping[str, Any], options: Options, limits: Limits) -> dict[str, Any]:
    """Expressions and grammars (guided_regex, ...) have no name in `text.format`: they are beside it."""
    grammar = options.grammar
    if grammar is None or grammar.kind not in ("json_object", "json_schema"):
        return {"type": "text"}
    if grammar.kind == "json_object":
        return {"type": "json_object"}
    given = (body.get(THEIRS) or {}).get("json_schema")
    told = {name: given[name] for name in _TOLD if given.get(name) is not None} if isinstance(given, dict) else {}
    # OpenAI's clients expect a name, which other servers' fields do not have.
    return {"type": "json_schema", "name": options.grammar_field, **told, "schema": _schema(grammar.text, limits)}


def _schema(text: str, limits: Limits) -> Any:
    """Clients may send it as a text, with anything in it: what is no JSON, or too much, is refused where it is compiled."""
    try:
        return json.loads(text) if len(text) <= limits.grammar_bytes else None
    except (ValueError, RecursionError):
        return None
