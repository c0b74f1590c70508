"""The interface of a storage backend.

A backend stores blocks by key. It is a cache: any object may disappear at any time, and every call has a deadline. Calls are
synchronous and come from several threads at once. They return a **leading count**: a run of blocks is useful up to its first
gap and no further.

    contains_prefix   how many leading objects are stored; a hint, `get` decides
    get               how many leading objects were read completely and verified; `into` after those is undefined
    put               how many leading objects are stored now, including those that had been stored before

A missing or damaged object ends the count and is no error. `StorageFailed` is raised if the backend itself fails (see
`Reason`), with the count up to there in `done`. No other exception leaves a backend.

A call returns within its deadline as far as the operating system permits: a read of a dead network file system cannot be
interrupted. A backend never writes to `into` after its call has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol, runtime_checkable

from baton.errors import InvalidConfig
from baton.kvcache.storage.url import StorageURL

KEY_BYTES = FINGERPRINT_BYTES = 32
LABEL_BYTES = 8


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant of the monotonic clock at which a call must have returned."""

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
    """The layout in an object's name and header, besides the key: the order of a block's bytes, and the rank."""

    fingerprint: bytes
    "Digest of the pool's layout, 32 bytes."
    block_bytes: int
    "Size of one block's payload."
    rank: int = 0
    block_tokens: int = 16
    "Tokens per block; only for backends that want token ids."
    identity: bytes = b""
    """Digest of everything that the blocks' content depends on (worker/identity.py). Keys cover it already; in names and
    headers it is a label, by which operators find the blocks of a model. Empty: unknown, and the layout is the label."""

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise InvalidConfig(f"a layout fingerprint has {FINGERPRINT_BYTES} bytes, not {len(self.fingerprint)}")
        if self.block_bytes < 1 or self.rank < 0:
            raise InvalidConfig(f"no layout has blocks of {self.block_bytes} bytes and rank {self.rank}")

    @property
    def label(self) -> bytes:
        return (self.identity or self.fingerprint)[:LABEL_BYTES]

    def object_name(self, key: bytes) -> str:
        """Name of an object, unique among all models, layouts and ranks that share a store. The header holds the whole
        fingerprint."""
        return f"{key.hex()}-{self.label.hex()}-r{self.rank}"


class StorageBackend(Protocol):
    wants_tokens: bool
    """Whether calls must carry `tokens`: all ids from the start of the sequence to the end of the last named block, of which
    the last `len(keys)` blocks are meant. The keys of such a call form one chain. Read once, when the backend is opened.
    `tokens` is None for other backends. Ids are prompts: they must not appear in logs or errors."""

    def contains_prefix(self, keys: Sequence[bytes], deadline: Deadline, tokens: Sequence[int] | None = None) -> int: ...

    def get(
        self, keys: Sequence[bytes], into: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int: ...

    def put(
        self, keys: Sequence[bytes], blocks: Sequence[memoryview], deadline: Deadline, tokens: Sequence[int] | None = None
    ) -> int: ...

    def counters(self) -> dict[str, int]:
        """Totals so far, by the names in `counters.py`."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class IdentifiedBackend(StorageBackend, Protocol):
    """A backend that labels its objects."""

    def identify(self, identity: bytes) -> None:
        """Set the identity of the blocks from now on. Called before the first block, and after the weights have changed."""
        ...


Opener = Callable[[StorageURL, LayoutName], StorageBackend]
"""Function that an entry point names, under its scheme."""
