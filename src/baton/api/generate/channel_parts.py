"""answer_parts.py for a model that writes in channels (text/parsers/harmony.py): its parser, its prompt and its grammar.

Such a model has no switch for reasoning and no single token that begins it. An empty analysis message in the prompt prevents
reasoning, budgets are not supported, and a grammar includes the channels because it begins with the answer.
"""

from __future__ import annotations

from typing import Final

from baton.api.errors import bad
from baton.api.front import Front
from baton.api.generate.options import ChatBody
from baton.protocol.grammar import Grammar
from baton.text.harmony_marks import CHANNEL, END, ENDS, MARKS, MESSAGE, START
from baton.text.parsers.base import MakeParser
from baton.text.parsers.call_grammar import ANY_OBJECT
from baton.text.parsers.harmony import HarmonyParser
from baton.text.parsers.harmony_grammar import harmony_grammar
from baton.text.parsers.styles import HarmonyStyle

_TURN: Final = f"{START}assistant"
_NO_THOUGHT: Final = f"{CHANNEL}analysis{MESSAGE}{END}{_TURN}"
_FINAL: Final = f"{CHANNEL}final{MESSAGE}"


def channel_parser(style: HarmonyStyle, body: ChatBody, prompt: str) -> MakeParser:
    tools, thinking = body.tools, body.thinking
    _, start, begun = prompt.rpartition(START)
    begun = begun if start and not any(end in begun for end in ENDS) else ""

    def make() -> HarmonyParser:
        return HarmonyParser(
            () if tools is None else tuple(tools.parameters),
            calls_max=1 if tools is None else tools.calls_max,
            begun=begun,
            shown=thinking.included,
            separate=thinking.separate and style.thoughts,
        )

    return make


def channel_prompt(body: ChatBody, prompt: str, grammar: Grammar | None) -> str:
    """The prompt, extended by the channel headers that the answer must not begin with."""
    if not prompt.endswith(_TURN):
        return prompt  # the answer continues a message
    if body.thinking.enabled is False:
        prompt += _NO_THOUGHT
    # A format that does not combine with channels: the prompt ends with the final channel, so the answer begins there.
    return prompt + _FINAL if grammar is not None and grammar is body.options.sampling.grammar else prompt


def channel_grammar(front: Front, body: ChatBody) -> Grammar | None:
    """The grammar of an answer in channels. Raises ApiError for tools and a format that exclude each other."""
    tools, answer = body.tools, body.options.sampling.grammar
    required = tools is not None and tools.choice == "required"
    strict = tools is not None and bool(tools.strict)
    if not (required or strict or answer is not None) or (body.continue_final_message and not required):
        return answer
    if answer is not None and required:
        raise bad("a call is required (tool_choice), and a format of the answer is given: give one of them", "tool_choice")
    if answer is not None and answer.kind not in ("json_schema", "json_object"):
        if tools is not None:
            raise bad("tools together with an answer's format other than JSON are not supported", "tools", code="unsupported")
        return answer
    added = front.tokenizer.added_ids
    special = {mark: added[mark] for mark in MARKS if mark in added and added[mark] < front.model.head_width}
    if len(special) < len(MARKS) or body.continue_final_message:
        if tools is None:
            return answer
        raise bad("a call cannot be enforced: of this model's marks some are not tokens, or the prompt is past them", "tools")
    parameters = {} if tools is None else tools.parameters
    if tools is not None and not required and answer is None:
        parameters = {name: schema if name in tools.strict else {} for name, schema in parameters.items()}
    schema = None if required else "" if answer is None else answer.text or ANY_OBJECT
    thinks = body.thinking.enabled is not False
    held = () if tools is None else tools.strict
    return Grammar("lark", harmony_grammar(parameters, special=special, strict=held, answer=schema, thinks=thinks))
