"""What a storage backend is.

A backend keeps blocks by key. It is a cache: everything may be gone at any time, and nobody waits for it without a deadline.
Calls are synchronous and come from several threads at once. They answer with a **leading count**: a run of blocks is useful
up to its first gap and no further.

    contains_prefix   how many leading objects are there; a hint, `get` decides
    get               how many leading objects were read whole and verified; what lies in `into` after those is undefined
    put               how many leading objects are stored now, those that had been there included

A missing or damaged object ends the count and is no error. `StorageFailed` is raised where the backend itself does not work
(see `Reason`), with the count up to there in `done`. No other exception leaves a backend.

A call comes back within its deadline as far as the operating system lets it: a read of a dead network file system cannot be
interrupted. A backend never writes to `into` after its call has come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from baton.errors import InvalidConfig
from baton.kvcache.storage.url import StorageURL

KEY_BYTES = FINGERPRINT_BYTES = 32


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant of the monotonic clock at which a call is to be over."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(monotonic() + seconds)

    def left(self) -> float:
        return max(0.0, self.at - monotonic())

    def passed(self) -> bool:
        return monotonic() >= self.at


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutName:
    """What an object's name and header say beside the key: how the bytes of a block are ordered, and whose share they are."""

    fingerprint: bytes
    "Digest of the pool's layout, 32 bytes."
    block_bytes: int
    "Size of one block's payload."
    rank: int = 0
    block_tokens: int = 16
    "Only for backends that want token ids."

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise InvalidConfig(f"a layout fingerprint has {FINGERPRINT_BYTES} bytes, not {len(self.fingerprint)}")
        if self.block_bytes < 1 or self.rank < 0:
            raise InvalidConfig(f"no layout has blocks of {self.block_bytes} bytes and rank {self.rank}")

    def object_name(self, key: bytes) -> str:
        """Unique among all models, layouts and ranks that share a store. The header holds the whole fingerprint."""
        return f"{key.hex()}-{self.fingerprint[:8].hex()}-r{self.rank}"


class StorageBackend(Protocol):
    wants_tokens: bool
    """Whether calls are to carry `tokens`: all ids from the start of the sequence to the end of the last block that is named,
    of which the last `len(keys)` blocks are meant. The keys of such a call follow each other in one chain. Asked once, when the
    backend is opened. `tokens` is None for a backend that does not ask. Ids are prompts: they belong in no log and no error."""

    def contains_prefix(self, keys: Sequence[bytes], deadline: Deadline, tokens: Sequence[int] | None = None) -> int: ...

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int: ...

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int: ...

    def counters(self) -> dict[str, int]:
        """What happened so far, by the names in `counters.py`."""
        ...

    def close(self) -> None: ...


Opener = Callable[[StorageURL, LayoutName], StorageBackend]
"""What an entry point names, under its scheme."""
