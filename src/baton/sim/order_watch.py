"""76: each order to sleep or to wake is answered once, with what is true.

"done" means for sleep that the worker has stopped, and for wake that one is ready. Sleep is refused to an instance that is not
paused, has no worker that is ready, or is being woken; wake, when no worker can be started. Both are refused if too many wait
already, and if the worker takes too long to stop, which only a clock that jumps ahead can pretend here.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.core.effects import Mode
from baton.core.events import Event, Sleep, Wake, WorkerStopped
from baton.core.instance import Instance
from baton.errors import InvariantBroken
from baton.protocol.control import OrderAnswer

LATE = "the worker has not ended in time"


class OrderWatch:
    __slots__ = ("_earned", "_machine", "_open", "_saw", "_stopped")

    def __init__(self, machine: Instance, saw: Callable[[str], None]) -> None:
        self._machine = machine
        self._saw = saw
        self._open: dict[int, type[Event]] = {}
        self._earned: dict[int, None] = {}
        "Open orders that may be refused."
        self._stopped = False
        "The worker that was last to stop has ended."

    def before(self, event: Event) -> None:
        if type(event) is WorkerStopped:
            self._stopped = True
        elif isinstance(event, (Sleep, Wake)) and event.number is not None:
            state = self._machine.worker.state.value
            waiting = sum(kind is type(event) for kind in self._open.values())
            self._open[event.number] = type(event)
            if type(event) is Wake:
                may = state != "gone"
            else:
                paused = self._machine.mode is Mode.PAUSED and state == "ready"
                may = (paused or state == "asleep") and Wake not in self._open.values()
                self._stopped &= state == "asleep"
            if not may or waiting >= self._machine.config.scheduler.sleep_orders_max:
                self._earned[event.number] = None

    def answered(self, answer: OrderAnswer) -> None:
        order = self._open.pop(answer.number, None)
        state = self._machine.worker.state.value
        if order is None:
            return  # to forget the cache
        earned = answer.number in self._earned or answer.detail == LATE or (order is Wake and state == "gone")
        self._earned.pop(answer.number, None)
        if answer.outcome == "done" and order is Wake:
            ok = state == "ready"
            self._saw("a woken instance has a worker again")
        elif answer.outcome == "done":
            ok = self._stopped
        else:
            ok = earned
        if not ok:
            raise InvariantBroken(f"order {answer.number}, {order.__name__}, is {answer.outcome}: {state}", invariant=76)

    def at_rest(self) -> None:
        if self._open:
            raise InvariantBroken(f"orders without an answer: {list(self._open)}", invariant=76)
