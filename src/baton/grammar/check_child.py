"""The process that checks grammars (check_process.py, text/helper_child.py).

A grammar comes from a client and foreign code compiles it, so it is compiled here first: too much time or memory, or a crash,
affects only this process.

    first    [tokens, special ids, width of the head]
    then     [kind, text]    -> [kind, text, ""] in a form that workers accept, or ["", "", why not]
"""

from __future__ import annotations

import signal
import time
from typing import Any, Final

import numpy as np
from msgspec import structs

from baton.errors import BadGrammar
from baton.grammar.check_process import TOO_MUCH
from baton.grammar.language import canonical
from baton.grammar.matcher import Matcher
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.text.helper_child import Answer, run

COMPILE_SECONDS_MAX: Final = 0.5
"""Seconds of CPU time for the grammar and its first mask. A worker compiles it too, and other requests may wait for that."""
_KILL_SECONDS: Final = 2 * COMPILE_SECONDS_MAX
"""Seconds of CPU time per request. Slower grammars are refused anyway, and another child starts in half a second."""


def begin(first: Any) -> Answer:
    tokens, special, width = first
    vocabulary = Vocabulary(tokens, special, width)

    def reply(request: Any) -> tuple[str, str, str]:
        kind, text = request
        return answer(vocabulary, Grammar(kind, text))

    return reply


def answer(vocabulary: Vocabulary, grammar: Grammar) -> tuple[str, str, str]:
    signal.setitimer(signal.ITIMER_PROF, _KILL_SECONDS)  # ends the process: compiling cannot be interrupted otherwise
    try:
        return _checked(vocabulary, canonical(grammar))
    except BadGrammar as error:
        return "", "", str(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _checked(vocabulary: Vocabulary, checked: Grammar) -> tuple[str, str, str]:
    begin = time.process_time()
    matcher = Matcher(vocabulary, structs.replace(checked, ends=(0,)))  # any end token will do, but there must be one
    matcher.fill(np.zeros(vocabulary.words, np.uint32))
    seconds = time.process_time() - begin
    if matcher.error:
        return "", "", matcher.error
    if seconds > COMPILE_SECONDS_MAX:
        return "", "", f"it takes {seconds:.2g} s to compile, and {COMPILE_SECONDS_MAX:g} s are allowed: make it smaller"
    return checked.kind, checked.text, ""


if __name__ == "__main__":
    run(begin, out_of_memory=TOO_MUCH)
