r"""The grammar of an answer with tool calls in the model's own style, in llguidance's Lark.

    start: call (/\n?/ call)*                       a call is required
    start: (free call)* rest                        calls are optional: after the opening mark a call must follow (`free`)
    call: "<tool_call>\n" body "\n</tool_call>"
    body: "{\"name\": \"weather\", \"arguments\": " %json {...schema of its arguments...} "}" | ...

A mark that is a special token of the model is written as that token. Unknown keywords in schemas of tools are ignored. For a
`strict` tool and for the format of an answer the schema is binding: a keyword that cannot be enforced refuses the request
(prepare.py; strict_arguments.py, where arguments are not a JSON object).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from baton.text.parsers.calls import CallStyle
from baton.text.parsers.deepseek_calls import CALL, END_CALL, END_CALLS, END_FENCE, FENCE, SEP
from baton.text.parsers.strict_arguments import ANY_TEXT, quoted, require_enforced, text_terminal

_JSON: Final = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ ]|\n[ ]{0,64}",
    "item_separator": ",",
    "key_separator": ":",
}
_LENIENT: Final = {"lenient": True, "coerce_one_of": True}
_EXACT: Final = {"lenient": False, "coerce_one_of": False}
ANY_OBJECT: Final = '{"type": "object"}'
_END_PARAMETER: Final = "\n</parameter>\n"
_ANY_NAME: Final = r'"<parameter=" /[^<>\s]+/ ">\n"'


def calls_grammar(
    style: CallStyle,
    parameters: Mapping[str, Mapping[str, Any]],
    *,
    parallel: bool,
    special: Mapping[str, int],
    strict: Collection[str] = (),
    or_answer: str | None = None,
    free: bool = False,
) -> str:
    """The grammar of calls. `parameters`: schemas of the arguments, by name of the tool. `strict`: names of tools whose schema
    is binding. `special`: ids of marks that are special tokens. `or_answer`: a JSON schema; an answer that follows it is
    allowed too. `free`: any other answer is allowed too, for a style with marks. Raises BadGrammar if a strict schema cannot be
    enforced."""
    words = _CallMarks(style, special)
    rules = [
        f"start: {_start(words, parallel, or_answer, free)}",
        *([] if or_answer is None else [f"answer: {json_rule(or_answer or ANY_OBJECT)}"]),
        f"inside: {words.inside(parallel)}",
        f"calls: {words.opening} inside"
        + (f" ({words.between} {words.opening} inside)*" if parallel and words.between else ""),
        "body: " + " | ".join(f"body_{place}" for place in range(len(parameters))),
    ]
    for place, (name, schema) in enumerate(parameters.items()):
        if name in strict and style.form in ("xml", "python"):
            require_enforced(name, schema)
        rules += _BODIES[style.form](words, place, name, _Schema(schema, name in strict))
    if style.form == "xml":
        rules += [f"TEXT: ({ANY_TEXT}) {quoted(_END_PARAMETER)}", f"any_parameter: {_ANY_NAME} TEXT"]
    return "\n".join(rules) + "\n"


def _start(words: _CallMarks, parallel: bool, or_answer: str | None, free: bool) -> str:
    if not free:
        return "calls" if or_answer is None else "calls | answer"
    again = "*" if parallel else "?"
    if words.opening.startswith("<["):
        return f"rest ({words.opening} inside rest){again}\nrest: /(?s:.*)/"
    return f"(unbound inside){again} rest\nunbound[suffix={words.opening}]: /(?s:.*)/\nrest: /(?s:.*)/"


@dataclass(frozen=True, slots=True)
class _Schema:
    """Schema of a tool's arguments."""

    schema: Mapping[str, Any]
    exact: bool
    "Whether the tool is strict."

    @property
    def properties(self) -> list[tuple[str, Mapping[str, Any], bool]]:
        """Properties: name, schema, and whether it is required."""
        properties, required = self.schema.get("properties"), self.schema.get("required")
        needed = required if isinstance(required, list) else []
        found = properties if isinstance(properties, Mapping) else {}
        return [(key, inner if isinstance(inner, Mapping) else {}, key in needed) for key, inner in found.items()]

    def rule_of(self, inner: Mapping[str, Any]) -> str:
        """Rule of a nested schema, with the definitions that it may refer to."""
        definitions = {key: self.schema[key] for key in ("$defs", "definitions") if key in self.schema}
        return _json_rule({**definitions, **inner}, exact=self.exact)


