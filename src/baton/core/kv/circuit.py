"""The circuit breaker of a lower tier: a backend that fails or is slow is not called for a while.

    CLOSED --- failures_max in a row ---> OPEN --- its wait has ended --> HALF_OPEN (one probe)
      ^                                    ^                                |        |
      +------------- the probe succeeded --|--------------------------------+        |
                                           +--- it failed, or never came back: the wait doubles

`admit` returns a permit, or None: then the tier is not called and the request recomputes. A permit is a unique number that is
open until it ends, once: in `succeeded`, `failed` or `cancelled`. A second end of it changes nothing. All permits close when
the state changes: only the probe decides on an open circuit. A miss is a success, and so is a damaged object: the backend
answered.
"""

from __future__ import annotations

from itertools import count
from typing import Literal, NewType

from baton.config import CircuitConfig
from baton.protocol.ids import Instant

CircuitState = Literal["closed", "half_open", "open"]
"""Label values of the metric `baton:kv_circuit_state`."""

Permit = NewType("Permit", int)


class Circuit:
    __slots__ = ("_failures", "_numbers", "_permits", "_until", "_wait", "config", "fault", "opened_total", "state")

    def __init__(self, config: CircuitConfig) -> None:
        self.config = config
        self.state: CircuitState = "closed"
        self.opened_total = 0
        "Number of changes from closed to open: the metric `baton:kv_circuit_opened_total`."
        self.fault = ""
        "Text of the last failure."
        self._failures = 0
        self._wait = self.config.open_seconds
        self._until: Instant | None = None
        "Time of the next probe if open; deadline of the probe if half open."
        self._permits: dict[Permit, None] = {}
        "Permits of the present state that have not ended, the oldest first."
        self._numbers = count(1)

    @property
    def permits(self) -> int:
        """Number of open permits."""
        return len(self._permits)

    def admit(self, now: Instant) -> Permit | None:
        """Return a permit if the tier may be called now."""
        if self.state == "closed":
            return self._issue_permit()
        if self._until is None or now < self._until:
            return None
        if self.state == "half_open":
            self._open(now)  # the probe has no result
            return None
        self._change("half_open", Instant(now + self.config.probe_seconds_max))
        return self._issue_permit()

    def ended(self, permit: Permit, error: str | None, now: Instant) -> None:
        if error is None:
            self.succeeded(permit)
        else:
            self.failed(permit, now, error)

    def succeeded(self, permit: Permit) -> None:
        if not self._close_permit(permit):
            return
        self._failures = 0
        if self.state != "closed":
            self._wait = self.config.open_seconds
            self._change("closed", None)

    def failed(self, permit: Permit, now: Instant, fault: str = "it takes too long") -> None:
        if not self._close_permit(permit):
            return
        self.fault = fault
        self._failures += 1
        if self.state == "half_open":
            self._open(now)
        elif self._failures >= self.config.failures_max:
            self.opened_total += 1
            self._change("open", Instant(now + self._wait))

    def cancelled(self, permit: Permit, now: Instant) -> None:
        """Forget the call, which will never be answered for a reason unrelated to the backend. Another probe may be sent at
        once."""
        if self._close_permit(permit) and self.state == "half_open":
            self._change("open", now)

    def _issue_permit(self) -> Permit:
        """Open a permit. Beyond `permits_max` the oldest one is forgotten."""
        permit = Permit(next(self._numbers))
        self._permits[permit] = None
        if len(self._permits) > self.config.permits_max:
            del self._permits[next(iter(self._permits))]
        return permit

    def _close_permit(self, permit: Permit) -> bool:
        """End the permit. False: it had ended before, or was issued before the last change of state."""
        if permit not in self._permits:
            return False
        del self._permits[permit]
        return True

    def _open(self, now: Instant) -> None:
        self._wait = min(2 * self._wait, self.config.open_seconds_max)
        self._change("open", Instant(now + self._wait))

    def _change(self, state: CircuitState, until: Instant | None) -> None:
        self.state, self._until = state, until
        self._permits.clear()
        self._failures = 0

    def __repr__(self) -> str:
        return f"<Circuit {self.state}, {self._failures} failures in a row>"
