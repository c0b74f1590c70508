"""Accepted forms of prompts: a text, token ids, or vLLM's tables of either; one, or a list of them. And of chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from baton.errors import CallerError

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, str | Sequence[int]]"
Prompts: TypeAlias = "Prompt | Sequence[Prompt]"
Chat: TypeAlias = "Sequence[Mapping[str, Any]]"
Chats: TypeAlias = "Chat | Sequence[Chat]"


def batch_of(prompts: Prompts) -> list[str | Sequence[int]]:
    """The prompts as a batch. A single text, list of token ids or table is a batch of one."""
    if not isinstance(prompts, str | Mapping | Sequence):
        raise CallerError(f"prompts must be a text, token ids or a list of those, not {type(prompts).__name__}")
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [_plain(prompts)]  # type: ignore[arg-type]
    return [_plain(prompt) for prompt in prompts]  # type: ignore[arg-type]


def _plain(prompt: Prompt) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    for name in ("prompt_token_ids", "prompt"):
        if name in prompt:
            return prompt[name]
    raise CallerError(f"a prompt that is a table has a key prompt or prompt_token_ids, and not {', '.join(map(str, prompt))}")


def chats_of(messages: Chats) -> list[Any]:
    """The chats as a batch. A single list of messages is a batch of one. The messages are checked when they are rendered."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise CallerError(f"messages must be a list of messages, or a list of such lists, not {type(messages).__name__}")
    return [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
