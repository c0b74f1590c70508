"""Marked places of a chain of blocks, and the short form of keys, which are all that routers know of a cache.

    places   1, 2, 4, 8, 16, 32 and every 32nd after: a prefix is known to within half of its length, or 32 blocks

A short key is the first 6 bytes of a block's key. Two equal ones of different blocks cost a router a wrong guess, never an
answer: an instance looks up its own blocks by whole keys. Among 4,000,000 keys one lookup in 60,000,000 finds another's.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import iter_unpack
from typing import Final

from baton.protocol.ids import BlockKey

SPACING: Final = 32
FIRST: Final = (1, 2, 4, 8, 16)
KEY_BYTES: Final = 6

Mark = tuple[int, int]
"""A marked place, counted from 1, and the short key of its block."""


def is_mark(place: int) -> bool:
    """Whether the place is marked. `place` counts from 1."""
    return not place % SPACING or place in FIRST


def blocks_before(place: int) -> int:
    """Number of blocks from the mark before this one up to it."""
    return SPACING if place > SPACING else max(1, place // 2)


def marks_of(keys: Sequence[BlockKey]) -> list[Mark]:
    """The marks of a chain, shallowest first."""
    places = [*(place for place in FIRST if place <= len(keys)), *range(SPACING, len(keys) + 1, SPACING)]
    return [(place, int.from_bytes(keys[place - 1][:KEY_BYTES])) for place in places]


def short_keys(packed: bytes) -> list[int]:
    """The short keys of a message. Raises struct.error if it does not consist of whole keys."""
    return [high << 16 | low for high, low in iter_unpack(">IH", packed)]
