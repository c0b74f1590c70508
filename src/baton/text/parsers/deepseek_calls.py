"""Calls as DeepSeek writes them: a name and a JSON object between tokens of their own.

    V3, R1  <|tool calls begin|><|tool call begin|>function<|tool sep|>weather
            ```json
            {"city": "Oslo"}
            ```<|tool call end|><|tool calls end|>
    V3.1    <|tool calls begin|><|tool call begin|>weather<|tool sep|>{"city": "Oslo"}<|tool call end|><|tool calls end|>

(The real marks have a wide bar and a low block in place of | and the space.) Both are accepted, whichever the template uses.
"""

from __future__ import annotations

from typing import Final

from baton.text.parsers.base import ToolCallDelta
from baton.text.parsers.call_object import CallObject
from baton.text.parsers.text_calls import NoCall, TextCalls

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, END_FENCE = "```json", "```"
_NAME_CHARS_MAX: Final = 512


class DeepseekCalls(TextCalls):
    _call_name = ""
    _object: CallObject | None = None

    def _begun(self, mark: str) -> None:
        self._step = self._head if mark == CALL else self._call

    def _call(self) -> bool:
        self._step = self._head if self._mark(CALL) else self._step
        return self._step == self._head

    def _head(self) -> bool:
        """Reads the name, or the word "function" before the name."""
        head = self._until(SEP, _NAME_CHARS_MAX)
        if head is None:
            return False
        self._call_name = head.strip()
        self._step = self._fenced_name if self._call_name == "function" else self._arguments
        return True

    def _fenced_name(self) -> bool:
        name = self._until(FENCE, _NAME_CHARS_MAX)
        if name is None:
            return False
        self._call_name = name.strip()
        self._step = self._arguments
        return True

    def _arguments(self) -> bool:
        if not self._mark("{"):
            return False
        self._at -= 1
        if self._call_name not in self._tools:
            raise NoCall
        self._in_call, self._gap, self._begin = True, True, self._at
        self._object = CallObject(self._tools, self._calls, known_keys_only=False, name=self._call_name)
        self._step = self._reading
        return True

    def _reading(self) -> bool:
        call = self._object
        assert call is not None
        before = self._at
        self._at = call.feed(self._text, self._at)
        self._begin = self._at
        deltas: list[ToolCallDelta] = call.deltas
        self._parts += deltas
        call.deltas = []
        if call.broken:
            raise NoCall
        if call.done:
            self._ended()
            return True
        return self._at > before and self._at < len(self._text)

    def _after(self) -> bool:
        mark = self._mark(END_FENCE, END_CALL, CALL, END_CALLS)
        if mark == CALL:
            self._step = self._head
        elif mark == END_CALLS:
            self._back_to_content()
        elif mark:
            self._begin = self._at
        return bool(mark)
