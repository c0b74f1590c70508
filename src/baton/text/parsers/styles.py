"""Formats of calls and reasoning by name, and their detection from a template.

A template renders the calls of earlier turns in the model's format, so it shows the format best. The names are those of vLLM's
--tool-call-parser and --reasoning-parser where the format is the same; its other names are aliases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, TypeVar

from baton.errors import InvalidConfig
from baton.text.harmony_marks import CHANNEL
from baton.text.parsers.calls import CallStyle
from baton.text.parsers.deepseek_calls import CALL, CALLS, END_CALL, END_CALLS, FENCE, SEP
from baton.text.parsers.think import ThinkStyle

Style = TypeVar("Style", CallStyle, ThinkStyle)

CALL_STYLES: Final = {
    style.name: style
    for style in (
        CallStyle(
            name="qwen3_coder", form="xml", opens=("<tool_call>", "<function="), closes="</tool_call>", shown_by=("<function=",)
        ),
        CallStyle(name="deepseek_v3", form="deepseek", opens=(CALLS, CALL), closes=END_CALLS, others=(SEP, END_CALL)),
        CallStyle(name="deepseek_v31", form="deepseek", opens=(CALLS, CALL), closes=END_CALLS, others=(SEP, END_CALL)),
        CallStyle(
            name="pythonic",
            form="python",
            opens=("<|python_start|>",),
            closes="<|python_end|>",
            bare=True,
            shown_by=("<|python_start|>", "[func_name1(", "[func_name("),
        ),
        CallStyle(name="hermes", opens=("<tool_call>",), closes="</tool_call>"),
        CallStyle(name="llama3_json", opens=("<|python_tag|>",), bare=True),
        CallStyle(name="mistral", opens=("[TOOL_CALLS]",), name_first=True, others=("[ARGS]", "[CALL_ID]")),
        CallStyle(name="json", opens=("```json",), closes="```", bare=True),
    )
}
THINK_STYLES: Final = {
    style.name: style
    for style in (
        ThinkStyle(name="qwen3", start="<think>", end="</think>"),
        ThinkStyle(name="deepseek_r1", start="<think>", end="</think>", always_open=True),
        ThinkStyle(name="mistral", start="[THINK]", end="[/THINK]"),
    )
}
CALL_ALIASES: Final = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3": "llama3_json",
    "qwen3_xml": "qwen3_coder",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "gpt-oss": "harmony",
}
THINK_ALIASES: Final = {"openai_gptoss": "harmony", "gpt-oss": "harmony"}
"""Names of the same parsers in vLLM and SGLang."""
_HARMONY: Final = "harmony"
TOOL_CALL_PARSERS: Final = ("auto", *CALL_STYLES, _HARMONY, "none")
REASONING_PARSERS: Final = ("auto", *THINK_STYLES, _HARMONY, "none")


@dataclass(frozen=True, slots=True)
class HarmonyStyle:
    """Answers in channels, which include calls and reasoning (harmony.py)."""

    calls: bool
    "Whether tools can be called. False: tools are refused."
    thoughts: bool
    "Whether reasoning is parsed. False: reasoning is content."


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """The formats of the served model."""

    calls: CallStyle | None
    "Format of calls. None: calls are not parsed, and tools are refused."
    thoughts: ThinkStyle | None
    "Format of reasoning. None: reasoning is not parsed."
    template_knows_tools: bool
    "Whether the template supports tools. False: tools are described in plain text (tools_in_words.py)."
    template_knows_thinking: bool
    "Whether the template has a switch for reasoning."
    harmony: HarmonyStyle | None = None
    "Channels of the answer. If set, `calls` and `thoughts` are None."

    @property
    def has_calls(self) -> bool:
        return self.calls is not None or (self.harmony is not None and self.harmony.calls)

    @property
    def has_thoughts(self) -> bool:
        return self.thoughts is not None or (self.harmony is not None and self.harmony.thoughts)


def answer_style(
    sources: tuple[str, ...], texts: frozenset[str] = frozenset(), *, tool_calls: str = "auto", reasoning: str = "auto"
) -> AnswerStyle:
    """The formats of a model. `sources`: the model's templates. `texts`: the tokenizer's added tokens. Raises InvalidConfig for
    an unknown name."""
    source = "\n".join(sources)
    knows_tools = re.search(r"\btools\b", source) is not None
    tool_calls, reasoning = CALL_ALIASES.get(tool_calls, tool_calls), THINK_ALIASES.get(reasoning, reasoning)
    harmony = _harmony(tool_calls, reasoning, source)
    if harmony is not None:
        return AnswerStyle(None, None, knows_tools, template_knows_thinking=False, harmony=harmony)
    return AnswerStyle(
        _calls(tool_calls, source, knows_tools=knows_tools),
        _thoughts(reasoning, source, texts),
        template_knows_tools=knows_tools,
        template_knows_thinking=re.search(r"\b(enable_thinking|thinking)\b", source) is not None,
    )


def _harmony(calls: str, thoughts: str, source: str) -> HarmonyStyle | None:
    """The format in channels, if it is named, or the template writes channels and no other parser is named."""
    shown = any(f"{CHANNEL}{channel}" in source for channel in ("analysis", "final")) and "auto" in (calls, thoughts)
    others = {calls, thoughts} - {"auto", "none", _HARMONY}
    if _HARMONY in (calls, thoughts) and others:
        raise InvalidConfig(f"--tool-call-parser {calls} and --reasoning-parser {thoughts} do not go together")
    if _HARMONY in (calls, thoughts) or (shown and not others):
        return HarmonyStyle(calls=calls != "none", thoughts=thoughts != "none")
    return None


def _calls(name: str, source: str, *, knows_tools: bool) -> CallStyle | None:
    if name == "none":
        return None
    if name != "auto":
        return _named(CALL_STYLES, name, "tool-call-parser", TOOL_CALL_PARSERS)
    if knows_tools:
        for style in CALL_STYLES.values():
            if any(mark in source for mark in style.shown_by or style.opens):
                # DeepSeek V3's template shows the arguments in a code block, V3.1's does not.
                return CALL_STYLES["deepseek_v31"] if style.form == "deepseek" and FENCE not in source else style
        if "ipython" in source:  # Llama 3.1, which has no mark before a call
            return CALL_STYLES["llama3_json"]
    return CALL_STYLES["json"]


def _thoughts(name: str, source: str, texts: frozenset[str]) -> ThinkStyle | None:
    if name == "none":
        return None
    if name != "auto":
        return _named(THINK_STYLES, name, "reasoning-parser", REASONING_PARSERS)
    for style in THINK_STYLES.values():
        if style.start in source or style.end in source or {style.start, style.end} <= texts:
            return style
    return None


def _named(styles: dict[str, Style], name: str, flag: str, names: tuple[str, ...]) -> Style:
    if name not in styles:
        raise InvalidConfig(f"--{flag} {name}: there is none of that name; there are {', '.join(names)}")
    return styles[name]
