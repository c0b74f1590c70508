"""Work conservation (62): no request waits in a router's queue while an instance that could serve it has nothing to do.

An idle instance has room for whatever it can hold, so no other request waits for its room. A request that avoids instances
for a moment, after a refusal or a loss, is left out until that moment has passed. The router is asked after each placement
pass, and at each heartbeat after which it has nothing to do: a pass that it forgot to schedule shows there.
"""

from __future__ import annotations

from baton.config import RouterConfig
from baton.core.cluster.member import Member
from baton.core.cluster.router import Router
from baton.core.cluster.trip import Trip
from baton.errors import InvariantBroken
from baton.protocol.ids import Instant


def check_idle(router: Router, config: RouterConfig) -> None:
    now = router.coordinator.now
    deadline = router.next_deadline()
    if router.pass_scheduled or (deadline is not None and deadline <= now):
        return
    waiting = [trip for trip in router.coordinator.line.trips() if not (_avoids(trip, now) or trip.unfit or trip.short)]
    if not waiting:
        return
    usable = [
        member
        for member in router.membership.members.values()
        if member.mode == "serving"
        and member.held_until <= now
        and not member.beat.fault
        and now - member.heard_at < config.suspect_seconds
    ]
    if any(member.inhibited_until > now or member.paths for member in usable):
        return  # who may have what is more than this watch knows
    idle = [member for member in usable if _is_idle(member)]
    for trip in waiting:
        for member in idle:
            if member.capacity >= trip.tokens_max and _serves(trip, member, usable):
                raise InvariantBroken(f"{trip!r} waits, and {member!r} has nothing to do", invariant=62)


def _avoids(trip: Trip, now: Instant) -> bool:
    return any(until > now for until in trip.avoided.values())


def _is_idle(member: Member) -> bool:
    ready, beat = member.hello.ready, member.beat
    if member.short_for:  # it has just refused a request for want of room, which waits for its next heartbeat
        return False
    return not member.legs and beat.slots_free >= ready.slots and beat.blocks_available >= ready.blocks


def _serves(trip: Trip, member: Member, usable: list[Member]) -> bool:
    """Could this idle instance have the request, alone or with an idle prefill instance?"""
    one_token = trip.tokens_left <= 1
    homes = [m for m in usable if m.hello.role != "prefill" and m.capacity >= trip.tokens_max]
    prefills = [m for m in usable if m.hello.role == "prefill" and m.hello.peers and m.capacity > trip.tokens]
    alone = any(m.hello.role == "prefill" and m.capacity >= trip.tokens_max for m in usable)
    match member.hello.role:
        case "mixed":
            return True
        case "prefill":
            return one_token or not homes
        case "decode":
            return (one_token and alone) or not prefills or any(_is_idle(prefill) for prefill in prefills)
    return False
