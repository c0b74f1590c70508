"""A request for text, typed and complete, whatever dialect it came in. openai/schemas.py reads it from a JSON object; the other
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
    """What both endpoints share."""

    stream: StreamOptions
    n: int
    max_tokens: int | None
    "None: as many as the model recommends, or the context has room for (prepare.py)."
    seed: int | None
    sampling: SamplingParams
    """What the engine gets as it was asked for. prepare.py adds the two above, ends of text, bad words, and the `ends` of a
    grammar."""
    stop: tuple[str, ...]
    include_stop: bool
    ignore_eos: bool
    bad_words: tuple[str, ...]
    bad_words_token_ids: tuple[int, ...]
    "Each of them is a bad word."
    return_token_ids: bool
    skip_special_tokens: bool
    add_special_tokens: bool
    priority: int
    cache_salt: str
    timeout_seconds: float
    truncate: int | None
    "A longer prompt is cut to this many tokens. -1: to what leaves room for max_tokens. None: it is refused."
    grammar_field: str
    "The field that says what the answer must look like, for errors. Empty: none does."
    ignored: tuple[str, ...] = ()
    "Fields that we do not know. The client is told their names."


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatBody:
    options: Options
    messages: list[Any]
    "Checked by text/chat_messages.py."
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: Mapping[str, Any] | None
    "What is said of thinking is among them."
    tools: Tools | None = None
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)


Prompt = str | tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionBody:
    options: Options
    prompts: tuple[Prompt, ...]
    echo: bool
    suffix: str = ""
    "What follows the gap that the model fills in after the prompt."
    prompt_only: bool = False
    "max_tokens 0 with echo: the prompt comes back, with its log-probabilities, and nothing follows it."
