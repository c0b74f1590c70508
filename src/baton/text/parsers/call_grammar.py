r"""The grammar of an answer that must call a tool, in the very words that the model's style of calls has. In Lark, as
llguidance reads it.

    start: call (/\n?/ call)*
    call: "<tool_call>\n" body "\n</tool_call>"
    body: "{\"name\": \"weather\", \"arguments\": " %json {...schema of its arguments...} "}" | ...

A mark that is a special token of the model is that token and no text. Schemas come from all over the world, so words in them
that the grammar does not know are wishes; where nothing can be made of a schema the request is refused (prepare.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from baton.text.parsers.calls import CallStyle

_JSON: Final = {
    "whitespace_flexible": True,
    "whitespace_pattern": r"[ ]|\n[ ]{0,64}",
    "item_separator": ",",
    "key_separator": ":",
    "lenient": True,
    "coerce_one_of": True,
}
ANY_OBJECT: Final = '{"type": "object"}'


def calls_grammar(
    style: CallStyle,
    parameters: Mapping[str, Mapping[str, Any]],
    *,
    parallel: bool,
    special: Mapping[str, int],
    or_answer: str | None = None,
) -> str:
    """`parameters`: by name of the tool, the schema of its arguments. `special`: ids of marks that are special tokens.
    `or_answer`: a JSON schema; an answer that follows it will do as well."""
    names = list(parameters)
    bodies = " | ".join(f"body_{place}" for place in range(len(names)))
    rules = [
        f"start: {'calls' if or_answer is None else 'calls | answer'}",
        *([] if or_answer is None else [f"answer: %json {_schema(json.loads(or_answer or ANY_OBJECT))}"]),
        f"calls: {_calls(style, parallel, special)}",
        f"body: {bodies}",
    ]
    key = "parameters" if style.name == "llama3_json" else "arguments"
    for place, name in enumerate(names):
        head = f'{{"name": {json.dumps(name)}, "{key}": '
        rules.append(f"body_{place}: {_text(head)} arguments_{place} {_text('}')}")
        rules.append(f"arguments_{place}: %json {_schema({**parameters[name], 'type': 'object'})}")
    return "\n".join(rules) + "\n"


def _calls(style: CallStyle, parallel: bool, special: Mapping[str, int]) -> str:
    def mark(text: str, before: str = "", after: str = "") -> str:
        if text in special:
            return " ".join(part for part in (before and _text(before), f"<[{special[text]}]>", after and _text(after)) if part)
        return _text(before + text + after)

    if style.closes and not style.bare:  # Hermes: marks around each
        call = f"{mark(style.opens[0], after=chr(10))} body {mark(style.closes, before=chr(10))}"
        return f"({call})" + (f" ({_text(chr(10))} {call})*" if parallel else "")
    if style.name_first:  # Mistral: a mark before the list
        return f'{mark(style.opens[0])} "[" body' + (' (", " body)*' if parallel else "") + ' "]"'
    if style.opens == ("<|python_tag|>",):  # Llama 3: separated by semicolons
        return "body" + (' ("; " body)*' if parallel else "")
    return "body" + (' | "[" body (", " body)* "]"' if parallel else "")


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _JSON}, ensure_ascii=False)
