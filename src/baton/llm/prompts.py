"""What may be a prompt: a text, token ids, or vLLM's tables of either; one, or a list of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from baton.errors import CallerError

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, str | Sequence[int]]"
Prompts: TypeAlias = "Prompt | Sequence[Prompt]"


def batch_of(prompts: Prompts) -> list[str | Sequence[int]]:
    """A text, a list of token ids or a table alone is a batch of one."""
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
