"""The white space that a JSON answer writes between its parts: learned from the answer, for guesses of what it writes next.

    {                       place        learned
      "a": [1, 2],          open{        line break, and an indentation of two spaces per level
      "b": 3                colon        " "
    }                       open[        ""
                            comma[       " "

Whether a line breaks behind a comma or before a closing bracket is as it was before in the same object or array. A guess may be
wrong: it is verified as any draft. White space inside of strings is text, and no layout.
"""

from __future__ import annotations

from typing import Final

BREAK: Final = b"\n"
"""Stands for a line break with the indentation of the place's depth."""
USUAL: Final = {
    "open{": b"",
    "open[": b"",
    "comma{": b" ",
    "comma[": b" ",
    "colon": b" ",
    "close{": b"",
    "close[": b"",
    "before,": b"",
    "before:": b"",
    "unit": b"  ",
}
"""The layout of json.dumps, and "unit": the indentation per level of those that indent."""
_SPACES: Final = frozenset(b" \t\n\r")
_QUOTE, _ESCAPE, _COMMA, _COLON = b'"\\,:'
_OPENING: Final = {b"{"[0]: "{", b"["[0]: "["}
_CLOSING: Final = frozenset(b"}]")
_SCALAR: Final = -1
"""Stands for the last character of a value that is no string."""
SPACES_MAX: Final = 128
"""Maximum of white space that is read or guessed at one place: a wide indentation of deep arrays would take megabytes."""

Layout = dict[str, bytes]
"""White space by place, and "unit"."""


class JsonLayout:
    """Reads an answer as it is written. The state is the place in the text, and what was learned."""

    __slots__ = ("_escaped", "_in_string", "_last", "_own", "_shared", "_spaces", "_stack")

    def __init__(self, shared: Layout | None = None) -> None:
        """`shared`: what earlier answers wrote, which holds until this one has shown its own; it learns from this answer."""
        self._shared: Layout = {} if shared is None else shared
        self._own: Layout = {}
        self._stack: list[tuple[str, bool]] = []
        "Open brackets, and whether the line broke behind the bracket or its last comma."
        self._in_string = self._escaped = False
        self._last = 0
        "The last character that was no white space; _SCALAR for those of numbers and names. 0: none."
        self._spaces = bytearray()
        "White space since then."

    def fork(self) -> JsonLayout:
        """A second reader at the same place, from which this one and the shared layout learn nothing."""
        other = JsonLayout(self._shared.copy())
        other._own, other._stack = self._own.copy(), self._stack.copy()
        other._in_string, other._escaped, other._last = self._in_string, self._escaped, self._last
        other._spaces = self._spaces.copy()
        return other

    @property
    def in_string(self) -> bool:
        return self._in_string

    @property
    def between(self) -> bool:
        """Whether this is a place in an object or array where a part may begin: not in a string."""
        return bool(self._stack) and not self._in_string

    def read(self, text: bytes) -> None:
        """Read on, and learn."""
        for character in text:
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == _ESCAPE:
                    self._escaped = True
                elif character == _QUOTE:
                    self._in_string = False
            elif character in _SPACES:
                if len(self._spaces) < SPACES_MAX:
                    self._spaces.append(character)
            else:
                self._read_part(character)

    def guess(self, following: int) -> bytes:
        """The white space that is still to come at this place, before this character."""
        place = self._place(following)
        if place is None:
            return b""
        written = bytes(self._spaces)
        usual = BREAK if written.startswith(BREAK) else self._usual(place, self._stack[-1][1])
        if usual == BREAK:
            unit, depth = self._unit(), self._depth(following)
            if len(unit) * depth > SPACES_MAX:
                return b""
            usual += unit * depth
        return usual[len(written) :] if usual.startswith(written) else b""

    def _read_part(self, character: int) -> None:
        place = self._place(character)
        if place is not None:
            self._learn(place, bytes(self._spaces), self._depth(character))
        self._spaces.clear()
        if character in _OPENING:
            self._stack.append((_OPENING[character], False))
        elif character in _CLOSING and self._stack:
            self._stack.pop()
        self._in_string = character == _QUOTE
        structural = character in _OPENING or character in _CLOSING or character in (_QUOTE, _COMMA, _COLON)
        self._last = character if structural else _SCALAR

    def _place(self, following: int) -> str | None:
        """Name of this place, if that character follows."""
        if not self._stack:
            return None
        if following in _CLOSING:  # an empty object or array has no layout
            return None if self._last in _OPENING else f"close{self._stack[-1][0]}"
        if following == _COMMA:
            return "before,"
        if following == _COLON:
            return "before:"
        if self._last in _OPENING:
            return f"open{self._stack[-1][0]}"
        if self._last == _COMMA:
            return f"comma{self._stack[-1][0]}"
        return "colon" if self._last == _COLON else None

    def _depth(self, following: int) -> int:
        return len(self._stack) - (following in _CLOSING)

    def _learn(self, place: str, spaces: bytes, depth: int) -> None:
        breaks = spaces.startswith(BREAK)
        if breaks:
            unit, rest = divmod(len(spaces) - 1, depth) if depth else (0, 1)
            if not rest:
                self._own["unit"] = self._shared["unit"] = spaces[1 : 1 + unit]
            spaces = BREAK
        if place.startswith(("open", "comma")):
            self._stack[-1] = self._stack[-1][0], breaks
        if not (breaks and place.startswith(("comma", "close"))):
            self._own[place] = self._shared[place] = spaces

    def _usual(self, place: str, breaks: bool) -> bytes:
        """White space at the place. `breaks`: whether the line broke before in the same object or array."""
        if place.startswith("open"):
            return self._own[place] if place in self._own else self._opening(place)
        if breaks and place.startswith(("comma", "close")):
            return BREAK
        return self._own[place] if place in self._own else self._shared.get(place, USUAL[place])

    def _opening(self, place: str) -> bytes:
        """White space behind the first bracket of this kind, as behind the other kind if that was seen."""
        other = "open[" if place == "open{" else "open{"
        own, shared = self._own.get(other), self._shared.get(place)
        if own is not None and (shared is None or own != self._shared.get(other)):
            return own
        return USUAL[place] if shared is None else shared

    def _unit(self) -> bytes:
        return self._own.get("unit") or self._shared.get("unit", USUAL["unit"])
