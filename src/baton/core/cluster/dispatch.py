"""Looks at the line, from its head on: who can be placed now?

Nobody overtakes a request that waits for room. One that waits for something of its own (a prefill instance that is less busy,
an instance that it may try again) is passed over, because others do not need that.
"""

from __future__ import annotations

from typing import Final

from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.placement import Choice, Placement, Shortage
from baton.core.cluster.trip import Trip
from baton.protocol.ids import Instant
from baton.protocol.output import OTHER_WEIGHTS
from baton.protocol.request import Refused

SKIPPED_MAX: Final = 16
"""Requests that are passed over in one look."""


class Dispatch:
    __slots__ = ("_coordinator", "_placement", "look_at")

    def __init__(self, coordinator: Coordinator, placement: Placement) -> None:
        self._coordinator = coordinator
        self._placement = placement
        self.look_at: Instant | None = None
        "When to look again, because somebody may be tried again then."

    def look(self) -> None:
        self.look_at = None
        line = self._coordinator.line
        if not len(line):
            return
        self._note_nobody()
        skipped: list[Trip] = []
        while (
            self._coordinator.clocks.nobody_since is None and len(skipped) <= SKIPPED_MAX and (trip := line.head()) is not None
        ):
            found = self._placement.place(trip, self._coordinator.now)
            if found is Shortage.ROOM:
                break
            if isinstance(found, Choice):
                self._place(trip, found)
            elif found is Shortage.NEVER:
                self._coordinator.turn_away(trip, trip.refused or self.never_fits(trip.tokens_max))
            else:
                line.set_aside(trip)
                skipped.append(trip)
        line.put_back(skipped)
        if len(line):
            self.look_at = self._next_chance(skipped)

    def never_fits(self, tokens: int) -> Refused:
        """With the numbers of the largest instance."""
        ready = [member.hello.ready for member in self._coordinator.membership.members.values()]
        size = ready[0].block_size
        limit = min(max(each.blocks for each in ready), max(each.context_tokens for each in ready) // size or 2**31)
        return Refused("never_fits", -(-(tokens - 1) // size), limit)

    def _place(self, trip: Trip, choice: Choice) -> None:
        if trip.identity not in (None, choice.home.hello.ready.identity) and not trip.untouched:
            self._coordinator.break_off(trip, "worker_gone", OTHER_WEIGHTS)
        else:
            self._coordinator.place(trip, choice)

    def _note_nobody(self) -> None:
        """Whether there is anybody decides how long those in line wait. One that is paused on purpose comes back."""
        coordinator = self._coordinator
        nobody = not coordinator.membership.usable(coordinator.now) and not coordinator.membership.all_paused
        if nobody != (coordinator.clocks.nobody_since is not None):
            coordinator.clocks.nobody_since = coordinator.now if nobody else None
            for trip in coordinator.line.trips():
                coordinator.clocks.arm(trip)

    def _next_chance(self, skipped: list[Trip]) -> Instant | None:
        now = self._coordinator.now
        times = [member.held_until for member in self._coordinator.membership.members.values() if member.held_until > now]
        times += [at for trip in skipped for at in trip.avoided.values() if at > now]
        return min(times, default=None)
