"""Tokens and ends on their way from instances to clients: each position once, in order, and only of the present attempt.

Most emits are all right as they are, and are passed on as the same object: a token costs three lookups, two compares and an
append. The others are sifted row by row.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.events import Deliver
from baton.core.cluster.handoff_table import TripFact, TripState
from baton.core.cluster.member import Member
from baton.core.cluster.placement import Placement
from baton.core.cluster.trip import Trip
from baton.core.delivery.take import LogprobRow, begun_by, sift
from baton.protocol.ids import RequestId
from baton.protocol.output import RETRYABLE, Emit, Ended, TokenRow, tokens_of
from baton.protocol.request import FinishReason


class Delivery:
    __slots__ = ("_coordinator", "_placement")

    def __init__(self, coordinator: Coordinator, placement: Placement) -> None:
        self._coordinator = coordinator
        self._placement = placement

    def take(self, member: Member, emit: Emit) -> bool:
        """Has something ended, so that others may have a chance?"""
        if emit.ended or emit.logprobs:
            return self._sift(member, emit)
        trips, legs, rows = self._coordinator.trips, member.legs, iter(emit.tokens)
        try:
            for row in rows:
                request, attempt, index, position, tokens = row
                trip = trips[request]
                told = trip.open[index]
                if position != len(told) or attempt != trip.attempt or request not in legs:
                    break
                if type(tokens) is int:
                    told.append(tokens)
                else:
                    told.extend(tokens_of(tokens))
            else:
                self._coordinator.effects.append(Deliver(emit))
                return False
        except KeyError:  # of a request or a sequence that is over
            pass
        return self._sift_rest(member, emit, row, rows)

    def _sift_rest(self, member: Member, emit: Emit, row: TokenRow, rows: Iterator[TokenRow]) -> bool:
        """From the first row on that is not the next one of anything."""
        rest = [row, *rows]
        fresh = emit.tokens[: len(emit.tokens) - len(rest)]
        broken: dict[RequestId, Trip] = {}
        fresh += [taken for row in rest if (taken := self._taken(member, row, broken)) is not None]
        if fresh:
            self._coordinator.effects.append(Deliver(Emit(fresh, [], begun=begun_by(fresh, emit.begun))))
        self._break(broken, member)
        return bool(broken)

    def _sift(self, member: Member, emit: Emit) -> bool:
        broken: dict[RequestId, Trip] = {}
        touched: dict[RequestId, Trip] = {}
        sifted = sift(
            emit,
            self._prompts_owed(member, emit.logprobs),
            lambda row: self._taken(member, row, broken),
            lambda ended: self._end(member, ended, broken, touched),
        )
        if sifted.tokens or sifted.ended or sifted.logprobs:
            self._coordinator.effects.append(Deliver(emit if sifted == emit else sifted))
        for trip in touched.values():
            self._after_end(trip, broken)
        self._break(broken, member)
        return bool(touched or broken)

    def _taken(self, member: Member, row: TokenRow, broken: dict[RequestId, Trip]) -> TokenRow | None:
        """The row from the first position on that its client does not have. None: there is nothing new in it."""
        trip = self._leg(member, row[0], row[1])
        if trip is not None and trip.misses(row):
            broken[trip.id] = trip
            return None
        taken = None if trip is None else trip.take(row)
        self._coordinator.stats.stale_rows += taken is None
        return taken

    def _leg(self, member: Member, request: RequestId, attempt: int) -> Trip | None:
        """The trip, if this instance has the present attempt of it."""
        trip = self._coordinator.trips.get(request)
        return trip if trip is not None and attempt == trip.attempt and member in (trip.home, trip.prefill) else None

    def _prompts_owed(self, member: Member, rows: list[LogprobRow]) -> dict[RequestId, bool]:
        """Whose prompt is still to be told, before the tokens of this emit are."""
        owed = {}
        for request, _, row in rows:
            if row.prompt and request not in owed:
                trip = self._coordinator.trips.get(request)
                owed[request] = trip is not None and trip.prompt_owed and member in (trip.home, trip.prefill)
        return owed

    # Ends

    def _end(self, member: Member, ended: Ended, broken: dict[RequestId, Trip], touched: dict[RequestId, Trip]) -> Ended | None:
        """None: it is not told to the client, or not like this."""
        trip = self._leg(member, ended.request, ended.attempt)
        if trip is None or ended.index not in trip.open:
            self._coordinator.stats.stale_rows += 1
            return None
        if trip.id in broken or not self._is_an_end(member, trip, ended):
            broken[trip.id] = trip
            return None
        touched[trip.id] = trip
        if member is trip.home and len(trip.open[ended.index]) >= member.hello.ready.block_size:
            self._placement.remember(member, trip, (*trip.request.prompt, *trip.open[ended.index]))
        self._coordinator.sequence_over(trip, ended.index)
        return trip.end_as_told(ended)

    @staticmethod
    def _is_an_end(member: Member, trip: Trip, ended: Ended) -> bool:
        """False: another instance can go on with it."""
        if ended.error in RETRYABLE:
            return False
        asked, told = ended.index in trip.withdrawn, len(trip.open[ended.index])
        if ended.output_tokens > told:  # some of them never came
            return False
        match ended.reason:
            case FinishReason.ABORT:
                return asked
            case FinishReason.TIMEOUT:
                return asked or trip.request.timeout_seconds is not None
            case FinishReason.LENGTH:
                return member is trip.home or told >= trip.request.sampling.max_tokens
        return True

    def _after_end(self, trip: Trip, broken: dict[RequestId, Trip]) -> None:
        if trip.id in broken:
            return
        if not trip.open:
            self._coordinator.advance(trip, TripFact.ENDED)
        elif trip.state is not TripState.SERVING:  # whom the hand-off was about; the others are begun anew
            self._coordinator.advance(trip, TripFact.LEADER_OVER)

    def _break(self, broken: dict[RequestId, Trip], member: Member) -> None:
        """One that was told to stop ends what it still has when its time is over (core/engine/service_mode.py)."""
        for trip in broken.values():
            self._coordinator.break_leg(trip, member, leaves=member.mode != "serving")
