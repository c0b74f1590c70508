"""Sessions between instances and routers, as of runtime/wire/link.py: messages arrive in order and once, or the session ends.

    instance  --up-->    router        each direction is a queue; a message takes its time, and never overtakes another
          <--down--

Faults strike the *path* (a stall: nothing gets through, in one direction or both, also in the next session) or one session (a
cut: messages that would arrive later than a moment are lost, in both directions, and a side may notice late or never).
Messages sent before a cut may arrive after the next session has begun: the receiver must see that their session has ended.
"""

from __future__ import annotations

from collections import deque
from itertools import count
from math import inf
from typing import Any, Literal, Protocol

from baton.core.cluster.events import Session
from baton.errors import InvariantBroken
from baton.protocol.codec import decode, encode
from baton.sim.noise import noise
from baton.sim.timeline import Timeline

Direction = Literal["up", "down"]


class Hangup:
    """Last message of a session: the other side has closed it, or the network has."""


HANGUP = Hangup()


class SessionEnd(Protocol):
    """One end of sessions: an instance or a router."""

    def arrived(self, wire: Wire, message: Any) -> None:
        """Receive a message. HANGUP: nothing more comes."""


class Path:
    """The network between an instance and a router, which outlives their sessions."""

    __slots__ = ("stalled_until",)

    def __init__(self) -> None:
        self.stalled_until: dict[Direction, float] = {"up": 0.0, "down": 0.0}


class Wire:
    """A session."""

    __slots__ = ("_last", "_lost_after", "_queues", "_wires", "instance", "number", "open", "path", "router")

    def __init__(self, wires: Wires, number: Session, instance: SessionEnd, router: SessionEnd, path: Path) -> None:
        self._wires = wires
        self.number = number
        self.instance = instance
        self.router = router
        self.path = path
        self.open = True
        "Whether neither side has closed the session, and the network has not cut it."
        self._queues: dict[Direction, deque[Any]] = {"up": deque(), "down": deque()}
        self._last: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self._lost_after: dict[Direction, float] = {"up": inf, "down": inf}

    def send(self, direction: Direction, message: Any) -> None:
        if self.open:
            self._post(direction, self._wires.over_the_wire(message))

    def send_along(self, direction: Direction, message: Any) -> None:
        """Send right behind the last message: both arrive at the same time."""
        if self.open:
            self._post(direction, self._wires.over_the_wire(message), along=True)

    def close(self, direction: Direction, *, in_order: bool = True) -> None:
        """Close the session, by the side that sends in this direction. Not `in_order` (the process dies): messages in flight
        may be lost."""
        if not self.open:
            return
        if not in_order:
            self._lost_after[direction] = self._wires.now + self._wires.delay()
        self._post(direction, HANGUP)
        self.open = False

    def cut(self, seconds: float, *, unseen: bool) -> None:
        """End the session by a network fault. Messages due within `seconds` still arrive."""
        if not self.open:
            return
        end = self._wires.now + seconds
        directions: tuple[Direction, ...] = ("up", "down")
        for direction in directions:
            self._lost_after[direction] = end
            if not unseen:
                self._last[direction] = max(self._last[direction], end)
                self._post(direction, HANGUP)
        self.open = False

    def _post(self, direction: Direction, message: Any, *, along: bool = False) -> None:
        self._queues[direction].append(message)
        arrival = self._last[direction] if along else max(self._last[direction], self._wires.now + self._wires.delay())
        self._last[direction] = arrival
        self._wires.timeline.at(arrival, self._arrive, direction)

    def _arrive(self, direction: Direction) -> None:
        """Deliver the head of the queue, whichever heap entry this is: order is kept."""
        timeline = self._wires.timeline
        until = self.path.stalled_until[direction]
        if timeline.now < until:
            timeline.at(until, self._arrive, direction)
            return
        message = self._queues[direction].popleft()
        if timeline.now > self._lost_after[direction] and message is not HANGUP:
            self._wires.lost += 1
            return
        (self.router if direction == "up" else self.instance).arrived(self, message)


class Wires:
    def __init__(self, timeline: Timeline, seed: int, delay: float, jitter: float) -> None:
        self.timeline = timeline
        self.lost = 0
        "Number of messages that did not arrive."
        self._seed = seed
        self._delay = delay
        self._jitter = jitter
        self._sent = 0
        self._sessions = count(1)
        self._paths: dict[tuple[int, int], Path] = {}

    @property
    def now(self) -> float:
        return self.timeline.now

    def delay(self) -> float:
        self._sent += 1
        return self._delay * (1.0 + self._jitter * noise(self._seed, 3_000_000 + self._sent))

    def path(self, instance: int, router: int) -> Path:
        return self._paths.setdefault((instance, router), Path())

    def open(self, instance: SessionEnd, router: SessionEnd, path: Path) -> Wire:
        return Wire(self, Session(next(self._sessions)), instance, router, path)

    def stall(self, path: Path, seconds: float, *directions: Direction) -> None:
        for direction in directions:
            path.stalled_until[direction] = max(path.stalled_until[direction], self.now + seconds)

    @property
    def flow(self) -> bool:
        """Whether no path is stalled."""
        return all(until <= self.now for path in self._paths.values() for until in path.stalled_until.values())

    def heal(self) -> None:
        """Bound the jitter. Stalls end at their given times."""
        self._jitter = min(self._jitter, 1.0)

    def over_the_wire(self, message: Any) -> Any:
        """27: in a tenth of the seeds, encode and decode the message."""
        if self._seed % 10:
            return message
        received = decode(encode(message))
        if received != message:
            raise InvariantBroken(f"{type(message).__name__} is not what was sent", invariant=27)
        return received
