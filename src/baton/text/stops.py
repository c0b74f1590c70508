"""Stop strings: finds them in streamed text, and holds back text that may begin one.

The match that is **complete first** counts, and of several that end at the same character the longest. So the answer does not
depend on how the text is split, and a sequence ends at the first possible token. With stops "bc" and "abcd" the text "abcd"
ends at "bc" and gives "a".

Held back is exactly the longest suffix of the text that begins a stop string. All stop strings form one automaton
(Aho-Corasick), built once per request. A state is that longest suffix, so a sequence stores one number; the held-back text is a
prefix of the state's stop string. Each character is read once and each fall-back undoes an earlier step: linear time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from baton.errors import CallerError
from baton.text.clean import has_lone_surrogate

STOPS_MAX = 16
STOP_BYTES_MAX = 1024


class Fed(NamedTuple):
    """The result of feeding a piece of text."""

    text: str
    "Text that can be sent now."
    stop: str | None = None
    "The stop string that ended the text. Later text is dropped."


class StopAutomaton:
    """The stop strings of one request; its n sequences share it."""

    __slots__ = ("_depth", "_fall_back", "_match", "_next", "_owner", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(_checked(stops))
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        "Length of the held-back text, by state."
        self._owner = [""]
        "A stop string that begins with the state's text, by state."
        self._match: list[str | None] = [None]
        "The longest stop string that the state's text ends with, by state."
        self._fall_back = [0]
        for stop in self.stops:
            self._add(stop)
        self._link()

    def step(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fall_back[state]
        return self._next[state][char]

    def match_at(self, state: int) -> str | None:
        return self._match[state]

    def held_back(self, state: int) -> int:
        """Number of held-back characters."""
        return self._depth[state]

    def held_text(self, state: int, count: int) -> str:
        """The first `count` held-back characters."""
        return self._owner[state][:count]

    def _add(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, start=1):
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(depth)
                self._owner.append(stop)
                self._match.append(None)
                self._fall_back.append(0)
            state = self._next[state][char]
        self._match[state] = stop

    def _link(self) -> None:
        """Sets the fall-backs in breadth-first order: a fall-back is always shorter than its state."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._next[state].items():
                self._fall_back[child] = self.step(self._fall_back[state], char)
                waiting.append(child)
            if self._match[state] is None:
                self._match[state] = self._match[self._fall_back[state]]


class StopStrings:
    """Stop strings of one sequence: feed() it the deltas of a detokenizer, then flush()."""

    __slots__ = ("_automaton", "_include_stop", "_state", "stop")

    def __init__(self, stops: Sequence[str] | StopAutomaton, *, include_stop: bool = False) -> None:
        """Raises CallerError for stop strings outside the limits. `include_stop`: the stop string is sent too."""
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._include_stop = include_stop
        self._state = 0
        self.stop: str | None = None
        "The stop string that ended the text, or None."

    def feed(self, delta: str, *, may_end: bool = True) -> Fed:
        """Reads a delta and returns the text to send. All text after a match is dropped. With `may_end` off a match that
        completes in this delta is ignored; a match that begins here may complete in a later delta."""
        if self.stop is not None:
            return Fed("", self.stop)
        if not self._automaton.stops:
            return Fed(delta)  # no stop strings, the usual case
        automaton, start, state = self._automaton, self._state, self._state
        for count, char in enumerate(delta, start=1):
            state = automaton.step(state, char)
            self.stop = automaton.match_at(state) if may_end else None
            if self.stop is not None:
                return Fed(self._ended(start, delta[:count], self.stop), self.stop)
        self._state = state
        return Fed(self._first(start, delta, automaton.held_back(start) + len(delta) - automaton.held_back(state)))

    def flush(self) -> str:
        """Return the held-back text if the sequence ends otherwise; empty after a match."""
        if self.stop is not None:
            return ""
        state, self._state = self._state, 0
        return self._automaton.held_text(state, self._automaton.held_back(state))

    def _ended(self, start: int, delta: str, stop: str) -> str:
        before = self._automaton.held_back(start) + len(delta) - len(stop)
        return self._first(start, delta, before) + (stop if self._include_stop else "")

    def _first(self, start: int, delta: str, count: int) -> str:
        """The first `count` characters of the text held back in `start`, followed by `delta`."""
        held = self._automaton.held_back(start)
        if count <= held:
            return self._automaton.held_text(start, count)
        return self._automaton.held_text(start, held) + delta[: count - held]


def _checked(stops: Sequence[str]) -> Sequence[str]:
    if isinstance(stops, str):
        raise CallerError("stop must be a list of strings here, not one string")
    if len(stops) > STOPS_MAX:
        raise CallerError(f"stop has {len(stops)} strings and at most {STOPS_MAX} are allowed")
    for index, stop in enumerate(stops):
        if not isinstance(stop, str):
            raise CallerError(f"stop[{index}] must be a string, not {type(stop).__name__}")
        if not stop:
            raise CallerError(f"stop[{index}] is empty: it would end every text before it begins")
        if len(stop) > STOP_BYTES_MAX or len(stop.encode("utf-8", "surrogatepass")) > STOP_BYTES_MAX:
            raise CallerError(f"stop[{index}] is longer than {STOP_BYTES_MAX} bytes")
        if has_lone_surrogate(stop):
            raise CallerError(f"stop[{index}] has a lone surrogate: no output can contain it")
    return stops
