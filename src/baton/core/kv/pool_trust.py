"""Records which device pool the cache describes, and whether its blocks match their keys.

    before the first worker   no pool, not trusted
    WorkerReady               that pool, trusted: it is the same one as before, or the cache was cleared for it
    the worker broke the      the same pool, not trusted until the next WorkerReady: it may have been written through a wrong
    protocol, or sleeps       table, or its memory is gone

A pool that is not trusted is not read: no block is found in it (Board.need), published in it (Board.publish), copied out of it
(Tiers), or offered to another instance (handoff/source.py).
"""

from __future__ import annotations

from baton.protocol.ids import PoolIncarnation

NO_POOL = PoolIncarnation(0)


class PoolTrust:
    __slots__ = ("incarnation", "trusted")

    def __init__(self) -> None:
        self.incarnation = NO_POOL
        "The pool of the last worker that was ready."
        self.trusted = False

    def __repr__(self) -> str:
        return f"<PoolTrust {self.incarnation}, {'' if self.trusted else 'not '}trusted>"

    @property
    def offered(self) -> PoolIncarnation:
        """The pool whose blocks other instances may read."""
        return self.incarnation if self.trusted else NO_POOL

    def is_still(self, pool: PoolIncarnation) -> bool:
        """Whether the cache still describes this pool: the incarnations are equal, and the trust was not lost."""
        return self.trusted and pool == self.incarnation

    def begin(self, pool: PoolIncarnation) -> None:
        """Begin with the pool of a ready worker: the cache describes it."""
        self.incarnation = pool
        self.trusted = True

    def lose(self) -> None:
        self.trusted = False
