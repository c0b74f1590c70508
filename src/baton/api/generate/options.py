"""A request for text, typed and complete, independent of its dialect. openai/schemas.py reads it from a JSON object; the other
dialects translate theirs to that object first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.api.generate.thinking import ThinkingOptions
from baton.api.generate.tools import Tools
from baton.protocol.request import SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamOptions:
    stream: bool
    include_usage: bool = False
    continuous_usage: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options that chat and completions share."""

    stream: StreamOptions
    n: int
    max_tokens: int | None
    "max_tokens. None: the model's recommendation, or the room in the context (prepare.py)."
    seed: int | None
    sampling: SamplingParams
    """Sampling parameters as requested. prepare.py adds seed and max_tokens, stop ids, bad words, and the `ends` of a
    grammar."""
    stop: tuple[str, ...]
    include_stop: bool
    ignore_eos: bool
    bad_words: tuple[str, ...]
    bad_words_token_ids: tuple[int, ...]
    "Forbidden token ids; each is a bad word of its own."
    return_token_ids: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    priority: int
    cache_salt: str
    timeout_seconds: float
    truncate: int | None
    "Maximum of prompt tokens; longer prompts are truncated. -1: the room that max_tokens leaves. None: they are refused."
    grammar_field: str
    "Name of the field that sets the answer's format, for errors. Empty: none."
    ignored: tuple[str, ...] = ()
    "Unknown fields; the client gets their names."


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatBody:
    options: Options
    messages: list[Any]
    "Messages, checked by text/chat_messages.py."
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any] | None
    "Arguments of the template, including its switches for reasoning."
    tools: Tools | None = None
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)


Prompt = str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionBody:
    options: Options
    prompts: tuple[Prompt, ...]
    echo: bool
    suffix: str = ""
    "Text after the gap; the model fills in between prompt and suffix."
    prompt_only: bool = False
    "Whether the answer is the prompt alone, with its log-probabilities: max_tokens 0 with echo."
