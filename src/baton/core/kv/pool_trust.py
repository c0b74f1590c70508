"""Which device pool the cache is about, and whether its blocks hold what their keys say.

    before the first worker   no pool, not trusted
    WorkerReady               that pool, trusted: it is the same one as before, or the cache was cleared for it
    the worker broke the      the same pool, not trusted until the next WorkerReady: it may have been written through a wrong
    protocol, or sleeps       table, or its memory is gone

A pool that is not trusted is not read: nothing is found in it (Board.need), nothing is published in it (Board.publish), nothing
is copied out of it (Tiers), and no other instance is offered a block of it (handoff/source.py).
"""

from __future__ import annotations

from baton.protocol.ids import PoolIncarnation

NO_POOL = PoolIncarnation(0)


class PoolTrust:
    __slots__ = ("incarnation", "trusted")

    def __init__(self) -> None:
        self.incarnation = NO_POOL
        "The last pool that a worker was ready with."
        self.trusted = False

    def __repr__(self) -> str:
        return f"<PoolTrust {self.incarnation}, {'' if self.trusted else 'not '}trusted>"

    @property
    def offered(self) -> PoolIncarnation:
        """The pool whose blocks other instances may read."""
        return self.incarnation if self.trusted else NO_POOL

    def is_still(self, pool: PoolIncarnation) -> bool:
        """Two equal incarnations are one pool: what the cache says of it is still true, unless the trust was lost."""
        return self.trusted and pool == self.incarnation

    def begin(self, pool: PoolIncarnation) -> None:
        """A worker is ready with this pool, and the cache is about it."""
        self.incarnation = pool
        self.trusted = True

    def lose(self) -> None:
        self.trusted = False
