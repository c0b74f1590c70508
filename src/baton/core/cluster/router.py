"""A router as a machine: it owns a request from its arrival to its last end, whatever becomes of the instances.

    Arrive -> line -> placed on one instance, or on a pair -> Say(Emit) ... -> Deliver ... last end
              (line.py)  (placement.py)                       (delivery.py)

Who is there is membership.py; what becomes of a request is the table (handoff_table.py), carried out by coordinator.py.
This file turns events into facts of that table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from baton.config import RouterConfig
from baton.core.cluster.checks import check_router
from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.delivery import Delivery
from baton.core.cluster.dispatch import Dispatch
from baton.core.cluster.events import (
    Arrive,
    CloseDoor,
    ClusterEffect,
    ClusterEvent,
    HangUp,
    Join,
    Part,
    Resumed,
    RunPass,
    Say,
    SchedulePass,
    Tick,
    TurnAway,
    Withdraw,
)
from baton.core.cluster.handoff_table import TripState
from baton.core.cluster.member import Member
from baton.core.cluster.membership import Membership
from baton.core.cluster.placement import Placement
from baton.core.cluster.reports import Reports
from baton.core.cluster.stats import RouterStats
from baton.core.cluster.trip import Trip
from baton.core.cluster.withdrawal import Withdrawal
from baton.protocol.ids import BlockKey, Instant, RequestId
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateRequest, Refused

if TYPE_CHECKING:
    from random import Random


class Router:
    __slots__ = (
        "_alarms",
        "_config",
        "_delivery",
        "_dispatch",
        "_handlers",
        "_hearers",
        "_numbers",
        "_placement",
        "_withdrawal",
        "closing",
        "coordinator",
        "membership",
        "pass_scheduled",
        "stats",
    )

    def __init__(self, config: RouterConfig, rng: Random) -> None:
        self._config = config
        self.stats = RouterStats()
        self.membership = Membership(config)
        trips: dict[RequestId, Trip] = {}
        self._placement = Placement(config, self.membership, rng)
        self.coordinator = Coordinator(config, self.membership, self._placement, trips, self.stats)
        self._alarms = self.coordinator.clocks.alarms
        self._delivery = Delivery(self.coordinator, self._placement)
        self._dispatch = Dispatch(self.coordinator, self._placement)
        self._withdrawal = Withdrawal(config, self.coordinator)
        self._hearers = Reports(config, self.coordinator, self._withdrawal).hearers | {Emit: self._delivery.take}
        self._numbers = count()
        self.pass_scheduled = False
        self._placement.on_cached = self._on_cached
        self.closing = False
        self._handlers: dict[type[ClusterEvent], Callable[[Any], bool]] = {
            Arrive: self._on_arrive,
            Withdraw: self._on_withdraw,
            Join: self._on_join,
            Part: self._on_part,
            Say: self._on_say,
            CloseDoor: self._on_close_door,
            Tick: self._on_tick,
            RunPass: self._on_run_pass,
            Resumed: self._on_resumed,
        }

    # The machine

    def handle(self, event: ClusterEvent, now: Instant) -> list[ClusterEffect]:
        coordinator = self.coordinator
        if now > coordinator.now:  # a clock may go backwards; time here does not
            coordinator.now = now
        if self._handlers[type(event)](event):
            coordinator.dirty = True
        if coordinator.dirty and len(coordinator.line) and not self.pass_scheduled:
            self.pass_scheduled = True
            coordinator.effects.append(SchedulePass())
        effects, coordinator.effects = coordinator.effects, []
        return effects

    def next_deadline(self) -> Instant | None:
        deadline = self._alarms.next_deadline()
        for other in (self.membership.next_deadline(), self._dispatch.look_at):
            if other is not None and (deadline is None or other < deadline):
                deadline = other
        return deadline

    def check(self) -> None:
        check_router(self._config, self.coordinator)

    # The queue

    def _on_run_pass(self, event: RunPass) -> bool:
        """One pass for all that happened in a turn of the event loop."""
        self.pass_scheduled = False
        self._run_pass()
        return False

    def _run_pass(self) -> None:
        self.coordinator.dirty = False
        self._dispatch.look()

    def _on_cached(self, keys: Sequence[BlockKey]) -> None:
        if self.coordinator.line.on_cached(keys):
            self.coordinator.dirty = True

    # Questions

    @property
    def idle(self) -> bool:
        """Nobody is owed anything, and no instance has anything of a request."""
        return not self.coordinator.trips

    @property
    def open_requests(self) -> int:
        return len(self.coordinator.trips)

    @property
    def queued(self) -> int:
        """Sequences in line."""
        return self.coordinator.line.sequences

    @property
    def handoff_seconds(self) -> float:
        """What a hand-off is expected to take, beside the computing."""
        return self._placement.handoff_seconds

    # Clients

    def _on_arrive(self, event: Arrive) -> bool:
        request = event.request
        self.stats.arrived += 1
        refused = self._refusal(request)
        if refused is not None:
            self.stats.turned_away[refused.reason] += 1
            self.coordinator.effects.append(TurnAway(request.id, refused, self.coordinator.retry_seconds(refused)))
            return False
        now = self.coordinator.now
        priority = request.priority if self._config.order == "priority" else 0
        order = (priority, now - request.age_seconds, next(self._numbers))
        self.coordinator.begin(Trip(request, order, now))
        return True

    def _refusal(self, request: GenerateRequest) -> Refused | None:
        config, coordinator = self._config, self.coordinator
        if self.closing:
            return Refused("draining")
        if request.id in self.coordinator.trips:
            return Refused("duplicate_id")
        if mode := self.membership.all_paused:
            return Refused("draining" if mode == "draining" else "paused")
        if len(self.coordinator.trips) >= config.requests_open_max:
            return Refused("queue_full", len(self.coordinator.trips) + 1, config.requests_open_max)
        tokens = len(request.prompt) + request.sampling.max_tokens
        if not self.membership.any_could(tokens, ()) and not self.membership.lost_could(tokens, (), coordinator.now):
            return self._dispatch.never_fits(tokens)
        refused = coordinator.line.refusal(request)
        if refused is not None and coordinator.dirty:  # those in the queue may only wait for the end of this turn
            self._run_pass()
            refused = coordinator.line.refusal(request)
        return refused

    def _on_withdraw(self, event: Withdraw) -> bool:
        trip = self.coordinator.trips.get(event.request)
        if trip is not None:
            self._withdrawal.withdraw(trip, [index for index in trip.open if event.index in (None, index)], event.reason)
        return trip is not None

    def _on_close_door(self, event: CloseDoor) -> bool:
        self.closing = True
        return False

    # Instances

    def _on_join(self, event: Join) -> bool:
        hello, now = event.hello, self.coordinator.now
        self.membership.knock(now)
        why = self.membership.misfit(hello, now)
        if why:  # also where it has the name of one that is here: a stranger drives nobody out
            self.stats.instances_refused += 1
            self.membership.refuse(hello)
            self.coordinator.effects.append(HangUp(event.session, why))
            return True
        earlier = self.membership.names.get(hello.name)
        if earlier is not None and (why := self.membership.name_taken(earlier, hello, now)):
            self.stats.instances_refused += 1
            self.coordinator.effects.append(HangUp(event.session, why))
            return True
        if earlier is not None:
            self._lose(earlier, "joined_again", f"{hello.name} has joined again")
        self.membership.join(event.session, hello, now)
        return True

    def _on_part(self, event: Part) -> bool:
        member = self.membership.members.get(event.session)
        if member is not None:
            how = "reloaded" if event.reloaded else "session_over" if member.mode == "serving" else "left"
            self._lose(member, how)
        return True

    def _lose(self, member: Member, how: str, hang_up: str = "") -> None:
        """Out of the list first: nothing that follows from the loss is placed there."""
        self.coordinator.dirty = True
        self.membership.remove(member, self.coordinator.now, reloaded=how == "reloaded")
        self.stats.instances_lost += how != "reloaded"
        self.stats.losses[how] += how != "reloaded"
        if hang_up:
            self.coordinator.effects.append(HangUp(member.session, hang_up))
        self.coordinator.lose(member)

    def _on_say(self, event: Say) -> bool:
        member = self.membership.hear(event.session, self.coordinator.now)
        hearer = self._hearers.get(type(event.message))
        if member is None or hearer is None:  # of a session that is over, or nothing that an instance should say
            self.stats.late_facts += 1
            return False
        if member.place is None and self.membership.roster.update(member, self.coordinator.now):
            self.coordinator.dirty = True  # it was silent
        changed = hearer(member, event.message)
        if member.overdrawn:
            self.coordinator.begun(member)
        return changed

    # Time

    def _on_resumed(self, event: Resumed) -> bool:
        """Heartbeats that were due meanwhile are unread, or come soon; until then nothing has changed."""
        self.membership.renew(self.coordinator.now)
        return False

    def _on_tick(self, event: Tick) -> bool:
        """Deadlines are looked at only here: after a pause of the whole process what was waited for may be here, unread,
        behind other news (runtime/driver.py)."""
        for member in self.membership.silent(self.coordinator.now):
            self._lose(member, "silent", f"nothing was heard of it for {self._config.lapse_seconds:g} s")
        for member in self.membership.stalled(self.coordinator.now):
            self._move_from(member)
        for _ in TripState:  # one that comes back to the queue may have waited there for too long already
            for trip in self._alarms.due(self.coordinator.now):
                self._on_alarm(trip)
        look_at = self._dispatch.look_at
        if look_at is not None and look_at <= self.coordinator.now:
            self._dispatch.look_at = None
            return True
        return False

    def _move_from(self, member: Member) -> None:
        """Its worker stands still while it speaks: what others could go on with goes to them, as after a loss. What nobody else
        could take waits. A prompt that is computed needs no worker any more to be released.

        One that was moved before and has got no token since may be what workers stop at, or was beside it: it stays, and the
        instance finds out (core/engine/recovery.py). So nothing makes one instance after the other stand still."""
        self.membership.roster.refresh(self.coordinator.now)
        for trip in self.coordinator.trips_at(member):
            computed = trip.state is TripState.HANDING and trip.prefill is member
            suspect = trip.moved_at == trip.progress
            if not computed and not suspect and self._placement.roles(trip) is not None:
                trip.moved_at = trip.progress
                self.stats.moved += 1
                self.coordinator.break_leg(trip, member)

    def _on_alarm(self, trip: Trip) -> None:
        coordinator, now = self.coordinator, self.coordinator.now
        if trip.state is TripState.DONE:
            return
        if trip.timeout_at is not None and trip.timeout_at <= now:
            trip.timeout_at = None
            self._withdrawal.withdraw(trip, list(trip.open), FinishReason.TIMEOUT)
        elif trip.withdraw_by is not None and trip.withdraw_by <= now:
            self._withdrawal.lapse(trip)
        elif trip.deadline <= now:
            self._on_lapse(trip)
        elif trip.renew_at is not None and trip.renew_at <= now:
            coordinator.renew(trip)
        coordinator.clocks.arm(trip)

    def _on_lapse(self, trip: Trip) -> None:
        """What its state waits for has not come."""
        coordinator, config = self.coordinator, self._config
        if trip.state is TripState.QUEUED:
            if coordinator.clocks.nobody_since is not None:
                coordinator.turn_away(trip, Refused("worker_gone"))
            else:
                coordinator.turn_away(trip, Refused("queue_full", coordinator.line.sequences, config.queue_requests_max))
            return
        if trip.state is TripState.SERVING and trip.progress != trip.mark:
            coordinator.clocks.heard(trip, coordinator.now)
            return
        coordinator.break_leg(trip, trip.prefill if trip.state is TripState.PREFILLING else trip.home)
