"""The process in which grammars are checked (check_child.py, text/helper.py), and a cache of the results.

The first grammar starts the process. The last results are cached: most clients send few different grammars.
"""

from __future__ import annotations

import contextlib
from typing import Final

from msgspec import structs

from baton.errors import BadGrammar
from baton.grammar.vocabulary_source import VocabularySource
from baton.protocol.grammar import Grammar
from baton.text.helper import Helper, HelperCrash, HelperTimeout
from baton.text.helper_wire import frame

MEMORY_BYTES_MAX: Final = 2 * 1024**3
"""Bytes of the child's address space. With a vocabulary of 150,000 tokens it has 0.5 GiB before the first grammar."""
CHECK_SECONDS_MAX: Final = 5.0
"""Seconds of wall-clock time. An ordinary grammar takes milliseconds; the child itself refuses more than half a second of CPU
time."""
GRAMMARS_MAX: Final = 256
"""Number of cached results."""
TOO_MUCH: Final = ("", "", "it takes too much time or memory to compile: make it smaller")
_REPLY_BYTES_MAX: Final = 16 * 1024**2
_ONE_THREAD: Final = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Number of threads. Each takes address space."""


class GrammarCheck:
    """Checks grammars in a child. Thread-safe; the calling thread blocks."""

    def __init__(self, vocabulary: VocabularySource, *, check_seconds_max: float = CHECK_SECONDS_MAX) -> None:
        self._check_seconds_max = check_seconds_max
        self.helper = Helper(
            "baton.grammar.check_child",
            "grammars",
            memory_bytes_max=MEMORY_BYTES_MAX,
            start_with=vocabulary,
            environment=_ONE_THREAD,
        )
        # written only by the thread that holds the helper's turn
        self._known: dict[tuple[str, str], tuple[str, str, str]] = {}

    def knows(self, grammar: Grammar) -> bool:
        """Whether `check` returns at once."""
        return (grammar.kind, grammar.text) in self._known

    def check(self, grammar: Grammar) -> Grammar:
        """The grammar in a form that workers accept. Raises BadGrammar, or Unavailable if it cannot be checked."""
        asked = (grammar.kind, grammar.text)
        kind, text, why = self._known.get(asked) or self._request(asked)
        if why:
            raise BadGrammar(why)
        return structs.replace(grammar, kind=kind, text=text)

    def learn(self, grammar: Grammar) -> None:
        """Fills the cache, so that `check` returns at once until the entry is evicted. Raises Unavailable."""
        with contextlib.suppress(BadGrammar):
            self.check(grammar)

    def close(self) -> None:
        self.helper.close()

    def _request(self, asked: tuple[str, str]) -> tuple[str, str, str]:
        seconds = self._check_seconds_max
        message = frame([seconds, asked])
        with self.helper.turn():
            answer = self._known.get(asked)  # the thread before us may have checked the same grammar
            if answer is None:
                try:
                    kind, text, why = self.helper.ask_in_turn(message, seconds, _REPLY_BYTES_MAX)
                    answer = str(kind), str(text), str(why)
                except (HelperTimeout, HelperCrash):
                    answer = TOO_MUCH
                self._keep(asked, answer)
            return answer

    def _keep(self, asked: tuple[str, str], answer: tuple[str, str, str]) -> None:
        self._known[asked] = answer
        while len(self._known) > GRAMMARS_MAX:
            self._known.pop(next(iter(self._known)), None)
