"""The process in which grammars are checked (check_child.py, text/helper.py), and what is known of those that were.

It is started by the first grammar. What was found out about a grammar is kept, for the last of them: most clients send few
different ones.
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
"""Address space of the child. With a vocabulary of 150,000 tokens it has 0.5 GiB before the first grammar."""
CHECK_SECONDS_MAX: Final = 5.0
"""On the clock. An honest grammar takes milliseconds; the child itself refuses what takes half a second of a processor."""
GRAMMARS_MAX: Final = 256
"""So many answers are kept."""
TOO_MUCH: Final = ("", "", "it takes too much time or memory to compile: make it smaller")
_REPLY_BYTES_MAX: Final = 16 * 1024**2
_ONE_THREAD: Final = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Each thread takes address space."""


class GrammarCheck:
    """May be asked from any thread; a thread that asks waits."""

    def __init__(self, vocabulary: VocabularySource, *, check_seconds_max: float = CHECK_SECONDS_MAX) -> None:
        self._check_seconds_max = check_seconds_max
        self.helper = Helper(
            "baton.grammar.check_child",
            "grammars",
            memory_bytes_max=MEMORY_BYTES_MAX,
            start_with=vocabulary,
            environment=_ONE_THREAD,
        )
        # Only who has the helper's turn writes to it.
        self._known: dict[tuple[str, str], tuple[str, str, str]] = {}

    def knows(self, grammar: Grammar) -> bool:
        """Whether `check` answers at once."""
        return (grammar.kind, grammar.text) in self._known

    def check(self, grammar: Grammar) -> Grammar:
        """The same in a form that workers take. Raises BadGrammar, or Unavailable where nobody can say."""
        asked = (grammar.kind, grammar.text)
        kind, text, why = self._known.get(asked) or self._ask(asked)
        if why:
            raise BadGrammar(why)
        return structs.replace(grammar, kind=kind, text=text)

    def learn(self, grammar: Grammar) -> None:
        """`check` answers at once from now on, until many others were asked for. Raises Unavailable."""
        with contextlib.suppress(BadGrammar):
            self.check(grammar)

    def close(self) -> None:
        self.helper.close()

    def _ask(self, asked: tuple[str, str]) -> tuple[str, str, str]:
        seconds = self._check_seconds_max
        message = frame([seconds, asked])
        with self.helper.turn():
            answer = self._known.get(asked)  # who was before us may have asked the same
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
