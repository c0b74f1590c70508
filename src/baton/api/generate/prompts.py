"""The prompts of a request: texts become token ids that fit the context, or the request is refused.

Nothing as large as a text is made before the text is known to be within its limits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from baton.api.errors import bad, too_long
from baton.api.front import Front
from baton.api.generate.options import CompletionBody, Options, Prompt
from baton.text import fill_in
from baton.text.chat_template import TemplateLimits
from baton.text.tokenizer import TooManyTokens


def require_fill_in(front: Front, field: str) -> fill_in.FillIn:
    marks = fill_in.fill_in_tokens(front.tokenizer)
    if marks is None:
        raise bad(
            f"{front.model.name} has no tokens to fill in the middle: serve one that was trained for it (Qwen2.5-Coder), or "
            "put what comes before the gap in prompt",
            field,
            code="unsupported",
        )
    return marks


def cut_around_gap(before: list[int], after: list[int], room: int) -> tuple[list[int], list[int]]:
    """Keeps the tokens nearest to the gap: a quarter of the room for the text after it, more where the text before is short."""
    if len(before) + len(after) <= room:
        return before, after
    kept = min(len(after), max(room // 4, room - len(before), 0))
    return before[max(0, len(before) - max(room - kept, 0)) :], after[:kept]


def prompts_of(front: Front, body: CompletionBody, keep: Literal["first", "last"] = "last") -> list[tuple[int, ...]]:
    """The prompts of a request as token ids. `keep`: which end of a truncated prompt is kept."""
    return within_total(front, (_ids(front, prompt, body.options, keep) for prompt in body.prompts))


def within_total(front: Front, prompts: Iterable[tuple[int, ...]], field: str = "prompt") -> list[tuple[int, ...]]:
    """The prompts of one request. Raises as soon as they are too long together, before the rest is tokenised."""
    kept: list[tuple[int, ...]] = []
    most, tokens = max(front.limits.prompt_tokens, front.model.context_tokens), 0
    for prompt in prompts:
        kept.append(prompt)
        tokens += len(prompt)
        if tokens > most:
            raise bad(f"the prompts have more than {most} tokens together: send fewer in one request", field)
    return kept


def _ids(front: Front, prompt: Prompt, options: Options, keep: Literal["first", "last"]) -> tuple[int, ...]:
    """Token ids of a prompt of the completions endpoint. Special tokens in its text are parsed as such."""
    if isinstance(prompt, str):
        around = (front.tokenizer.prefix_ids, front.tokenizer.suffix_ids) if options.add_special_tokens else ((), ())
        if keep == "first" and options.truncate is not None:
            room = max(room_for_prompt(front, options) - len(around[0]) - len(around[1]), 0)
            # A separator in a text to classify would begin the second text of a pair.
            ids = front.tokenizer.encode_beginning(prompt, room, parse_special=not front.model.labels)
            return (*around[0], *ids, *around[1])
        return cut(front, encoded(front, prompt, options), options, keep, around)
    return cut(front, prompt, options, keep)


def room_for_prompt(front: Front, options: Options) -> int:
    """Maximum of prompt tokens where longer prompts are truncated."""
    fits = max(front.model.context_tokens - (options.max_tokens or 1), 1)
    return fits if options.truncate in (None, -1) else min(options.truncate or fits, front.model.context_tokens - 1)


def cut(
    front: Front,
    ids: tuple[int, ...],
    options: Options,
    keep: Literal["first", "last"] = "last",
    around: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
) -> tuple[int, ...]:
    """Truncates the prompt: generation continues its last tokens, an embedding represents its first ones. `around`: the model's
    prefix and suffix of a prompt, which are kept."""
    if options.truncate is None or len(ids) <= (most := room_for_prompt(front, options)):
        return ids
    before, after = around
    room = max(most - len(before) - len(after), 0)
    inner = ids[len(before) : len(ids) - len(after)]
    return (*before, *(inner[:room] if keep == "first" else inner[len(inner) - room :]), *after)


def encoded(front: Front, text: str, options: Options, mark: str = "") -> tuple[int, ...]:
    require_may_fit(front, len(text))
    context = front.model.context_tokens
    try:
        ids = front.tokenizer.encode(
            text,
            add_special_tokens=options.add_special_tokens,
            parse_special=True,
            mark=mark,
            tokens_max=context if options.truncate is None else None,
        )
    except TooManyTokens as error:
        raise too_long(max(context, error.tokens_at_least), context) from None
    return tuple(ids)


def characters_of(messages: list[Any]) -> int:
    """Characters of the texts in an unchecked chat. Chats with more messages than are counted here are refused later."""
    few = messages[: TemplateLimits().messages_max]
    contents = [message.get("content") for message in few if isinstance(message, dict)]
    parts = [
        part.get("text") for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)
    ]
    return sum(len(text) for text in (*contents, *parts) if isinstance(text, str))


def require_may_fit(front: Front, characters: int) -> None:
    """Refuses a text that is too long for any tokenisation, before it is tokenised."""
    context = front.model.context_tokens
    most = front.limits.characters_per_token * context
    if characters > most:
        raise bad(
            f"prompt is too long: {characters} characters > {most} maximum. "
            f"This model's maximum context length is {context} tokens, prompt and output together",
            "prompt",
            code="context_length_exceeded",
        )
