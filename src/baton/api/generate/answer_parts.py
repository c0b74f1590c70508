"""Chooses the parser of an answer and its start state, which depends on the end of the prompt.

prompt ends with      the answer begins with       so the parser begins
...assistant\\n        <think>Hm.</think>Four.      before a thought
...<think>\\n          Hm.</think>Four.             inside it
...</think>\\n\\n       Four.                        before a thought that does not come
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from baton.api.errors import bad
from baton.api.front import Front
from baton.api.generate.channel_parts import channel_grammar, channel_parser, channel_prompt
from baton.api.generate.options import ChatBody
from baton.errors import BadGrammar
from baton.protocol.grammar import Grammar
from baton.protocol.thinking import Thinking
from baton.text.harmony_marks import MARKS
from baton.text.parsers.base import MakeParser, Parser, PlainParser
from baton.text.parsers.call_grammar import calls_grammar
from baton.text.parsers.open_calls import calls_parser
from baton.text.parsers.think import ThinkParser, ThinkStyle

_TAIL_CHARS: Final = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerParts:
    make: MakeParser | None
    "Splits text into reasoning, content and calls. None: the whole text is content."
    shown_ids: frozenset[int]
    "Ids of special tokens that mark calls or reasoning."
    thinks: bool = False
    "Whether reasoning is separated from the content."
    is_open: bool = False
    "Whether the prompt ends inside the reasoning."


def answer_parts(front: Front, body: ChatBody, prompt: str) -> AnswerParts:
    """The parser for an answer. Raises ApiError for tools that this server does not support."""
    style, tools, thinking = front.style, body.tools, body.thinking
    if tools is not None and not style.has_calls:
        raise bad("tools is not supported here: tool calls are off (--tool-call-parser)", "tools", code="unsupported")
    if style.harmony is not None:
        separate = style.harmony.thoughts and thinking.separate
        make_channels = channel_parser(style.harmony, body, prompt)
        return AnswerParts(make=make_channels, shown_ids=_special(front, MARKS), thinks=separate)
    thoughts = style.thoughts if thinking.separate else None
    marks = [*((thoughts.start, thoughts.end) if thoughts else ()), *(style.calls.marks if tools and style.calls else ())]
    is_open = style.thoughts is not None and (
        _is_open(prompt, style.thoughts.start) or _ends_inside_reasoning(body, style.thoughts)
    )

    def make() -> Parser:
        rest: Parser = PlainParser()
        if tools is not None and style.calls is not None:
            rest = calls_parser(style.calls, tools.parameters, calls_max=tools.calls_max)
        if thoughts is None:
            return rest
        return ThinkParser(thoughts, rest, is_open=is_open, shown=thinking.included)

    return AnswerParts(
        make=make if tools is not None or thoughts is not None else None,
        shown_ids=_special(front, marks),
        thinks=thoughts is not None,
        is_open=is_open,
    )


def _special(front: Front, marks: Iterable[str]) -> frozenset[int]:
    ids = {front.tokenizer.added_ids.get(mark) for mark in marks}
    return front.tokenizer.special_ids & {token for token in ids if token is not None}


def _is_open(prompt: str, start: str) -> bool:
    """Whether the prompt ends with the tag, and perhaps a line feed that the template adds."""
    return prompt[-_TAIL_CHARS:].rstrip().endswith(start)


def _ends_inside_reasoning(body: ChatBody, thoughts: ThinkStyle) -> bool:
    """Whether the message to continue ends inside its reasoning."""
    last = body.messages[-1] if body.continue_final_message and body.messages else None
    content = last.get("content") if isinstance(last, dict) else None
    return isinstance(content, str) and thoughts.start in content.rpartition(thoughts.end)[2]


def without_thought(front: Front, body: ChatBody, prompt: str, grammar: Grammar | None) -> str:
    """The prompt of a chat without reasoning. A template with a switch has handled it; a template that opens the reasoning
    anyway gets it closed again, as in Qwen's template. The same holds where a grammar could not see the end of the
    reasoning."""
    thoughts = front.style.thoughts
    if front.style.harmony is not None:
        return channel_prompt(body, prompt, grammar)
    if thoughts is None or not _is_open(prompt, thoughts.start):
        return prompt
    if body.thinking.enabled is False or (grammar is not None and _token(front, thoughts.end) is None):
        return f"{prompt.rstrip()}\n\n{thoughts.end}\n\n"
    return prompt


def _token(front: Front, tag: str) -> int | None:
    """The tag's token id, if it is one token of the model."""
    token = front.tokenizer.added_ids.get(tag)
    return token if token is not None and token < front.model.head_width else None


def thinking_rules(front: Front, body: ChatBody, parts: AnswerParts, *, constrained: bool) -> Thinking | None:
    """Reasoning limits for the sampler. A model without reasoning needs none; a template without a switch gets a budget of
    zero. `constrained`: a grammar applies, and begins after the reasoning."""
    thoughts, thinking, budget = front.style.thoughts, body.thinking, body.thinking.budget
    if front.style.harmony is not None and budget is not None:
        message = "a thinking budget is not supported by this model: say reasoning_effort"
        raise bad(message, "thinking_budget", code="unsupported")
    if thoughts is None:
        return None
    switched_off = thinking.enabled is False and not front.style.template_knows_thinking
    added, width = front.tokenizer.added_ids, front.model.head_width
    start, end = (
        None if token is None or token >= width else token for token in map(added.get, (thoughts.start, thoughts.end))
    )
    if end is None:
        if budget is not None:
            message = f"a thinking budget is not supported by this model: {thoughts.end} is not a token of its own"
            raise bad(message, "thinking_budget", code="unsupported")
        return None
    budget = 0 if switched_off else budget
    is_open = parts.is_open or thoughts.always_open
    needed = budget is not None or (constrained and thinking.enabled is not False)
    return Thinking(end=end, budget=budget, start=start, is_open=is_open) if needed else None


def call_grammar(front: Front, body: ChatBody) -> Grammar | None:
    """Grammar of an answer that must be calls; or calls or the requested format; or free text in which calls of strict tools
    follow their schema."""
    if front.style.harmony is not None:
        return channel_grammar(front, body)
    tools, style, answer = body.tools, front.style.calls, body.options.sampling.grammar
    if tools is None or style is None:
        return answer
    # A model whose calls have no marker may answer in JSON: a call is recognised only when it is complete, so the text stays
    # free.
    free = tools.choice == "auto" and answer is None and bool(tools.strict) and not style.bare
    if tools.choice == "auto" and answer is None and not free:
        return answer
    if answer is not None and tools.choice == "required":
        raise bad("a call is required (tool_choice), and a format of the answer is given: give one of them", "tool_choice")
    if answer is not None and (style.bare or answer.kind not in ("json_schema", "json_object")):
        why = "of this model" if style.bare else "other than JSON"
        raise bad(f"tools together with an answer's format {why} are not supported", "tools", code="unsupported")
    added, special_ids = front.tokenizer.added_ids, front.tokenizer.special_ids
    special = {mark: added[mark] for mark in style.marks if added.get(mark) in special_ids}
    or_answer = None if answer is None else answer.text
    held = {name: schema if not free or name in tools.strict else {} for name, schema in tools.parameters.items()}
    try:
        text = calls_grammar(
            style, held, parallel=tools.parallel, special=special, strict=tools.strict, or_answer=or_answer, free=free
        )
    except BadGrammar as error:
        raise bad(f"tools: {error}", "tools", code="invalid_grammar") from None
    return Grammar("lark", text)
