"""Answers, chunk by chunk. A stream runs the engine while it is read; one that is left early ends its requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from baton.llm.outputs import Chunk


class AnswerStream(Iterator[Chunk]):
    """Made by `LLM.stream` and `LLM.stream_chat`. The LLM takes no other call until it is read to its end, or closed."""

    def __init__(self, chunks: deque[Chunk], advance: Callable[[], bool], finish: Callable[[bool], None]) -> None:
        """`advance` runs a step, whose chunks are appended, and is false at the end. `finish` is told whether all was read."""
        self._chunks = chunks
        self._advance = advance
        self._finish: Callable[[bool], None] | None = finish

    def __next__(self) -> Chunk:
        try:
            while not self._chunks:
                if self._finish is None:
                    raise StopIteration
                if not self._advance():
                    self._end(whole=True)
        except StopIteration:
            raise
        except BaseException:
            self.close()
            raise
        return self._chunks.popleft()

    def close(self) -> None:
        """Ends what is not finished. The LLM takes the next call."""
        self._chunks.clear()
        self._end(whole=False)

    def _end(self, *, whole: bool) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish(whole)

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
