"""Renders a chat so that no text of a client becomes a control token.

A rendered chat is tokenised with special tokens parsed, because the template wrote them. A message that spells one
("<|im_end|>") would end its own turn and could begin the system's. So:

    hide      a mark goes into each spelling in the client's texts      <|im_end|>  ->  <MARK|im_end|>
    render    the template runs as always
    encode    an unmarked special token is the template's. Text between two of them that contains a mark is tokenised as plain
              text, without the mark (Tokenizer.encode)

A chat that spells none, as nearly all, is unchanged and tokenised as one text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import CallerError
from baton.text.chat_messages import plain_messages
from baton.text.chat_template import ChatTemplate
from baton.text.harmony_marks import CHANNEL
from baton.text.system_messages import fitted
from baton.text.tokenizer import Tokenizer
from baton.text.tools_in_words import has_tool_turns, in_words

_MARKS = range(0xF0000, 0xF0100)
"Private-use characters. The first one that the chat does not contain becomes the mark."
_NOT_TEXT = ("role", "type")
"Keys whose values are left unmarked if they look like names: templates compare them."
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def render_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: object,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tools_in_words: bool = False,
    extras: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[str, str]:
    """Returns the prompt and the mark in it, both for Tokenizer.encode.

    tools_in_words   the template does not support tools: tools and earlier calls are described in plain text
    options          options of ChatTemplate.render
    """
    # Parsed before the search for special tokens: a call's arguments come as JSON, which can escape characters.
    chat: Any = plain_messages(messages, messages_max=template.limits.messages_max)
    chat = fitted(chat, template, with_tools=bool(tools) and not tools_in_words)
    if any(CHANNEL in source for source in template.sources):
        chat = [_with_thinking(message) for message in chat]
    if tools_in_words and (tools or has_tool_turns(chat)):
        chat, tools = in_words(chat, tools), None
    texts = [*_texts(chat), *_texts(tools), *_texts(extras)]
    spelled = tokenizer.special_texts
    if not any(name in text for text in texts for name in spelled):
        return template.render(chat, tools=tools, extras=extras, **options), ""
    mark = next((chr(code) for code in _MARKS if not any(chr(code) in text for text in texts)), None)
    if mark is None:
        raise CallerError("the chat spells special tokens and uses every private character that could set them apart")
    chat, tools, extras = (_marked(value, spelled, mark) for value in (chat, tools, extras))
    return template.render(chat, tools=tools, extras=extras, **options), mark


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """The message with reasoning under gpt-oss' name `thinking`. Its template refuses reasoning beside a content in a message
    with tool calls."""
    thought = message.get("reasoning_content")
    if not isinstance(thought, str) or not thought or "thinking" in message:
        return message
    return {**message, "thinking": thought, **({"content": ""} if message.get("tool_calls") else {})}


def _texts(value: object) -> list[str]:
    """Every string in a JSON value that a template could write. The parser has bounded the depth."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        pairs = [pair for pair in value.items() if not _is_name(*pair)]
        return [text for pair in pairs for part in pair for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in _texts(inner)]
    return []


def _is_name(key: object, value: object) -> bool:
    return key in _NOT_TEXT and isinstance(value, str) and _NAME.fullmatch(value) is not None


def _marked(value: Any, spelled: tuple[str, ...], mark: str) -> Any:
    if isinstance(value, str):
        for name in spelled:  # one by one: a combined regex holds the interpreter lock ten times as long
            value = value.replace(name, f"{name[0]}{mark}{name[1:]}")
        return value
    if isinstance(value, Mapping):
        return {
            _marked(key, spelled, mark): inner if _is_name(key, inner) else _marked(inner, spelled, mark)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_marked(inner, spelled, mark) for inner in value]
    return value
