"""Versions of the wire protocol that a build reads and writes, and how two builds agree on one.

A version stays the same while messages only gain fields at their end (with defaults) and new kinds: a reader ignores fields
and kinds that it does not know. It rises when a field changes its meaning, moves or goes. `oldest` rises when a build stops
reading that version.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Versions(NamedTuple):
    """A range of versions, both ends included."""

    oldest: int
    newest: int

    def common(self, other: Versions) -> int | None:
        """The newest version that both sides speak. None: the ranges do not overlap."""
        version = min(self.newest, other.newest)
        return version if version >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


VERSIONS: Final = Versions(8, 8)
"""Versions that this build speaks."""

CACHED_KEYS: Final = "cached_keys"
"""Capability: instances report their cached blocks, as keys of 6 bytes. Builds with keys of 8 bytes called it `digests`."""
CAPABILITIES: Final[tuple[str, ...]] = ("keyed_digest", "pieces", CACHED_KEYS)
"""Optional features of this build, by name. Messages that need one are sent only to peers that list it."""
