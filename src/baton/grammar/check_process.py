"""Owns the process in which grammars are checked (check_child.py), and ends it where one takes too long.

It is started by the first grammar. One grammar at a time; who comes meanwhile waits on its thread. What was found out about a
grammar is kept, for the last of them: most clients send few different ones.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from queue import Empty, Queue
from typing import Any, Final

from msgspec import structs

from baton.errors import BadGrammar, Unavailable
from baton.grammar.vocabulary_source import VocabularySource
from baton.protocol.grammar import Grammar
from baton.text.template_wire import frame, receive, send

MEMORY_BYTES_MAX: Final = 2 * 1024**3
"""Address space of the child. With a vocabulary of 150,000 tokens it has 0.5 GiB before the first grammar."""
START_SECONDS_MAX: Final = 60.0
CHECK_SECONDS_MAX: Final = 5.0
"""On the clock. An honest grammar takes milliseconds; the child itself refuses what takes half a second of a processor."""
TURN_SECONDS_MAX: Final = 30.0
GRAMMARS_MAX: Final = 256
"""So many answers are kept."""
_REPLY_BYTES_MAX: Final = 16 * 1024**2
_KILL_SECONDS_MAX: Final = 10.0
_ENVIRONMENT: Final = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
_TOO_MUCH: Final = ("", "", "it takes too much time or memory to compile: make it smaller")


class GrammarCheck:
    """May be asked from any thread; a thread that asks waits."""

    def __init__(self, vocabulary: VocabularySource, *, check_seconds_max: float = CHECK_SECONDS_MAX) -> None:
        self._vocabulary = vocabulary
        self._check_seconds_max = check_seconds_max
        # The one who takes the entry has the child to itself, and puts it back. Only that one writes to `_known`.
        self._turn: Queue[_Child | None] = Queue(maxsize=1)
        self._turn.put_nowait(None)
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
        """End the child, unless a grammar is in it; that one ends when its reply finds nobody."""
        with contextlib.suppress(Empty):
            child = self._turn.get_nowait()
            if child is not None:
                child.close()
            self._turn.put_nowait(None)

    def _ask(self, asked: tuple[str, str]) -> tuple[str, str, str]:
        try:
            child = self._turn.get(timeout=TURN_SECONDS_MAX)
        except Empty:
            raise Unavailable("other grammars are being checked: try again later") from None
        try:
            answer = self._known.get(asked)  # who was before us may have asked the same
            for last in (False, True):
                if answer is not None:
                    break
                child = child or _Child(self._vocabulary)
                child.wait_ready()
                try:
                    answer = child.ask(asked, self._check_seconds_max)
                except TimeoutError:
                    answer = _TOO_MUCH
                except (ConnectionError, ValueError):  # it was killed; by this grammar, if that happens twice
                    answer = _TOO_MUCH if last else None
                if answer is None or answer is _TOO_MUCH:
                    child.close()
                    child = None
            assert answer is not None
            self._keep(asked, answer)
            return answer
        except BaseException:
            if child is not None:
                child.close()  # its reply, if it still comes, must never meet another grammar
                child = None
            raise
        finally:
            self._turn.put_nowait(child)

    def _keep(self, asked: tuple[str, str], answer: tuple[str, str, str]) -> None:
        self._known[asked] = answer
        while len(self._known) > GRAMMARS_MAX:
            self._known.pop(next(iter(self._known)), None)


class _Child:
    def __init__(self, vocabulary: VocabularySource) -> None:
        self._ready = False
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "baton.grammar.check_child", str(MEMORY_BYTES_MAX)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
                env=_environment(),
            )
        except OSError as error:
            ours.close()
            raise Unavailable(f"the process for grammars cannot be started: {error.strerror}") from None
        finally:
            theirs.close()
        self._socket = ours
        self._start: Any = vocabulary()

    def wait_ready(self) -> None:
        if self._ready:
            return
        deadline = time.monotonic() + START_SECONDS_MAX
        try:
            send(self._socket, frame(self._start), deadline)
            receive(self._socket, 1024, deadline)
        except (TimeoutError, ConnectionError, ValueError):
            self.close()
            raise Unavailable("the process for grammars does not start") from None
        self._start, self._ready = None, True

    def ask(self, asked: tuple[str, str], seconds: float) -> tuple[str, str, str]:
        deadline = time.monotonic() + seconds
        message: Any = [*asked, seconds]
        send(self._socket, frame(message), deadline)
        kind, text, why = receive(self._socket, _REPLY_BYTES_MAX, deadline)
        return str(kind), str(text), str(why)

    def close(self) -> None:
        self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS_MAX)


def _environment() -> dict[str, str]:
    """The child finds the modules that this process finds, and knows nothing else of its environment."""
    kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    threads = {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread takes address space
    return {**kept, **threads, "PYTHONPATH": os.pathsep.join(os.path.abspath(folder) for folder in sys.path)}
