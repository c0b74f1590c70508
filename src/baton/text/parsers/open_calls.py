"""Selects the parser for a style of calls."""

from __future__ import annotations

from typing import Final

from baton.text.parsers.base import Parser
from baton.text.parsers.calls import CallsParser, CallStyle
from baton.text.parsers.deepseek_calls import DeepseekCalls
from baton.text.parsers.pythonic_calls import PythonicCalls
from baton.text.parsers.text_calls import Schemas, TextCalls
from baton.text.parsers.xml_calls import XmlCalls

_TEXTS: Final[dict[str, type[TextCalls]]] = {"xml": XmlCalls, "python": PythonicCalls, "deepseek": DeepseekCalls}


def calls_parser(style: CallStyle, tools: Schemas, *, calls_max: int) -> Parser:
    """The parser for a style. `tools`: schemas of the arguments, by callable name. After `calls_max` calls the answer is
    done."""
    if style.form == "json":
        return CallsParser(style, tuple(tools), calls_max=calls_max)
    return _TEXTS[style.form](style, tools, calls_max=calls_max)
