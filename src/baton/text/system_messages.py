"""Adapts system and developer messages to the model's template. No message is dropped.

developer     becomes system, unless the template supports the role
neighbours    a developer's message is joined with the system message before it, and with the next one of its kind: clients send
              several, and many templates refuse or drop all but the first
elsewhere     if a template refuses or drops one after the first message, all are joined at the beginning

A short trial rendering shows whether a template accepts one, once, at the first such request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from baton.errors import CallerError
from baton.text.chat_template import ChatTemplate, TemplateStopped

Message = dict[str, Any]

_ROLES: Final = ("system", "developer")
_MARK: Final = "Take note of 4711."
_USER: Final = {"role": "user", "content": "Hello."}
_ANSWER: Final = {"role": "assistant", "content": "Yes."}


def fitted(chat: Sequence[Message], template: ChatTemplate, *, with_tools: bool) -> list[Message]:
    """The chat with system messages that the template accepts. `chat`: plain messages (chat_messages.py)."""
    if all(message["role"] not in _ROLES for message in chat[1:]) and chat[0]["role"] != "developer":
        return list(chat)  # most chats have no more than this
    fits = list(chat)
    if any(message["role"] == "developer" for message in fits):
        fits = _joined(fits)
        if not _knows_developer(template, with_tools):
            fits = [{**message, "role": "system"} if message["role"] == "developer" else message for message in fits]
    if all(_taken(fits, place, template, with_tools) for place in range(1, len(fits))):
        return fits
    return _at_the_beginning(fits)


def _joined(chat: list[Message]) -> list[Message]:
    """Messages in which neighbours are joined if at least one is a developer's."""
    joined: list[Message] = [chat[0]]
    for before, message in pairwise(chat):
        roles = (before["role"], message["role"])
        if "developer" in roles and roles[0] in _ROLES and roles[1] in _ROLES:
            joined[-1] = {**joined[-1], "content": _text(joined[-1], message)}
        else:
            joined.append(message)
    return joined


def _at_the_beginning(chat: list[Message]) -> list[Message]:
    first, *others = [message for message in chat if message["role"] in _ROLES]
    for message in others:
        first = {**first, "content": _text(first, message)}
    return [first, *(message for message in chat if message["role"] not in _ROLES)]


def _text(before: Message, message: Message) -> str:
    return "\n\n".join(text for text in (before["content"], message["content"]) if text)


def _knows_developer(template: ChatTemplate, with_tools: bool) -> bool:
    if not any(re.search(r"\bdeveloper\b", source) for source in template.sources):
        return False
    return _shows([{"role": "developer", "content": _MARK}, _USER], template, with_tools)


def _taken(chat: list[Message], place: int, template: ChatTemplate, with_tools: bool) -> bool:
    role = chat[place]["role"]
    if role not in _ROLES:
        return True
    first = {"role": chat[0]["role"], "content": "Be brief."}
    marked = {"role": role, "content": _MARK}
    if place == 1 and chat[0]["role"] in _ROLES:
        return _shows([first, marked, _USER], template, with_tools)
    return _shows([_USER, _ANSWER, _USER, marked], template, with_tools)


def _shows(chat: list[Message], template: ChatTemplate, with_tools: bool) -> bool:
    """Whether the template accepts this chat and its prompt contains the mark. Results are cached on the template."""
    asked = (with_tools, *(message["role"] for message in chat))
    if asked not in template.found_out:
        tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}] if with_tools else None
        try:
            template.found_out[asked] = _MARK in template.render(chat, tools=tools)
        except TemplateStopped:
            raise  # not cached: one killed process must not change every later prompt
        except CallerError:
            template.found_out[asked] = False
    return template.found_out[asked]
