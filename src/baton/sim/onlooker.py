"""The observer of a worker process: the watch of a plain instance (instance_watch.py), or of one in a cluster (plans.py)."""

from __future__ import annotations

from typing import Protocol

from baton.protocol.ids import BlockId
from baton.sim.scenario import Client


class Onlooker(Protocol):
    def saw(self, what: str) -> None:
        """Record a rare state that was reached."""

    def happened(self, kind: str) -> None:
        """Record a fault that strikes now (excuses.py)."""

    def client_of(self, slot: int, incarnation: int) -> Client:
        """The client whose request has the slot."""

    def worker_dies(self) -> None:
        """Record the death of the process; the instance does not know yet."""

    def poisoned(self, client: Client | None) -> None:
        """Record that a worker died of this client's request, or of none."""


class PlansSeen(Protocol):
    """Record of the plans that were sent to a worker."""

    @property
    def rows(self) -> int: ...

    def last_use(self, block: BlockId) -> int:
        """The last step that was planned to read or write the block."""
