"""Translates bodies of other dialects to OpenAI's, by table: there is one reader of fields (openai/schemas.py).

same       a setting that OpenAI's dialect has under another name; an error names the client's
own        read by the dialect's own code (messages, tools, ...)
refused    the answer would be wrong without it: refused, unless it holds a neutral value
harmless   changes no answer
others     passed on: Baton's own fields (top_k, seed, cache_salt, ...) work in every dialect, and unknown ones are listed in
           x-baton-ignored, or refused with --unknown-fields refuse
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

from baton.api.errors import ApiError, bad
from baton.api.generate.options import ChatBody, CompletionBody
from baton.api.openai.known_fields import is_neutral


@dataclass(frozen=True, slots=True)
class Field:
    rule: Literal["same", "own", "refused", "harmless"]
    about: str
    "A few words about the field for the documentation."
    to: str = ""
    "OpenAI's name of the field."
    neutral: tuple[Any, ...] = ()
    "Neutral values, which are accepted. Null is always neutral."
    kind: str = ""
    "JSON type of the field, if no field of OpenAI's has it."


Table = Mapping[str, Field]
Body = TypeVar("Body", ChatBody, CompletionBody)


def same(to: str, about: str = "") -> Field:
    return Field("same", about, to=to)


def own(about: str, kind: str) -> Field:
    return Field("own", about, kind=kind)


def refused(*neutral: Any, about: str = "") -> Field:
    return Field("refused", about, neutral=neutral)


def harmless(about: str = "changes no answer") -> Field:
    return Field("harmless", about)


ONE_ANSWER: Final[Table] = {
    "n": refused(1, about="one answer a request"),
    "best_of": refused(1),
    "echo": refused(False),
    "return_token_ids": refused(False),
    "prompt_logprobs": refused(),
    "suffix": refused("", about="it is for /v1/completions"),
    "continue_final_message": refused(False),
    "add_generation_prompt": refused(True),
}
"""Options of OpenAI's older endpoints that have no place in another dialect's answer."""


def translated(body: Mapping[str, Any], table: Table, place: str = "") -> dict[str, Any]:
    """OpenAI's body, without fields that the table leaves to the dialect. `place`: prefix of a nested object, "options."."""
    result: dict[str, Any] = {}
    for name, value in body.items():
        field = table.get(name)
        if value is None or (field is not None and field.rule in ("own", "harmless")):
            continue
        if field is None:
            result.setdefault(place + name, value)
        elif field.rule == "refused":
            if not is_neutral(value, field.neutral):
                why = f": {field.about}" if field.about else ""
                raise bad(f"{place}{name} is not supported{why}", f"{place}{name}", code="unsupported")
        elif result.setdefault(field.to, value) != value:
            raise bad(f"{place}{name} and another field are the same setting and differ: give one of them", f"{place}{name}")
    return result


def also_ignored(body: Body, names: Sequence[str], unknown: Literal["ignore", "refuse"]) -> Body:
    """Adds fields that the dialect left out to the ignored ones, or refuses them, like unknown fields."""
    if names and unknown == "refuse":
        raise bad(f"{names[0][:64]} is not supported", names[0].split("[", 1)[0].split(".", 1)[0], code="unknown_field")
    return replace(body, options=replace(body.options, ignored=(*body.options.ignored, *names)))


def format_named(body: Body, name: str) -> Body:
    """Sets the client's name of the format field: errors in the format are found later."""
    if body.options.grammar_field != "response_format":
        return body
    return replace(body, options=replace(body.options, grammar_field=name))


@contextmanager
def errors_named_by(*tables: tuple[Table, str]) -> Iterator[None]:
    """Renames the field in errors to the name that the client used. Each table comes with its place."""
    names = {field.to: place + name for table, place in tables for name, field in table.items() if field.rule == "same"}
    try:
        yield
    except ApiError as error:
        theirs = names.get(error.param or "")
        if theirs is None:
            raise
        message = str(error).replace(error.param or "", theirs, 1)
        raise ApiError(error.http_status, message, param=theirs, code=error.code, headers=error.headers) from None
