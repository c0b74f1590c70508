"""Proves a router's books from scratch. Numbers are those of docs/internals/reliability.md."""

from __future__ import annotations

from baton.config import RouterConfig
from baton.core.cluster.coordinator import TO_COMPUTE, Coordinator
from baton.core.cluster.handoff_table import TripState
from baton.core.cluster.roster import STEPS
from baton.core.cluster.trip import Trip
from baton.errors import InvariantBroken

LEGS = {
    TripState.QUEUED: (False, False),
    TripState.RESERVING: (True, True),
    TripState.PREFILLING: (True, True),
    TripState.SERVING: (True, False),
}
"""Has it a home, has it a prefill instance? In HANDING the latter may be gone."""


def check_router(config: RouterConfig, coordinator: Coordinator) -> None:
    coordinator.membership.check()
    if wrong := coordinator.line.check():
        raise InvariantBroken("; ".join(wrong), invariant=25)
    queued = 0
    for trip in coordinator.trips.values():
        _check_trip(trip)
        queued += trip.state is TripState.QUEUED
    if queued != len(coordinator.line):
        raise InvariantBroken(f"{queued} trips are queued, {len(coordinator.line)} are in line", invariant=25)
    if coordinator.clocks.alarms.armed != len(coordinator.trips):
        raise InvariantBroken(f"{coordinator.clocks.alarms.armed} alarms for {len(coordinator.trips)} trips", invariant=41)
    if len(coordinator.trips) > config.requests_open_max:
        raise InvariantBroken(f"{len(coordinator.trips)} requests are open", invariant=49)
    _check_members(config, coordinator)


def _check_trip(trip: Trip) -> None:
    if trip.state is TripState.DONE or not trip.open:
        raise InvariantBroken(f"{trip!r} is over and not forgotten", invariant=22)
    if trip.alarm is None or trip.alarm > trip.deadline:
        raise InvariantBroken(f"{trip!r} has no deadline", invariant=41)
    legs = (trip.home is not None, trip.prefill is not None)
    if trip.state is TripState.HANDING:
        if trip.home is None:
            raise InvariantBroken(f"{trip!r} has no home", invariant=36)
    elif legs != LEGS[trip.state]:
        raise InvariantBroken(f"{trip!r} has the wrong legs", invariant=36)
    if trip.home is not None and trip.home is trip.prefill:
        raise InvariantBroken(f"{trip!r} is handed to the instance that has it", invariant=36)
    if any(index not in trip.open for index in trip.withdrawn):
        raise InvariantBroken(f"{trip!r} waits for the end of something that has ended", invariant=22)


def _check_members(config: RouterConfig, coordinator: Coordinator) -> None:
    """43: what an instance has of a trip is the present attempt, and nobody else answers it."""
    homes: dict[int, int] = {}
    prompts: dict[int, int] = {}
    tokens: dict[int, int] = {}
    legs: dict[int, int] = {}
    for trip in coordinator.trips.values():
        for member in (trip.home, trip.prefill):
            if member is None:
                continue
            if coordinator.membership.members.get(member.session) is not member or trip.id not in member.legs:
                raise InvariantBroken(f"{trip!r} is at an instance that does not know of it", invariant=43)
            legs[member.number] = legs.get(member.number, 0) + 1
        if trip.home is not None:
            homes[trip.home.number] = homes.get(trip.home.number, 0) + len(trip.open)
        if trip.prefill is not None and trip.state in TO_COMPUTE:
            prompts[trip.prefill.number] = prompts.get(trip.prefill.number, 0) + 1
            tokens[trip.prefill.number] = tokens.get(trip.prefill.number, 0) + trip.prompt_tokens
    for member in coordinator.membership.members.values():
        counted = (len(member.legs), member.sequences, member.prompts, member.prompt_tokens)
        found = tuple(each.get(member.number, 0) for each in (legs, homes, prompts, tokens))
        if counted != found:
            raise InvariantBroken(f"{member!r} counts {counted}, its trips are {found}", invariant=43)
        if any(trip not in member.legs for trip in member.overdrawn) or len(member.overdrawn) > config.overdrawn_max:
            raise InvariantBroken(f"{member!r}: {len(member.overdrawn)} wait there", invariant=49)
        if member.prompts > 1 + config.waiting_prompts_max and member.prompt_tokens > STEPS * member.hello.step_tokens:
            raise InvariantBroken(f"{member!r} has {member.prompts} prompts before it", invariant=49)
