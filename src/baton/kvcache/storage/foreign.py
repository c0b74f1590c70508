"""Plug-in backends, by entry point: any fault of theirs is a failure of the store, never of the service."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint

from baton.errors import InvalidConfig, StorageFailed
from baton.kvcache.storage.backend import Deadline, LayoutName, Opener, StorageBackend
from baton.kvcache.storage.url import StorageURL


def foreign_opener(entry: EntryPoint) -> Opener:
    def open_foreign(url: StorageURL, layout: LayoutName) -> StorageBackend:
        try:
            return ForeignBackend(entry.value, entry.load()(url, layout))
        except InvalidConfig:
            raise
        except Exception as error:
            raise InvalidConfig(f"the KV storage plug-in {entry.value} cannot be opened: {error!r}")

    return open_foreign


class ForeignBackend:
    def __init__(self, name: str, backend: StorageBackend) -> None:
        self._name, self._backend = name, backend
        self.wants_tokens = bool(getattr(backend, "wants_tokens", False))

    def contains_prefix(self, keys: Sequence[bytes], deadline: Deadline, tokens: Sequence[int] | None = None) -> int:
        return self._counted(lambda: self._backend.contains_prefix(keys, deadline, tokens), len(keys))

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        return self._counted(lambda: self._backend.get(keys, into, deadline, tokens), len(keys))

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int:
        return self._counted(lambda: self._backend.put(keys, blocks, deadline, tokens), len(keys))

    def _counted(self, call: Callable[[], int], most: int) -> int:
        try:
            count = call()
        except StorageFailed as failed:
            if 0 <= failed.done <= most:
                raise
            raise StorageFailed(failed.reason, str(failed))
        except Exception as error:
            raise StorageFailed("protocol", f"the KV storage plug-in {self._name} raised {type(error).__name__}")
        if not isinstance(count, int) or not 0 <= count <= most:
            raise StorageFailed("protocol", f"the KV storage plug-in {self._name} counts wrongly")
        return count

    def counters(self) -> dict[str, int]:
        try:
            return self._backend.counters()
        except Exception:
            return {}

    def close(self) -> None:
        try:
            self._backend.close()
        except Exception:
            return  # the object is closed either way
