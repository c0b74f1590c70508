"""Compiles and renders a chat template with jinja2's immutable sandbox, set up as Hugging Face's apply_chat_template does.

The sandbox denies a template access to Python's objects. It limits neither time nor memory, so this module runs in a separate
process (template_child.py), which can be killed. Every result is a Reply; nothing is raised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, UndefinedError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from baton.text.template_wire import Reply, Request

_TEMPLATES_KEPT = 8
_WORDS_MAX = 4096


class RaisedByTemplate(TemplateError):
    """The template refused the chat through raise_exception."""


class _PromptTooLong(Exception):
    """The prompt has more characters than the request allows."""


@dataclass(frozen=True, slots=True)
class _Compiled:
    template: Template
    literals: tuple[str, ...]
    "String constants of the template's source."


class TemplateSandbox:
    """Compiles and renders templates, and caches the last compiled ones."""

    def __init__(self) -> None:
        self._environment = _Environment()
        self._compiled = lru_cache(_TEMPLATES_KEPT)(self._compile)

    def answer(self, request: Request) -> Reply:
        """The reply to a request: the prompt; without values the template's string constants."""
        try:
            compiled = self._compiled(request["source"])
            if request["values"] is None:
                return "ok", compiled.literals
            self._environment.now = datetime.fromisoformat(request["now"])
            pieces = compiled.template.generate(request["values"])
            return "ok", "".join(_within(pieces, request["prompt_chars_max"]))
        except Exception as error:  # a template can fail in every way that Python can
            return _failure(error)

    def _compile(self, source: str) -> _Compiled:
        tree = self._environment.parse(source)
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return _Compiled(self._environment.from_string(tree), tuple(constants))


def _within(pieces: Iterator[str], chars_max: int) -> Iterator[str]:
    left = chars_max
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise _PromptTooLong
        yield piece


def _failure(error: Exception) -> Reply:
    match error:
        case RaisedByTemplate():
            return "raised", str(error)[:_WORDS_MAX]
        case TemplateSyntaxError():
            return "syntax", f"line {error.lineno}: {error.message}"[:_WORDS_MAX]
        case SecurityError():
            return "forbidden", ""
        case UndefinedError():
            return "undefined", str(error)[:_WORDS_MAX]
        case _PromptTooLong():
            return "too_long", ""
        case MemoryError():
            return "memory", ""
        case _:
            return "failed", type(error).__name__


class _Environment(ImmutableSandboxedEnvironment):
    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, LoopControls])
        self.now = datetime.min
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda template_format: self.now.strftime(template_format)
        self.globals["namespace"] = _PlainNamespace
        self.globals["dict"] = _PlainDict()


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training. This tag only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(lineno)


class _PlainNamespace(Namespace):
    """jinja2's namespace without names that begin with an underscore: those would access the object itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # named so that `namespace(self=...)` works, as in jinja2
        self, *pairs = args
        attributes = dict(*pairs, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _PlainDict:
    """A dict for templates: `dict(...)` and `dict.fromkeys(...)`, without the other attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError("a namespace attribute begins with an underscore")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's tojson: plain JSON, not escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise RaisedByTemplate(str(message))
