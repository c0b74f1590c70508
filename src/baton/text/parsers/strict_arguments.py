"""Schemas of strict tools, for styles that write arguments one by one and not as one JSON object (call_grammar.py).

Their grammar lists the properties, each with a rule of its own, and an xml argument of type string is text without quotes. So
JSON Schema is enforced here: what the rules do not say is said by regular expressions, or refuses the tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from baton.errors import BadGrammar
from baton.text.parsers.text_formats import FORMATS

_EVERYWHERE: Final = {
    *(
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "uniqueItems",
        "contains",
    ),
    *(
        "minContains",
        "maxContains",
        "unevaluatedItems",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "propertyNames",
    ),
}
_OF_ALL_ARGUMENTS: Final = _EVERYWHERE | {"enum", "const", "patternProperties"}
_END: Final = "</parameter>"
ANY_TEXT: Final = r"/(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/"
"""Any text without the mark that ends it. A complement alone would also have bytes that are not UTF-8."""
_CLASSES: Final = {"d": "0-9", "w": "a-zA-Z0-9_"}
"""ASCII in JSON Schema, and Unicode in the grammar's expressions."""


def require_enforced(tool: str, schema: Mapping[str, Any]) -> None:
    """Raise BadGrammar if a list of the properties, with those that are required, does not say all of the schema."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise BadGrammar(f"{tool}: properties must be an object, and required a list")
    for key in [key for key in schema if key in _OF_ALL_ARGUMENTS]:
        raise _not_enforced(key, tool)
    for key in [key for key in required if key not in properties]:
        raise BadGrammar(f"{tool} is strict and requires {key}, which is none of its properties")
    for key in [key for key, inner in properties.items() if not isinstance(inner, Mapping) and inner is not True]:
        raise BadGrammar(f"{tool} is strict, and its argument {key} has no schema")
    if _number(schema, "minProperties", 0) > len(set(required)):
        raise _not_enforced("minProperties", tool)
    if _number(schema, "maxProperties", len(properties)) < len(properties):
        raise _not_enforced("maxProperties", tool)


def text_terminal(schema: Mapping[str, Any], where: str, end: str) -> str | None:
    """A terminal of the grammar: the texts that a schema of type string allows, then `end`, in which the mark </parameter> is
    first. None: any text. Raises BadGrammar."""
    for key in [key for key in schema if key in _EVERYWHERE]:
        raise _not_enforced(key, where)
    least, most = _number(schema, "minLength", 0), _number(schema, "maxLength", None)
    choices, pattern = _choices(schema), schema.get("pattern")
    if choices is not None:
        choices = [each for each in choices if len(each) >= least and (most is None or len(each) <= most) and _END not in each]
    if choices == [] or (most is not None and most < least):
        raise BadGrammar(f"{where} is strict, and no text belongs to it")
    parts = [] if choices is None else [f"({' | '.join(quoted(each) for each in choices)})"]
    if pattern is not None:
        parts.append(_search(pattern, where))
    if "format" in schema:
        parts.append(_format(schema["format"], where))
    if choices is None and (least or most is not None):
        parts.append(f"/(?s:.{{{least},{'' if most is None else most}}})/")
    return f"({' & '.join([*parts, ANY_TEXT])}) {quoted(end)}" if parts else None


def quoted(text: str) -> str:
    """A string literal of the grammar: JSON's, with U+007F escaped, which Lark does not accept."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _not_enforced(keyword: str, where: str) -> BadGrammar:
    return BadGrammar(f"{where} is strict, and {keyword} cannot be enforced in calls as this model writes them")


def _number(schema: Mapping[str, Any], key: str, otherwise: Any) -> Any:
    value = schema.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise BadGrammar(f"{key} must be a positive integer, not {value!r:.40}")
    return otherwise if value is None else value


def _choices(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts of `enum` and `const`. None: there is neither."""
    listed = schema.get("enum")
    if "enum" in schema and not isinstance(listed, list):
        raise BadGrammar("enum must be a list")
    if "const" in schema:
        listed = [schema["const"]] if listed is None or schema["const"] in listed else []
    return None if listed is None else [each for each in listed if isinstance(each, str)]


def _format(name: Any, where: str) -> str:
    """The texts of a format, as a regular expression of the grammar."""
    if not isinstance(name, str) or name not in FORMATS:
        raise _not_enforced(f"format {name!r:.40}", where)
    return f"/{FORMATS[name].replace('/', chr(92) + '/')}/"


def _search(pattern: Any, where: str) -> str:
    """The texts in which the expression is found, as a regular expression of the grammar for the whole text. Anchors are
    understood at both ends: with them the rest of the text is empty. The grammar's compiler refuses others."""
    if not isinstance(pattern, str) or not pattern.isprintable():
        raise BadGrammar(f"{where}: pattern must be a text of printable characters")
    pairs: list[str] = re.findall(r"\\.|.", pattern)
    before = after = "(?s:.*)"
    if pairs[:1] == ["^"]:
        pairs, before = pairs[1:], ""
    if pairs[-1:] == ["$"]:
        pairs, after = pairs[:-1], ""
    inside, made = False, ""
    for pair in pairs:
        if (found := _CLASSES.get(pair[1:])) is not None:
            made += found if inside else f"[{found}]"
        else:
            made += "\\/" if pair == "/" else pair
            inside = pair == "[" or (inside and pair != "]")
    return f"/{before}(?:{made}){after}/"
