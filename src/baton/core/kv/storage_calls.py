"""Storage calls in progress: decides whether one may be sent, when storage is late, and when a call will never return.

    sent      its circuit gave a permit, which is open until the call ends or is late
    late      a query or fetch is not answered storage_seconds_max after it was sent: storage has failed, which is counted
              once however many requests wait for it. A query ends there, because it holds nothing. A request with less
              patience gives up by itself (engine/loading.py), which is no failure of storage
    overdue   even if one thread of the service did all calls, one after the other, and each took its longest time, this
              one would have ended. Its thread is stuck. It may write to its host blocks at any time, so they are free only
              when the service is dead: it is replaced (Tiers.hangs)

Reads and writes have separate circuits: storage that is full or read-only can still be read.
"""

from __future__ import annotations

from baton.config import TierConfig
from baton.core.deadlines import Deadlines
from baton.core.kv.circuit import Circuit, Permit
from baton.core.kv.move import PUT_PATIENCE, Move, Pending
from baton.protocol.ids import Instant


class StorageCalls:
    __slots__ = ("_config", "_late", "_out", "_owed", "read_circuit", "write_circuit")

    def __init__(self, config: TierConfig) -> None:
        self._config = config
        self.read_circuit, self.write_circuit = Circuit(config.circuit), Circuit(config.circuit)
        self._out: dict[Pending, int] = {}
        "Longest time of each call, in units of storage_seconds_max."
        self._owed = 0
        "Sum of the values of `_out`."
        self._late: Deadlines[Pending] = Deadlines()

    def __len__(self) -> int:
        return len(self._out)

    def begin(self, pending: Pending, permit: Permit, now: Instant) -> Instant:
        """Record a sent call and return when it is overdue."""
        put = isinstance(pending, Move) and pending.kind == "put"
        pending.permit = permit
        self._out[pending] = units = int(PUT_PATIENCE) if put else 1
        self._owed += units
        if not put:  # puts wait for each other in the service, and no request waits for them
            self._late.set(pending, Instant(now + self._config.storage_seconds_max))
        return Instant(now + self._owed * self._config.storage_seconds_max + self._config.memory_seconds_max)

    def ended(self, pending: Pending, error: str | None, now: Instant) -> None:
        """Record an answer of storage, or of the service for it. A late call was counted as failed before."""
        if pending.permit is not None:
            self._circuit(pending).ended(pending.permit, error, now)
        self._forget(pending)

    def next_late(self) -> Instant | None:
        return self._late.earliest

    def late(self, now: Instant) -> list[Pending]:
        """Return the calls that are late now, each once."""
        passed = self._late.due(now)
        for pending in passed:
            self.failed(pending, now)
        return passed

    def failed(self, pending: Pending, now: Instant) -> None:
        """Count a failure: storage has not answered in time."""
        if pending.permit is not None:
            self._circuit(pending).failed(pending.permit, now)
            pending.permit = None

    def abandon(self, pending: Pending) -> None:
        """Stop waiting for a late call."""
        self._forget(pending)

    def clear(self, now: Instant) -> None:
        """Forget all calls: the service is dead. That is no failure of storage."""
        for pending in list(self._out):
            if pending.permit is not None:
                self._circuit(pending).cancelled(pending.permit, now)
            self._forget(pending)

    def _circuit(self, pending: Pending) -> Circuit:
        put = isinstance(pending, Move) and pending.kind == "put"
        return self.write_circuit if put else self.read_circuit

    def _forget(self, pending: Pending) -> None:
        pending.permit = None
        self._owed -= self._out.pop(pending, 0)
        self._late.discard(pending)