class _CallMarks:
    """The marks of a style, in the grammar's notation."""

    def __init__(self, style: CallStyle, special: Mapping[str, int]) -> None:
        self._style = style
        self._special = special
        self.key = "parameters" if style.name == "llama3_json" else "arguments"
        self.fenced = style.name == "deepseek_v3"
        "Whether the arguments are in a code block after the name."
        self.opening = "" if style.bare else self.mark(style.opens[0])
        self.between = quoted("\n") if style.closes and not style.bare and style.form != "deepseek" else ""
        "Separator of a call and its marks from the next. Empty: all calls are inside one pair of marks."

    def mark(self, text: str, before: str = "", after: str = "") -> str:
        if text not in self._special:
            return quoted(before + text + after)
        parts = (before and quoted(before), f"<[{self._special[text]}]>", after and quoted(after))
        return " ".join(part for part in parts if part)

    def inside(self, parallel: bool) -> str:
        """The rule after the opening mark."""
        style = self._style
        if style.form == "deepseek":
            more = f" ({self.mark(CALL, before=chr(10))} body)*" if parallel else ""
            return f"{self.mark(CALL)} body{more} {self.mark(END_CALLS)}"
        if style.form == "python":
            return '"[" body' + (' (", " body)*' if parallel else "") + ' "]"'
        if self.between:  # Hermes, Qwen3-Coder: marks around each call
            return f"{quoted(chr(10))} body {self.mark(style.closes, before=chr(10))}"
        if style.name_first:  # Mistral: a mark before the list
            return '"[" body' + (' (", " body)*' if parallel else "") + ' "]"'
        if style.opens == ("<|python_tag|>",):  # Llama 3: separated by semicolons
            return "body" + (' ("; " body)*' if parallel else "")
        return "body" + (' | "[" body (", " body)* "]"' if parallel else "")


# One call of a tool, by the form of the style


def _json_body(words: _CallMarks, place: int, name: str, schema: _Schema) -> list[str]:
    head = f'{{"name": {json.dumps(name)}, "{words.key}": '
    return [
        f"body_{place}: {quoted(head)} arguments_{place} {quoted('}')}",
        arguments_rule(place, schema.schema, exact=schema.exact),
    ]


def _deepseek_body(words: _CallMarks, place: int, name: str, schema: _Schema) -> list[str]:
    if words.fenced:
        head = f"{quoted('function')} {words.mark(SEP, after=f'{name}{chr(10)}{FENCE}{chr(10)}')}"
        tail = words.mark(END_CALL, before=f"\n{END_FENCE}")
    else:
        head, tail = f"{quoted(name)} {words.mark(SEP)}", words.mark(END_CALL)
    return [f"body_{place}: {head} arguments_{place} {tail}", arguments_rule(place, schema.schema, exact=schema.exact)]


def _xml_body(words: _CallMarks, place: int, name: str, schema: _Schema) -> list[str]:
    rules, members = [], []
    for index, (key, inner, required) in enumerate(schema.properties):
        rule = f"value_{place}_{index}"
        value, *more = _xml_value(inner, schema, f"{name}: {key}", f"TEXT_{place}_{index}")
        rules += [f"{rule}: {quoted(f'<parameter={key}>{chr(10)}')} {value}", *more]
        members.append(rule if required else f"{rule}?")
    if not schema.exact and not isinstance(schema.schema.get("properties"), Mapping):
        members.append("any_parameter*")
    head, tail = quoted(f"<function={name}>\n"), quoted("</function>")
    return [f"body_{place}: {' '.join([head, *members, tail])}", *rules]


def _xml_value(inner: Mapping[str, Any], outer: _Schema, where: str, terminal: str) -> list[str]:
    """The value and the end of the argument; and more rules. `terminal`: a name for one of them."""
    if inner.get("type") not in ("string", ["string"]):
        return [f"{outer.rule_of(inner)} {quoted(_END_PARAMETER)}"]
    if outer.exact:
        made = text_terminal(inner, where, _END_PARAMETER)
        return ["TEXT"] if made is None else [terminal, f"{terminal}: {made}"]
    listed = inner.get("enum")
    if isinstance(listed, list) and listed and all(isinstance(each, str) and "</parameter>" not in each for each in listed):
        return [f"({' | '.join(quoted(each + _END_PARAMETER) for each in listed)})"]
    return ["TEXT"]


def _python_body(words: _CallMarks, place: int, name: str, schema: _Schema) -> list[str]:
    """The arguments in Python's form: required ones first, then any of the others."""
    found = sorted(schema.properties, key=lambda each: not each[2])
    rules, required = [], sum(needed for _, _, needed in found)
    for index, (key, inner, _) in enumerate(found):
        rules.append(f"value_{place}_{index}: {quoted(f'{key}=')} {schema.rule_of(inner)}")
    names = [f"value_{place}_{index}" for index in range(len(found))]
    more = " ".join(f'(", " {each})?' for each in names[required:])
    if required:
        members = ' ", " '.join(names[:required]) + f" {more}"
    else:  # the first one has no comma before it
        begins = [f"{each} " + " ".join(f'(", " {later})?' for later in names[index + 1 :]) for index, each in enumerate(names)]
        members = f"({' | '.join(begins)})?" if begins else ""
    return [f"body_{place}: {quoted(f'{name}(')} {members} {quoted(')')}", *rules]


_BODIES: Final = {"json": _json_body, "deepseek": _deepseek_body, "xml": _xml_body, "python": _python_body}


def arguments_rule(place: int, schema: Mapping[str, Any], *, exact: bool) -> str:
    return f"arguments_{place}: {_json_rule({**schema, 'type': 'object'}, exact=exact)}"


def json_rule(schema: str) -> str:
    """A JSON value that the schema allows."""
    return _json_rule(json.loads(schema), exact=True)


def _json_rule(schema: Mapping[str, Any], *, exact: bool) -> str:
    options = {**_JSON, **(_EXACT if exact else _LENIENT)}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"
