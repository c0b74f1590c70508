"""Parses gpt-oss' "harmony" format: messages, each with a header that names channel and recipient.

    <|channel|>analysis<|message|>I need the weather.<|end|>                                                  reasoning
    <|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>                                      content
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>Rain.<|return|>                                              content

    HEADER   held until <|message|>; not part of the answer's text
    BODY     emitted as it arrives, up to an end mark or the header of a message that begins too early

The prompt ends inside a header, as a rule ("<|start|>assistant"), and may end inside a body: `begun` is its last message.
Models also write headers that are none ("<|channel|>commentary?<|end|>") and text without any. Known words of such a header are
dropped, others are content: no text of the model is lost. Messages of one kind are joined by a line feed, as in vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, Literal

from baton.text.harmony_marks import CALL, CHANNEL, END, ENDS, MARKS, MESSAGE, START
from baton.text.parsers.base import Content, Part, Reasoning, ToolCallDelta
from baton.text.parsers.call_object import CallObject
from baton.text.parsers.calls import first_mark

HEADER_CHARS_MAX: Final = 512
"""Characters after which a text is not a header."""
NAMESPACE: Final = "functions."

_BEGINNINGS: Final = (*MARKS, "assistant", "to=")
_SPACE: Final = " \t\r\n"
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(analysis|commentary|final)")
_RECIPIENT: Final = re.compile(r"\bto=(.*?)(?=\s|<\||$)")
_MARK: Final = re.compile("|".join(map(re.escape, MARKS)))
_LEADING_MARKS: Final = re.compile(rf"^(?:{_MARK.pattern}|\s)+")
_WORDS: Final = ("assistant", "analysis", "commentary", "final", "json", "code", "to=")

_Kind = Literal["content", "reasoning", "call"]


class HarmonyParser:
    def __init__(
        self, tools: Collection[str], *, calls_max: int, begun: str = "", shown: bool = True, separate: bool = True
    ) -> None:
        """`begun`: the last message of the prompt, without its <|start|>. `shown`: reasoning is sent. `separate`: reasoning is
        apart from the content; else a part of it, with its marks."""
        self._tools = tools
        self._calls_max = calls_max
        self._shown = shown
        self._separate = separate
        self._text = ""
        "Unprocessed text."
        self._header = begun
        "Header so far; at the start the prompt's part of the first message."
        self._in_body = False
        self._kind: _Kind = "content"
        self._name = ""
        self._closing = ""
        "Parts emitted at the end of this message."
        self._object: CallObject | None = None
        self._calls = 0
        self._emitted_kinds: set[_Kind] = set()
        self._joint = ""
        "Text between this message and the previous one of its kind."
        self._parts: list[Part] = []
        self.done = False
        if MESSAGE in begun:
            self._open(begun.partition(MESSAGE)[0])

    @property
    def in_reasoning(self) -> bool:
        return self._in_body and self._kind == "reasoning"

    def feed(self, text: str) -> list[Part]:
        self._text += text
        while self._text and not self.done and (self._read_body() if self._in_body else self._read_header()):
            pass
        parts, self._parts = self._parts, []
        return parts

    def flush(self) -> list[Part]:
        text, self._text = self._text, ""
        if self._in_body:
            self._emit(text)
            self._close()
        else:
            self._no_header(text)
        return self._parts

    # Steps: each returns False if it needs more text.

    def _read_header(self) -> bool:
        if CHANNEL not in self._header and not _may_be_header(self._text):
            self._begin("content")
            return True
        place, mark = first_mark((MESSAGE, *ENDS), self._text, 0)
        if place > HEADER_CHARS_MAX:
            self._text = _LEADING_MARKS.sub("", self._text)
            self._begin("content")
            return True
        if not mark:
            return False
        header, self._text = self._text[:place], self._text[place + len(mark) :]
        before, start, own = header.rpartition(START) if mark == MESSAGE else (header, "", "")
        own = own if start else self._header + own
        self._no_header(before)
        if mark == MESSAGE:
            self._open(own)
        return True

    def _read_body(self) -> bool:
        place, mark = first_mark((START, CHANNEL, *ENDS), self._text, 0)
        body, self._text = self._text[:place], self._text[place:]
        self._emit(body)
        if not mark or self.done:
            return False
        self._text = self._text[len(mark) if mark in ENDS else 0 :]
        called = self._kind == "call"
        self._close()
        self.done = self.done or (called and mark == CALL)  # a stop token, even if the tokenizer does not list it
        return True

    # State changes

    def _open(self, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self._name = recipient[1].removeprefix(NAMESPACE) if recipient else ""
        if self._name in self._tools:
            self._begin("call")
        elif channel is not None and channel[1] == "analysis":
            self._begin("reasoning" if self._separate else "content")
            if not self._separate:
                self._emit(f"{CHANNEL}analysis{MESSAGE}")
                self._closing = END
        else:
            self._begin("content")

    def _begin(self, kind: _Kind) -> None:
        self._in_body, self._kind, self._header, self._closing, self._object = True, kind, "", "", None
        self._joint = "\n" if kind in self._emitted_kinds else ""

    def _close(self) -> None:
        if self._kind != "call":
            self._emit(self._closing)
        elif self._object is None:  # a tool without arguments
            self._parts.append(ToolCallDelta(self._calls, name=self._name, arguments="{}"))
            self._called()
        elif not self._object.done:
            self._called()
        self._in_body = False

    def _called(self) -> None:
        self._calls += 1
        self.done = self._calls >= self._calls_max

    def _no_header(self, text: str) -> None:
        """Handles text between messages that is not a header."""
        text = _MARK.sub(" ", text)
        text = text[: first_mark(MARKS, text, 0)[0]].strip(_SPACE)
        if not all(_is_known(word) for word in text.split()):
            self._begin("content")
            self._emit(text)
        self._in_body, self._header = False, ""

    def _emit(self, text: str) -> None:
        if self._kind == "call":
            text = self._emit_call(text)
        if not text:
            return
        text, self._joint = self._joint + text, ""
        self._emitted_kinds.add(self._kind)
        if self._kind == "content":
            self._parts.append(Content(text))
        elif self._shown:
            self._parts.append(Reasoning(text))

    def _emit_call(self, text: str) -> str:
        """Emits deltas of the call in the text, and returns the part that is content."""
        call = self._object
        if call is None:
            text = text.lstrip(_SPACE)
            if not text:
                return ""
            if text[0] != "{":
                self._begin("content")
                return text
            call = self._object = CallObject(self._tools, self._calls, known_keys_only=False, name=self._name)
        if not call.done:
            text = text[call.feed(text, 0) :]
            self._parts += call.deltas
            call.deltas = []
            if call.done or call.broken:
                self._called()
        if self.done or not (call.broken or (call.done and text.strip(_SPACE))):
            return ""
        self._begin("content")
        return text if call.broken else text.lstrip(_SPACE)


def _may_be_header(text: str) -> bool:
    text = text.lstrip(_SPACE)
    return any(word.startswith(text) or text.startswith(word) for word in _BEGINNINGS)


def _is_known(word: str) -> bool:
    """Whether the word belongs to a header, also if it is truncated or slightly too long."""
    return not any(char.isalnum() for char in word) or any(known.startswith(word) or word.startswith(known) for known in _WORDS)
