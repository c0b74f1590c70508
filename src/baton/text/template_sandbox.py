"""A jinja2 environment in which a chat template can do what chat templates do, and nothing for ever.

The template comes with the model, so it is somebody else's program. jinja2's immutable sandbox keeps it away from
Python; this file keeps it within a budget, counted in units of work and not in seconds, so that the same request always
ends the same way:

loops         every round, and every item a loop's `if` looks at, costs a unit (added to the template's syntax tree)
calls         every call of a macro, method, filter or function costs a unit
characters    CHARS_PER_UNIT characters printed or put together cost a unit; a single value has a top size
big results   of `*`, `**`, `+`, `~`, `%`, replace, join, padding and formatting are refused before they are made
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

CHARS_PER_UNIT = 32
NUMBER_BITS_MAX = 4096
PADDING_MAX = 256
_PADDING_FILTERS = ("center", "indent", "batch", "slice", "round", "tojson")
_PADDING_METHODS = ("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes")
# A width of four digits, one taken from an argument, or a field inside a field.
_WIDE_FORMAT = re.compile(r"[%{][^%{}a-zA-Z]*(\d{4}|\*)|\{[^{}]*(\d{4}|\{)")

F = TypeVar("F", bound=Callable[..., Any])


class OverBudget(Exception):
    """The template wants more work or memory than it may have. A template cannot catch this."""


class RaisedByTemplate(TemplateError):
    """The template itself refused the chat, through raise_exception."""


class Budget:
    """What one rendering may still spend."""

    __slots__ = ("units_left", "value_chars_max")

    def __init__(self, units: int, value_chars_max: int) -> None:
        self.units_left = units
        self.value_chars_max = value_chars_max

    def spend(self, units: int) -> None:
        self.units_left -= units
        if self.units_left < 0:
            raise OverBudget("it takes too much work")

    def take_chars(self, count: int) -> None:
        """Room for a value of this length."""
        if count > self.value_chars_max:
            raise OverBudget(f"it makes a value of more than {self.value_chars_max} characters")
        self.spend(1 + count // CHARS_PER_UNIT)


# Constants are folded while a template is compiled, outside any rendering: they get a small budget.
_COMPILING = (100_000, 1_000_000)
_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def current_budget() -> Budget:
    return _budget.get() or Budget(*_COMPILING)


def run_within(budget: Budget, work: Callable[[], str]) -> str:
    """Everything templates do inside `work` is paid from `budget`."""
    token = _budget.set(budget)
    try:
        return work()
    finally:
        _budget.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Set up as Hugging Face's apply_chat_template does, with a budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, LoopControls], finalize=_paid_output)
        self.filters["tojson"] = _tojson
        for name, function in list(self.filters.items()):
            self.filters[name] = _guarded(name, function)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda template_format: now().strftime(template_format)
        self.globals["namespace"] = _PlainNamespace
        self.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
        self.globals.pop("lipsum")

    def bounded(self, source: str) -> nodes.Template:
        """The syntax tree of a template, with the meter built in."""
        tree: nodes.Template = _AddMeter().visit(self.parse(source))
        tree.set_environment(self)
        return tree

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if getattr(function, "__func__", None) is BoundedEnvironment.meter:
            return function(*args)  # our own, and called in every round of a loop: no checks needed
        current_budget().spend(1)
        method = getattr(function, "__wrapped__", function)  # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes | int):
            _check_growth(name, _PADDING_METHODS, (owner, *args), kwargs)
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator:
            case "+" if hasattr(left, "__len__") and hasattr(right, "__len__"):
                current_budget().take_chars(len(left) + len(right))
            case "*":
                _check_product(left, right)
            case "**":
                if isinstance(left, int) and isinstance(right, int):
                    _check_bits(left.bit_length() * abs(right))
            case "%" if isinstance(left, str):
                _check_format(left)
        return super().call_binop(context, operator, left, right)

    # The two methods below are called from the meter that _AddMeter builds in.

    def meter(self, units: int) -> bool:
        current_budget().spend(units)
        return True

    def join_text(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        current_budget().take_chars(sum(map(len, texts)))
        return "".join(texts)


class _AddMeter(NodeTransformer):
    """Adds `meter` to loops and macros, and makes `a ~ b` a call.

    The names are looked up on the environment, so a template cannot put its own in their place.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement(node))
        if node.test is not None:
            node.test = nodes.And(_meter(1), node.test).set_lineno(node.lineno)
        return node.set_lineno(node.lineno)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement(node))
        return node.set_lineno(node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("join_text"), node.nodes, [], None, None).set_lineno(node.lineno)


def _meter(units: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute("meter"), [nodes.Const(units)], [], None, None)


def _statement(node: nodes.For | nodes.Macro) -> nodes.Node:
    literal_chars = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    return nodes.ExprStmt(_meter(1 + literal_chars // CHARS_PER_UNIT)).set_lineno(node.lineno)


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's words for training. Here it only shows them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(lineno)


class _PlainNamespace(Namespace):
    """jinja2's namespace without names that begin with an underscore: those reach into the object itself."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=...)` works, as in jinja2
        self, *pairs = args
        attributes = dict(*pairs, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise OverBudget("it uses a namespace attribute that begins with an underscore")


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


def _paid_output(value: Any) -> Any:
    """Every `{{ value }}` passes here."""
    text = value if isinstance(value, str) else str(value)
    current_budget().take_chars(len(text))
    return text


def _guarded(name: str, function: F) -> F:
    """The filter, paid for and with its result's size looked at."""

    @functools.wraps(function)  # keeps jinja2's marks that say what the filter wants to be passed
    def filter_within_budget(*args: Any, **kwargs: Any) -> Any:
        current_budget().spend(1)
        # Some filters are passed the environment or a context first; the value comes after it.
        values = args[1:] if hasattr(function, "jinja_pass_arg") else args
        _check_growth(name, _PADDING_FILTERS, values, kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, str):
            current_budget().take_chars(len(result))
        return result

    return filter_within_budget  # type: ignore[return-value]


def _check_growth(name: str, paddings: Iterable[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses what would make a small value huge, before it is made. args[0] is the value itself."""
    if name in paddings:
        for number in (*args[1:], *kwargs.values()):
            if isinstance(number, int) and abs(number) > PADDING_MAX:
                raise OverBudget(f"it pads or splits by more than {PADDING_MAX}")
    elif name in ("format", "format_map"):
        _check_format(args[0])
    elif name == "replace" and len(args) >= 3 and all(isinstance(arg, str) for arg in args[:3]):
        current_budget().take_chars(len(args[0]) + args[0].count(args[1]) * len(args[2]))
    elif name == "join" and len(args) >= 1:
        # "sep".join(items) and items|join("sep"): the longer of the two roles is a safe guess of the separator.
        items, others = next(((arg, args) for arg in args if isinstance(arg, list | tuple)), ((), ()))
        separator = max((len(arg) for arg in others if isinstance(arg, str)), default=0)
        current_budget().take_chars(sum(len(i) if isinstance(i, str) else 1 for i in items) + separator * len(items))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for value, times in ((left, right), (right, left)):
        if hasattr(value, "__len__") and isinstance(times, int):
            current_budget().take_chars(len(value) * max(times, 0))


def _check_bits(bits: int) -> None:
    if bits > NUMBER_BITS_MAX:
        raise OverBudget("it computes with huge numbers")


def _check_format(template_format: Any) -> None:
    if isinstance(template_format, str) and _WIDE_FORMAT.search(template_format):
        raise OverBudget("it formats a value with a very large or variable width")
