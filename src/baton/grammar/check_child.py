"""The process that checks grammars: `python -m baton.grammar.check_child MEMORY_BYTES_MAX`, its socket as stdin.

A grammar comes from a client and is compiled by code that is not ours, so it is compiled here first: where it takes too much
time or memory, or ends the process, nobody else is hurt.

    first    [tokens, special ids, width of the head]   -> "ready"
    then     [kind, text, seconds]                      -> [kind, text, ""] in a form that workers take, or ["", "", why not]
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from typing import Any, Final

import numpy as np
from msgspec import structs

from baton.errors import BadGrammar
from baton.grammar.language import canonical
from baton.grammar.matcher import Matcher
from baton.grammar.vocabulary import Vocabulary
from baton.protocol.grammar import Grammar
from baton.text.child_limits import bound_this_process
from baton.text.template_wire import frame, receive, send

COMPILE_SECONDS_MAX: Final = 0.5
"""Of a processor, for the grammar and its first mask. A worker compiles it too, and others may have to wait for that."""

_TIMER_SECONDS_MORE: Final = 1.0


def serve(sock: socket.socket) -> None:
    """Until the parent closes the socket."""
    tokens, special, width = receive(sock)
    vocabulary = Vocabulary(tokens, special, width)
    send(sock, frame(("ok", "")))
    while True:
        try:
            kind, text, seconds = receive(sock)
        except ConnectionError:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds + _TIMER_SECONDS_MORE)
        reply: Any = answer(vocabulary, Grammar(kind, text))
        signal.setitimer(signal.ITIMER_REAL, 0)
        send(sock, frame(reply))


def answer(vocabulary: Vocabulary, grammar: Grammar) -> tuple[str, str, str]:
    try:
        checked = canonical(grammar)
    except BadGrammar as error:
        return "", "", str(error)
    begin = time.process_time()
    matcher = Matcher(vocabulary, structs.replace(checked, ends=(0,)))  # which token ends does not matter here, but one must
    matcher.fill(np.zeros(vocabulary.words, np.uint32))
    seconds = time.process_time() - begin
    if matcher.error:
        return "", "", matcher.error
    if seconds > COMPILE_SECONDS_MAX:
        return "", "", f"it takes {seconds:.2g} s to compile, and {COMPILE_SECONDS_MAX:g} s are allowed: make it smaller"
    return checked.kind, checked.text, ""


def main() -> None:
    bound_this_process(int(sys.argv[1]))
    sock = socket.socket(fileno=0)
    # From here on nothing may reach the log: it could repeat what a client sent.
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    serve(sock)


if __name__ == "__main__":
    main()
