"""Whether an instance accepts requests. SERVING --pause--> DRAINING --drained--> PAUSED; resume leads back from both.

An order has a number, and its answer names that number: the caller waits for its own answer, not for a state that another
caller may cause or undo. A pause is done when the instance is paused, and overtaken when it is resumed before.

A pause may be held by a caller, who resumes at the end of a longer order: other weights. If that caller's session ends before,
the instance wakes and serves again.
"""

from __future__ import annotations

from baton.config import SchedulerConfig
from baton.core.effects import Effect, Mode, ModeChanged
from baton.core.events import Pause, Resume
from baton.errors import InvariantBroken
from baton.protocol.control import OrderAnswer, OrderOutcome
from baton.protocol.ids import Instant


class ServiceMode:
    __slots__ = ("_holder", "_pauses", "_pauses_max", "drain_deadline", "mode")

    def __init__(self, config: SchedulerConfig) -> None:
        self._pauses_max = config.pauses_max
        self.mode = Mode.SERVING
        self.drain_deadline: Instant | None = None
        "Time at which unfinished requests are ended."
        self._pauses: list[int] = []
        "Numbers of pause orders that are not answered yet."
        self._holder = ""
        "The caller that holds the pause. Empty: it lasts until an order to resume."

    def pause(self, event: Pause, now: Instant) -> list[Effect]:
        """Begin to drain, or join a drain in progress. The order is answered when the instance is paused."""
        effects: list[Effect] = []
        self._holder = ""
        if self.mode is Mode.SERVING:
            self.mode = Mode.DRAINING
            effects.append(ModeChanged(self.mode))
        if self.mode is Mode.DRAINING and event.drain_seconds_max is not None:
            self.drain_deadline = Instant(now + event.drain_seconds_max)
        if event.number is not None:
            if self.mode is Mode.PAUSED:
                effects.append(OrderAnswer(event.number, "done"))
            elif len(self._pauses) == self._pauses_max:
                effects.append(OrderAnswer(event.number, "refused"))
            else:
                self._pauses.append(event.number)
        return effects

    def hold(self, caller: str) -> None:
        """From now on the pause, if there is one, is held by this caller."""
        self._holder = "" if self.mode is Mode.SERVING else caller

    def is_held_by(self, caller: str) -> bool:
        return self._holder == caller != ""

    def resume(self, event: Resume) -> list[Effect]:
        effects = self._answer_pauses("overtaken")
        self._holder = ""
        self.drain_deadline = None
        if self.mode is not Mode.SERVING:
            self.mode = Mode.SERVING
            effects.append(ModeChanged(self.mode))
        if event.number is not None:
            effects.append(OrderAnswer(event.number, "done"))
        return effects

    def drained(self) -> list[Effect]:
        """End the drain, if there is one: the instance is idle and every drop is acknowledged."""
        if self.mode is not Mode.DRAINING:
            return []
        self.mode = Mode.PAUSED
        self.drain_deadline = None
        return [ModeChanged(self.mode), *self._answer_pauses("done")]

    def check(self) -> None:
        if len(self._pauses) > self._pauses_max:
            raise InvariantBroken(f"{len(self._pauses)} orders to pause wait", invariant=49)

    def _answer_pauses(self, outcome: OrderOutcome) -> list[Effect]:
        pauses, self._pauses = self._pauses, []
        return [OrderAnswer(number, outcome) for number in pauses]
