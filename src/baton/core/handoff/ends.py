"""The hand-offs of one instance, at both ends: requests are checked for repetition, accepted or refused, and dispatched.

An instance may be either end, of different requests. Every message names an attempt, and each attempt of a request begins at
most once here: the highest attempt that began or was forgotten is remembered, so late and repeated messages change nothing.
"""

from __future__ import annotations

from baton.config import InstanceConfig
from baton.core.effects import Effect, Refuse
from baton.core.engine.board import Board
from baton.core.engine.intake import Intake
from baton.core.engine.phase import Phase
from baton.core.events import HandoffEvent
from baton.core.handoff.destination import Destination, Reservation
from baton.core.handoff.source import Source
from baton.core.kv.move import Move
from baton.protocol.handoff import Adopted, Forget, PeerOffer, Prefill, Release, Released, Reserve
from baton.protocol.ids import Instant, RequestId, StepNo
from baton.protocol.request import GenerateRequest, Refused


class HandoffEnds:
    __slots__ = ("_attempts", "_attempts_max", "_board", "_destination", "_intake", "_source", "outgoing")

    def __init__(self, config: InstanceConfig, board: Board, intake: Intake) -> None:
        self._board = board
        self._intake = intake
        self.outgoing: list[Effect] = []
        "Messages sent at the end of this event, after the tokens."
        self._attempts_max = config.tiers.attempts_max
        self._source = Source(config.tiers, board, self.outgoing)
        self._destination = Destination(config.tiers, board, self.outgoing)
        self._attempts: dict[RequestId, int] = {}
        "Highest attempt that began or was forgotten, per request; the oldest entry first."

    def handle(self, event: HandoffEvent, now: Instant, last_step: StepNo) -> None:
        """Dispatch one message of the router. `last_step`: the last plan that was sent."""
        match event:
            case PeerOffer():
                self._destination.offered(event, now)
            case Release():
                self._source.asked(event)
            case Released():
                self._destination.released(event)
            case Reserve():
                self._on_reserve(event, now, last_step)
            case Prefill():
                self._on_prefill(event, now)
            case Forget():
                self._on_forget(event)

    def end_event(self, now: Instant) -> None:
        """Offer the blocks that were computed in this event."""
        if self._board.to_offer or self._board.handed_over:
            self._source.offer(now)

    # Beginning

    def _on_prefill(self, event: Prefill, now: Instant) -> None:
        request = event.request
        kept = self._board.kept.get(request.id)
        if kept is not None and kept.sequence.attempt == request.attempt:
            return  # a repeated message
        refused = self._refusal(request, in_queue=True)
        if refused is not None:
            self._refuse(request, refused)
            return
        self._intake.end_silently(request.id, request.attempt)
        self._remember(request.id, request.attempt)
        group = self._intake.group_of(request, now)
        self._source.keep(group.leader, event.keep_seconds)
        self._intake.begin(group)

    def _on_reserve(self, event: Reserve, now: Instant, last_step: StepNo) -> None:
        request = event.request
        known = self._board.groups.get(request.id)
        if known is not None and known.request.attempt == request.attempt:
            self._destination.renew(request.id, event.lease_seconds, now)
            return
        refused = self._refusal(request, in_queue=False)
        if refused is None:
            self._intake.end_silently(request.id, request.attempt)
            group = self._intake.group_of(request, now, in_queue=False)
            refused = self._destination.refusal(group, event.wait_seconds)
        if refused is not None:
            self._refuse(request, refused)
            return
        self._remember(request.id, request.attempt)
        self._intake.begin(group)
        if group.leader.phase is Phase.WAITING:
            self._destination.begin(group, event.lease_seconds, event.wait_seconds, now)
            self._destination.grant(last_step, now)
            if (last := self._destination.surplus()) is not None:
                self._refuse_waiting(last)
        elif group.open:  # the leader's answer was complete: no other instance computes anything
            self.outgoing.append(Adopted(request.id, request.attempt, 0))

    def _refusal(self, request: GenerateRequest, *, in_queue: bool) -> Refused | None:
        if request.attempt <= self._attempts.get(request.id, 0):
            return Refused("duplicate_id")
        return self._intake.refusal(request, in_queue=in_queue)

    def grant(self, now: Instant, last_step: StepNo) -> None:
        """Reserve blocks for the reservations that wait, if blocks have become free. `last_step`: the last plan that was
        sent."""
        self._destination.grant(last_step, now)

    def _refuse_waiting(self, reservation: Reservation) -> None:
        """End a reservation that waits for room: its time has passed, or too many more urgent ones wait."""
        request, sequence = reservation.sequence.request, reservation.sequence
        refused = self._destination.shortage(sequence) or Refused("no_room")
        self._intake.end_silently(request.id, request.attempt)
        self._refuse(request, refused)

    def _refuse(self, request: GenerateRequest, refused: Refused) -> None:
        self._board.stats.refused[refused.reason] += 1
        self.outgoing.append(Refuse(request.id, refused, request.attempt))

    # Ending

    def _on_forget(self, event: Forget) -> None:
        self._intake.end_silently(event.request, event.attempt)
        self._remember(event.request, event.attempt)

    def _remember(self, request: RequestId, attempt: int) -> None:
        self._attempts[request] = max(attempt, self._attempts.pop(request, 0))
        if len(self._attempts) > self._attempts_max:
            del self._attempts[next(iter(self._attempts))]

    # Time, and losses of other processes

    def next_deadline(self) -> Instant | None:
        kept, reserved = self._board.kept_until.earliest, self._destination.deadlines.earliest
        return reserved if kept is None else kept if reserved is None else min(kept, reserved)

    def expire(self, now: Instant) -> None:
        kept, reserved = self._board.kept_until.earliest, self._destination.deadlines.earliest
        if kept is not None and kept <= now:
            self._source.expire(now)
        if reserved is not None and reserved <= now:
            for lapsed in self._destination.expire(now):
                if lapsed.waits_since is not None:
                    self._refuse_waiting(lapsed)
                else:
                    self._intake.end_silently(lapsed.sequence.request.id, lapsed.sequence.attempt)

    def pulled(self, move: Move, now: Instant) -> None:
        self._destination.pulled(move, now)

    def service_lost(self, now: Instant) -> None:
        self._destination.service_lost(now)

    def pool_changed(self) -> None:
        """Discard copies and kept blocks: the device's blocks were replaced, have other keys, or are not trusted."""
        self._source.void()
        self._destination.pool_changed()

    def check(self) -> None:
        self._destination.check()

    def drop_kept(self) -> None:
        """Release all kept blocks: the drain has timed out, so pending copies are not awaited."""
        self._source.void()
