"""The text that is expected next in structured output: what the grammar forces, and the usual white space between forced parts.

    text so far     {"name": "Ada"
    forced          nothing: white space may come first
    expected        ,\\n  "year":_              the layout is this answer's own (json_layout.py)
    ends            1  2  9                    what may follow: a token of the text that contains some of it is left out

Only white space is guessed: where the grammar allows more than one other character, the text ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from llguidance import LLMatcher

from baton.grammar.json_layout import JsonLayout

TEXT_MAX: Final = 64
"""Bytes from which a text is not continued: more than any step drafts."""
FORCED_MAX: Final = 256
"""Maximum of bytes of forced text that is read at once. A schema's constants may have many thousands."""
ENDS_MAX: Final = 4
STARTS: Final = b'"{[}],:t-f19n0aA'
"""Characters that begin a part of JSON, and two that only strings have."""
STRING_ENDS: Final = (b"A", b"a", b"1")


class Expected(NamedTuple):
    text: bytes
    ends: tuple[bytes, ...] = ()
    "Some of the texts that may follow. Empty: not known."
    is_last: bool = False
    "Whether the answer ends behind the text."
    is_cut: bool = False
    "Whether more is expected behind the text."

    def after(self, written: bytes) -> Expected | None:
        """Return what is still expected behind this text. None: it is another text, or little is left of a longer one."""
        if not written or not self.text.startswith(written) or (self.is_cut and len(self.text) - len(written) < TEXT_MAX // 2):
            return None
        return self._replace(text=self.text[len(written) :])


NOTHING: Final = Expected(b"")


def expected_text(matcher: LLMatcher, layout: JsonLayout | None, tokens: Sequence[int | None]) -> Expected:
    """`matcher`, `layout`: at the end of the text so far; both stay as they are. `tokens`: a token of each single byte."""
    text = _forced(matcher)
    if len(text) > FORCED_MAX:
        return Expected(text[:FORCED_MAX], is_cut=True)
    if layout is None or not (text or layout.between):
        return Expected(text)
    state, reader = matcher.deep_copy(), layout.fork()
    if not _consume(state, reader, text, tokens):
        return Expected(text)
    while len(text) < TEXT_MAX:
        if not reader.between:
            if state.is_stopped():
                return Expected(text, is_last=True)
            return Expected(text, _string_ends(state, tokens) if reader.in_string else ())
        starts = _starts(state, tokens)
        if len(starts) != 1:
            if not text:
                return NOTHING
            return Expected(text, _ends(state, reader, starts, tokens))
        more = reader.guess(starts[0]) + bytes(starts)
        if not _consume(state, reader, more, tokens):
            break
        text += more
        forced = _forced(state)[:FORCED_MAX]
        if not _consume(state, reader, forced, tokens):
            break
        text += forced
    return Expected(text, is_cut=True)


def _forced(state: LLMatcher) -> bytes:
    return bytes(state.deep_copy().compute_ff_bytes())


def _consume(state: LLMatcher, reader: JsonLayout | None, text: bytes, tokens: Sequence[int | None]) -> bool:
    """Whether the state has consumed the text."""
    ids = [token for byte in text if (token := tokens[byte]) is not None]
    if len(ids) < len(text) or not state.consume_tokens(ids):
        return False
    if reader is not None:
        reader.read(text)
    return True


def _starts(state: LLMatcher, tokens: Sequence[int | None]) -> bytes:
    """The characters of STARTS that may come next."""
    return bytes(byte for byte in STARTS if (token := tokens[byte]) is not None and state.validate_tokens([token]))


def _ends(state: LLMatcher, reader: JsonLayout, starts: bytes, tokens: Sequence[int | None]) -> tuple[bytes, ...]:
    """Texts that begin with some of these characters."""
    ends = []
    for start in starts[:ENDS_MAX]:
        end, after = reader.guess(start) + bytes((start,)), state.deep_copy()
        ends.append(end + _forced(after) if _consume(after, None, end, tokens) else end)
    return tuple(ends)


def _string_ends(state: LLMatcher, tokens: Sequence[int | None]) -> tuple[bytes, ...]:
    return tuple(end for end in STRING_ENDS if (token := tokens[end[0]]) is not None and state.validate_tokens([token]))
