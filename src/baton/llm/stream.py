"""Answers chunk by chunk. Reading a stream runs the engine; leaving it early ends its requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from baton.llm.outputs import Chunk


class AnswerStream(Iterator[Chunk]):
    """Returned by `LLM.stream` and `LLM.stream_chat`. The LLM accepts no other call until the stream is read to its end or
    closed."""

    def __init__(self, chunks: deque[Chunk], advance: Callable[[], bool], finish: Callable[[bool], None]) -> None:
        """`advance` runs a step, appends its chunks, and returns False at the end. `finish` gets whether everything was
        read."""
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
        """Ends unfinished requests. The LLM accepts the next call."""
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
