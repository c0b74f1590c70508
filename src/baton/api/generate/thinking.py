"""Reasoning: on or off, its budget, and whether it is sent.

All names that servers have for these settings are accepted; contradictions are a 400.

    on or off   enable_thinking, chat_template_kwargs.enable_thinking or .thinking (Qwen, DeepSeek), reasoning_effort "none"
                (OpenAI), thinking.type (Anthropic), think (Ollama), reasoning.effort, reasoning.enabled (OpenRouter)
    effort      reasoning_effort, reasoning.effort, think: passed to templates that use it
    budget      thinking_token_budget (vLLM), thinking_budget (Qwen), reasoning_budget (llama.cpp), reasoning_max_tokens
                (FastDeploy), thinking.budget_tokens, reasoning.max_tokens: maximum of reasoning tokens. -1: no limit
    sent        include_reasoning (vLLM), reasoning.exclude; separate_reasoning false (SGLang): as part of the content
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from baton.api.errors import bad
from baton.api.fields import Fields, expect, shown
from baton.api.limits import FieldRange

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BUDGET: Final = FieldRange(0, 2**31 - 1)
_BUDGETS: Final = ("thinking_token_budget", "thinking_budget", "reasoning_budget", "reasoning_max_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkingOptions:
    enabled: bool | None = None
    "Whether the model reasons. None: the model's default."
    effort: str | None = None
    budget: int | None = None
    "Maximum of reasoning tokens."
    included: bool = True
    separate: bool = True

    def template_kwargs(self, kwargs: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """The template's arguments, with the names that templates use for reasoning: enable_thinking (Qwen), thinking
        (DeepSeek, Granite), reasoning_effort (gpt-oss)."""
        own: dict[str, Any] = {}
        if self.enabled is not None:
            own |= {"enable_thinking": self.enabled, "thinking": self.enabled}
        if self.effort is not None and self.effort != "none":
            own["reasoning_effort"] = self.effort
        return {**own, **(kwargs or {})} if own else kwargs


class _GivenValue:
    """Collects the values given for one setting under several names. Raises if they differ."""

    def __init__(self) -> None:
        self.value: Any = None
        self._place = ""

    def add(self, value: Any, place: str) -> None:
        if value is None:
            return
        if self.value is not None and self.value != value:
            raise bad(f"{place} and {self._place} differ", place.split(".", 1)[0])
        self.value, self._place = value, place


def read_thinking(fields: Fields, kwargs: Mapping[str, Any] | None) -> ThinkingOptions:
    """The reasoning options of a body. `kwargs`: chat_template_kwargs."""
    enabled, effort, budget = _GivenValue(), _GivenValue(), _GivenValue()
    for name in ("enable_thinking", "thinking"):
        if kwargs is not None and isinstance(kwargs.get(name), bool):
            enabled.add(kwargs[name], f"chat_template_kwargs.{name}")
    if fields.raw("enable_thinking") is not None:
        enabled.add(fields.boolean("enable_thinking"), "enable_thinking")
    for name in _BUDGETS:
        budget.add(_budget(fields.raw(name), name), name)
    _effort(fields.raw("reasoning_effort"), "reasoning_effort", enabled, effort)
    _think(fields.raw("think"), enabled, effort)
    _anthropic(fields, enabled, budget)
    included = fields.boolean("include_reasoning", default=True)
    included = _openrouter(fields, enabled, effort, budget) and included
    return ThinkingOptions(
        enabled=enabled.value,
        effort=effort.value,
        budget=None if budget.value == -1 else budget.value,
        included=included,
        separate=fields.boolean("separate_reasoning", default=True),
    )


def _effort(value: Any, place: str, enabled: _GivenValue, effort: _GivenValue) -> None:
    if value is None:
        return
    if value not in EFFORTS:
        raise bad(f"{place} must be one of {', '.join(EFFORTS)}, not {shown(value)}", place.split(".", 1)[0])
    effort.add(value, place)
    if value == "none":
        enabled.add(False, place)


def _think(value: Any, enabled: _GivenValue, effort: _GivenValue) -> None:
    """Read Ollama's `think`: true, false, or an effort."""
    if isinstance(value, str):
        _effort(value, "think", enabled, effort)
    elif value is not None:
        if not isinstance(value, bool):
            raise bad(f"think must be true, false or an effort, not {shown(value)}", "think")
        enabled.add(value, "think")


def _anthropic(fields: Fields, enabled: _GivenValue, budget: _GivenValue) -> None:
    value = fields.raw("thinking")
    if isinstance(value, bool):
        enabled.add(value, "thinking")
        return
    value = fields.object("thinking", ("type", "budget_tokens"))
    if value is None:
        return
    kind = value.get("type")
    if kind not in ("enabled", "disabled", "adaptive"):
        raise bad('thinking.type must be "enabled", "disabled" or "adaptive"', "thinking")
    enabled.add({"enabled": True, "disabled": False}.get(kind), "thinking.type")
    budget.add(_budget(value.get("budget_tokens"), "thinking.budget_tokens"), "thinking.budget_tokens")


def _openrouter(fields: Fields, enabled: _GivenValue, effort: _GivenValue, budget: _GivenValue) -> bool:
    """Reads OpenRouter's `reasoning`. Returns whether the reasoning is sent."""
    value = fields.object("reasoning", ("effort", "enabled", "max_tokens", "exclude", "summary", "generate_summary"))
    if value is None:
        return True
    for name in ("enabled", "exclude"):
        expect(bool, value.get(name) is not None and value[name], f"reasoning.{name}", "reasoning")
    enabled.add(value.get("enabled"), "reasoning.enabled")
    _effort(value.get("effort"), "reasoning.effort", enabled, effort)
    budget.add(_budget(value.get("max_tokens"), "reasoning.max_tokens"), "reasoning.max_tokens")
    return not value.get("exclude")


def _budget(value: Any, place: str) -> int | None:
    if value is not None and (type(value) is not int or (value != -1 and value not in BUDGET)):
        raise bad(f"{place} must be {BUDGET}, not {shown(value)}", place.split(".", 1)[0])
    return None if value is None else int(value)
