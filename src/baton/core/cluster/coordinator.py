"""Carries out the table of a trip (handoff_table.py): who has which part of it, what they are told, and when to look.

`advance(trip, fact)` is the only way a trip's state changes. Books that go with a state are kept here too: the line, the
legs of each instance and what it was charged; clocks.py has the deadlines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from baton.config import RouterConfig
from baton.core.cluster.choice import Choice
from baton.core.cluster.clocks import Clocks
from baton.core.cluster.events import BreakOff, ClusterEffect, Deliver, Tell, ToInstance, TurnAway
from baton.core.cluster.handoff_table import HANDED_OFF, LATE, NEXT, OUTCOMES, TripAction, TripFact, TripState
from baton.core.cluster.line import Line
from baton.core.cluster.member import Member
from baton.core.cluster.membership import Membership
from baton.core.cluster.placement import Placement
from baton.core.cluster.stats import RouterStats
from baton.core.cluster.trip import Trip
from baton.errors import InvariantBroken
from baton.protocol.handoff import AskRelease, Expect, Forget, Offer, PeerOffer, Prefill, Released
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import Emit, Ended, EndError
from baton.protocol.request import FinishReason, Refused

TO_COMPUTE: Final = (TripState.RESERVING, TripState.PREFILLING)
"""While a prefill instance has its prompt before it."""
WAITED_LEARNING: Final = 0.125
RETRY_SECONDS_MIN: Final = 1.0
RETRY_SECONDS_MAX: Final = 60.0
KEEP_MARGIN_SECONDS: Final = 2.0
"""A prompt is kept longer than decode may take to copy it."""


class Coordinator:
    __slots__ = (
        "_actions",
        "_config",
        "_placement",
        "clocks",
        "dirty",
        "effects",
        "line",
        "membership",
        "now",
        "stats",
        "trips",
        "waited_seconds",
    )

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        placement: Placement,
        trips: dict[RequestId, Trip],
        stats: RouterStats,
    ) -> None:
        """`trips`: all that are open. They are begun and ended here, and looked up by others."""
        self._config = config
        self._placement = placement
        self.membership = membership
        self.stats = stats
        self.trips = trips
        self.line = Line(config)
        self.clocks = Clocks(config)
        self.effects: list[ClusterEffect] = []
        self.now = Instant(0.0)
        self.dirty = False
        "Something has changed since the last placement pass, so that requests in the queue may have a better chance."
        self.waited_seconds = 0.0
        "How long newcomers wait in line, of late."
        self._actions: dict[TripAction, Callable[[Trip, Any], None]] = {
            TripAction.SEND: self._send,
            TripAction.EXPECT: self._expect,
            TripAction.PREFILL: self._prefill,
            TripAction.PASS_OFFER: self._pass_offer,
            TripAction.PASS_ASK: self._pass_ask,
            TripAction.PASS_RELEASE: self._pass_release,
            TripAction.DENY_RELEASE: self._deny_release,
            TripAction.FORGET_PREFILL: self._forget_prefill,
            TripAction.FORGET_HOME: self._forget_home,
            TripAction.COUNT_LOSS: self._count_loss,
            TripAction.REQUEUE: self._requeue,
        }

    # A trip's life

    def begin(self, trip: Trip) -> None:
        self.trips[trip.id] = trip
        self.line.join(trip)
        self.dirty = True
        self.clocks.arm(trip)

    def place(self, trip: Trip, choice: Choice) -> None:
        """It is the next one, and this is who gets it."""
        trip.identity = choice.home.hello.ready.identity
        trip.mark, trip.base = trip.progress, len(trip.open[trip.leader])
        trip.waited_for_lost = False
        if trip.first:
            self.waited_seconds += WAITED_LEARNING * (self.now - trip.begun - self.waited_seconds)
        home, prefill = choice.home, choice.prefill
        trip.home = home
        home.legs[trip.id] = None
        home.sequences += len(trip.open)
        home.slots_since -= len(trip.open)
        home.blocks_since -= choice.blocks
        self.membership.roster.touch(home)
        if prefill is None:
            home.tokens_since += choice.uncached
            if choice.waits:
                home.overdrawn[trip.id] = trip.order
            self.stats.whole += 1
            self.advance(trip, TripFact.PLACED_WHOLE)
        else:
            trip.prefill, trip.source = prefill, prefill.session
            trip.copied = trip.denied = False
            prefill.legs[trip.id] = None
            trip.prompt_tokens = choice.uncached
            prefill.prompts += 1
            prefill.prompt_tokens += choice.uncached
            prefill.tokens_since += choice.uncached
            self.membership.roster.touch(prefill)
            self.advance(trip, TripFact.PLACED_PAIR)

    def advance(self, trip: Trip, fact: TripFact, message: Offer | Released | None = None) -> None:
        before = trip.state
        if (before, fact) in LATE:
            self.stats.late_facts += 1
            return
        following = NEXT.get((before, fact))
        if following is None:
            raise InvariantBroken(f"{trip!r}: {fact.value} is not in the table", invariant=36)
        trip.state, actions = following
        if before in TO_COMPUTE and trip.state not in TO_COMPUTE and trip.prefill is not None:
            self._prompt_over(trip, trip.prefill)
        if before is TripState.QUEUED:
            self.line.leave(trip)
        if fact is TripFact.BROKEN:
            self.stats.broken += 1
        if before in HANDED_OFF and trip.state not in HANDED_OFF:
            in_vain = fact is TripFact.ADOPTED and not trip.copied
            self.stats.handoff_ends["not_copied" if in_vain else OUTCOMES[fact]] += 1
        self._measure(trip, before)
        self.clocks.set(trip, before, fact, self.now)
        for action in actions:
            self._actions[action](trip, message)
        if trip.state is TripState.DONE:
            self._detach_prefill(trip)
            self._detach_home(trip)
            self.clocks.alarms.clear(trip)
            self.trips.pop(trip.id, None)
        else:
            self.clocks.arm(trip)

    def _prompt_over(self, trip: Trip, prefill: Member) -> None:
        """It is computed, or no longer wanted."""
        prefill.prompts -= 1
        prefill.prompt_tokens -= trip.prompt_tokens
        self._has_room(prefill)

    def _has_room(self, member: Member) -> None:
        """More than before: requests in the queue may have a chance."""
        self.membership.roster.touch(member)
        self.dirty = True

    def begun(self, member: Member) -> None:
        """Something came from it. Those that waited there for room and have a token now do not wait any more."""
        for request in list(member.overdrawn):
            trip = self.trips.get(request)
            if trip is None or trip.home is not member or trip.progress != trip.mark:
                del member.overdrawn[request]
                self._has_room(member)

    def _measure(self, trip: Trip, before: TripState) -> None:
        """What the hand-off costs beside the computing: asking for room, and from the last computed block to the adoption."""
        match before, trip.state:
            case (TripState.QUEUED, TripState.RESERVING) | (TripState.PREFILLING, TripState.HANDING):
                trip.asked_at = self.now
            case TripState.RESERVING, TripState.PREFILLING:
                trip.handoff_seconds = self.now - trip.asked_at
            case TripState.HANDING, TripState.SERVING if trip.copied:
                self.stats.handoffs += 1
                self._placement.measured(trip.handoff_seconds + self.now - trip.asked_at)

    # Actions

    def _send(self, trip: Trip, _: object) -> None:
        self._tell(trip.home, trip.replay(self.now))
        self._remember(trip.home, trip)

    def _expect(self, trip: Trip, _: object) -> None:
        self._tell(trip.home, Expect(trip.for_decode(self.now), self._config.lease_seconds))

    def renew(self, trip: Trip) -> None:
        """Prefill takes its time: decode shall keep the room."""
        self.clocks.renewed(trip, self.now)
        self._expect(trip, None)
        self.clocks.arm(trip)

    def _prefill(self, trip: Trip, _: object) -> None:
        keep = self._config.handing_seconds_max + KEEP_MARGIN_SECONDS
        self._tell(trip.prefill, Prefill(trip.for_prefill(self.now), keep))
        self._remember(trip.prefill, trip)

    def _pass_offer(self, trip: Trip, offer: Offer) -> None:
        outputs = tuple(trip.open[trip.leader]) if offer.last else ()
        if not offer.last:  # this renews the lease too
            self.clocks.renewed(trip, self.now)
        if trip.prefill is not None:
            self._tell(trip.home, PeerOffer(offer, trip.prefill.hello.peers, outputs))

    def _pass_ask(self, trip: Trip, _: object) -> None:
        if trip.prefill is None:
            self._deny_release(trip, None)
        else:
            self._tell(trip.prefill, AskRelease(trip.id, trip.attempt))

    def _pass_release(self, trip: Trip, released: Released) -> None:
        """Either way prefill has nothing of it any more."""
        trip.denied |= not released.kept
        self._tell(trip.home, released)
        self._detach_prefill(trip)

    def _deny_release(self, trip: Trip, _: object) -> None:
        trip.denied = True
        self._tell(trip.home, Released(trip.id, trip.attempt, kept=False))
        self._detach_prefill(trip)

    def _forget_prefill(self, trip: Trip, _: object) -> None:
        if trip.prefill is not None:
            self._tell(trip.prefill, Forget(trip.id, trip.attempt))
            self._detach_prefill(trip)
        if trip.state is TripState.SERVING:
            self._remember(trip.home, trip)

    def _forget_home(self, trip: Trip, _: object) -> None:
        if trip.home is not None:
            self._tell(trip.home, Forget(trip.id, trip.attempt))
            self._detach_home(trip)

    def _count_loss(self, trip: Trip, _: object) -> None:
        trip.losses += 1

    def _requeue(self, trip: Trip, _: object) -> None:
        """The next attempt. What is over already is told here, because nobody else can."""
        trip.withdraw_by = None
        self._detach_prefill(trip)
        self._detach_home(trip)
        trip.attempt += 1
        trip.first = False
        self.line.join(trip)
        self.dirty = True
        self.end(trip, trip.over())
        if not trip.open:
            self.advance(trip, TripFact.CLOSED)
        elif trip.losses > self._config.migrations_max:
            self.break_off(trip, "worker_gone", f"{trip.losses} instances were lost or failed while they had this request")
        else:
            self.stats.retries += 1

    # Ends

    def end(self, trip: Trip, over: list[tuple[int, FinishReason]]) -> None:
        """Ends that the router tells by itself. The state stays as it is."""
        ended: list[Ended] = []
        for index, reason in over:
            self.sequence_over(trip, index)
            ended.append(trip.end(index, reason))
        if ended:
            self.effects.append(Deliver(Emit([], ended)))

    def break_off(self, trip: Trip, error: EndError, detail: str) -> None:
        self.stats.broken_off[error] += 1
        self.effects.append(BreakOff(trip.id, error, detail))
        self.advance(trip, TripFact.CLOSED)

    def turn_away(self, trip: Trip, refused: Refused) -> None:
        """Whoever was told something gets an error instead."""
        if not trip.untouched:
            self.break_off(trip, "worker_gone", f"no instance goes on with the request: {refused}")
            return
        self.stats.turned_away[refused.reason] += 1
        self.effects.append(TurnAway(trip.id, refused, self.retry_seconds(refused)))
        self.advance(trip, TripFact.CLOSED)

    def retry_seconds(self, refused: Refused) -> float:
        """When it may be worth trying again: those that were placed lately waited so long."""
        if refused.reason == "worker_gone":
            return self._config.no_instance_seconds
        return min(max(self.waited_seconds, RETRY_SECONDS_MIN), RETRY_SECONDS_MAX)

    def sequence_over(self, trip: Trip, index: int) -> None:
        """Books of a sequence that is about to leave `trip.open`."""
        home = trip.home
        if trip.state is TripState.QUEUED:
            self.line.resize(trip, 1)
        elif home is not None:
            home.sequences -= 1
            home.slots_since += 1
            tokens = len(trip.open[index]) + (len(trip.request.prompt) if len(trip.open) == 1 else 0)
            home.blocks_since += tokens // home.hello.ready.block_size
            self._has_room(home)

    def break_leg(self, trip: Trip, member: Member | None, *, leaves: bool = False) -> None:
        """The instance does not do what it should, or leaves. Another attempt, elsewhere."""
        if member is not None:
            trip.avoid(member.name, Instant(self.now + self._config.again_seconds), self.now)
        self.stats.left += leaves
        self.advance(trip, TripFact.LEFT if leaves else TripFact.BROKEN)

    def lose(self, member: Member) -> None:
        """It is gone. What it had goes on elsewhere."""
        for trip in self.trips_at(member):
            trip.avoid(member.name, Instant(self.now + self._config.again_seconds), self.now)
            self.advance(trip, TripFact.HOME_LOST if trip.home is member else TripFact.PREFILL_LOST)
        if member.legs:
            raise InvariantBroken(f"{member!r} is gone and has something", invariant=46)

    # Legs

    def trips_at(self, member: Member) -> list[Trip]:
        """Those of which it has something."""
        return [self.trips[request] for request in member.legs]

    def trip_at(self, member: Member, request: RequestId) -> Trip | None:
        return self.trips[request] if request in member.legs else None

    def _detach_home(self, trip: Trip) -> None:
        home, trip.home = trip.home, None
        if home is not None:
            del home.legs[trip.id]
            home.overdrawn.pop(trip.id, None)
            self._has_room(home)
            home.sequences -= len(trip.open)
            home.slots_since += len(trip.open)
            if trip.open:
                home.blocks_since += (trip.told + len(trip.request.prompt)) // home.hello.ready.block_size

    def _detach_prefill(self, trip: Trip) -> None:
        prefill, trip.prefill = trip.prefill, None
        if prefill is not None:
            del prefill.legs[trip.id]

    def _remember(self, member: Member | None, trip: Trip) -> None:
        if member is not None:
            self._placement.remember(member, trip, trip.request.prompt)

    def _tell(self, member: Member | None, message: ToInstance) -> None:
        if member is None:
            raise InvariantBroken(f"{type(message).__name__} for nobody", invariant=36)
        self.effects.append(Tell(member.session, message))
