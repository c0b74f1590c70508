"""Sessions between instances and routers, as runtime/wire/link.py gives them: messages come in order and once, or it is over.

    instance  --up-->    router        each direction is a queue; a message takes its time, and never overtakes another
          <--down--

What goes wrong belongs to the *path* (a stall: nothing gets through, in one direction or both, also in the next session) or to
one session (a cut: what arrives later than a moment is lost, in both directions, and a side may be told late or never). What
was sent before a cut may come after the next session has begun: whoever gets it must know that it is of an earlier one.
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
    """The last thing that comes out of a session: the other side has closed it, or the network has."""


HANGUP = Hangup()


class Party(Protocol):
    """One end of sessions."""

    def arrived(self, wire: Wire, message: Any) -> None:
        """HANGUP: nothing more comes."""


class Path:
    """Between one instance and one router, whatever session they have."""

    __slots__ = ("stalled_until",)

    def __init__(self) -> None:
        self.stalled_until: dict[Direction, float] = {"up": 0.0, "down": 0.0}


class Wire:
    """One session."""

    __slots__ = ("_last", "_lost_after", "_queues", "_wires", "instance", "number", "open", "path", "router")

    def __init__(self, wires: Wires, number: Session, instance: Party, router: Party, path: Path) -> None:
        self._wires = wires
        self.number = number
        self.instance = instance
        self.router = router
        self.path = path
        self.open = True
        "What is sent gets on its way."
        self._queues: dict[Direction, deque[Any]] = {"up": deque(), "down": deque()}
        self._last: dict[Direction, float] = {"up": 0.0, "down": 0.0}
        self._lost_after: dict[Direction, float] = {"up": inf, "down": inf}

    def send(self, direction: Direction, message: Any) -> None:
        if self.open:
            self._post(direction, self._wires.over_the_wire(message))

    def close(self, direction: Direction, *, in_order: bool = True) -> None:
        """By the side that sends in this direction. Not in order, as when a process dies: what is under way may be lost."""
        if not self.open:
            return
        if not in_order:
            self._lost_after[direction] = self._wires.now + self._wires.delay()
        self._post(direction, HANGUP)
        self.open = False

    def cut(self, seconds: float, *, unseen: bool) -> None:
        """By the network. What arrives within these seconds still arrives."""
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

    def _post(self, direction: Direction, message: Any) -> None:
        self._queues[direction].append(message)
        arrival = max(self._last[direction], self._wires.now + self._wires.delay())
        self._last[direction] = arrival
        self._wires.timeline.at(arrival, self._arrive, direction)

    def _arrive(self, direction: Direction) -> None:
        """The next one of the queue, whichever entry of the heap this is: order is kept."""
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
        "Messages that did not arrive."
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

    def open(self, instance: Party, router: Party, path: Path) -> Wire:
        return Wire(self, Session(next(self._sessions)), instance, router, path)

    def stall(self, path: Path, seconds: float, *directions: Direction) -> None:
        for direction in directions:
            path.stalled_until[direction] = max(path.stalled_until[direction], self.now + seconds)

    @property
    def flow(self) -> bool:
        """Nothing is held up."""
        return all(until <= self.now for path in self._paths.values() for until in path.stalled_until.values())

    def heal(self) -> None:
        """What is held up comes at the times that it was promised for; nothing new is."""
        self._jitter = min(self._jitter, 1.0)

    def over_the_wire(self, message: Any) -> Any:
        """27: in a tenth of the seeds through the codec."""
        if self._seed % 10:
            return message
        received = decode(encode(message))
        if received != message:
            raise InvariantBroken(f"{type(message).__name__} is not what was sent", invariant=27)
        return received
