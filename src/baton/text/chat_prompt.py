"""Renders a chat so that no text of a client becomes a control token.

A rendered chat is cut with its special tokens read as such: the template wrote them. Without more, a message that spells one
("<|im_end|>") would end its own turn and could begin the system's. So:

    hide      a mark goes into each spelling in the client's texts      <|im_end|>  ->  <MARK|im_end|>
    render    the template runs as always
    encode    a special token that is whole is the template's. Where a mark is found between two of them, it is taken out, and
              what stands there is cut as plain characters (Tokenizer.encode)

A chat that spells none, which is nearly every one, goes through unchanged and is cut as one text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import CallerError
from baton.text.chat_template import ChatTemplate
from baton.text.tokenizer import Tokenizer

_MARKS = range(0xF0000, 0xF0100)
"Private-use characters. One that the chat does not contain is taken."
_NOT_TEXT = ("role", "type")
"Values that are names, which templates compare. chat_messages.py takes no marks of a template in a role."


def render_chat(
    template: ChatTemplate, tokenizer: Tokenizer, messages: object, *, extras: Mapping[str, Any] | None = None, **options: Any
) -> tuple[str, str]:
    """The prompt, and the mark in it: both for Tokenizer.encode. `options` are those of ChatTemplate.render."""
    texts = [*_texts(messages), *_texts(extras)]
    spelled = tokenizer.special_texts
    if not any(name in text for text in texts for name in spelled):
        return template.render(messages, extras=extras, **options), ""
    mark = next((chr(code) for code in _MARKS if not any(chr(code) in text for text in texts)), None)
    if mark is None:
        raise CallerError("the chat spells special tokens and uses every private character that could set them apart")
    return template.render(_marked(messages, spelled, mark), extras=_marked(extras, spelled, mark), **options), mark


def _texts(value: object) -> list[str]:
    """Every string in a JSON value that a template could write; how deep it nests was bounded when it was parsed."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, inner in value.items() if key not in _NOT_TEXT for part in (key, inner) for text in _texts(part)]
    if isinstance(value, list | tuple):
        return [text for inner in value for text in _texts(inner)]
    return []


def _marked(value: Any, spelled: tuple[str, ...], mark: str) -> Any:
    if isinstance(value, str):
        for name in spelled:  # one at a time, and no pattern of all: that keeps the interpreter lock ten times as long
            value = value.replace(name, f"{name[0]}{mark}{name[1:]}")
        return value
    if isinstance(value, Mapping):
        return {
            _marked(key, spelled, mark): inner if key in _NOT_TEXT else _marked(inner, spelled, mark)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_marked(inner, spelled, mark) for inner in value]
    return value
