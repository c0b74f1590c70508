"""Work conservation (62): no request waits in a router's queue while an instance that could serve it is idle.

An idle instance has room for everything it can hold, so no other request waits for its room. A request that avoids instances
for a moment, after a refusal or a loss, is left out until that moment has passed. Checked after each placement pass, and at
each heartbeat after which the router has nothing to do: that shows a pass that it forgot to schedule.
"""

from __future__ import annotations

from baton.config import RouterConfig
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.cluster.router import Router
from baton.errors import InvariantBroken
from baton.protocol.ids import Instant


def check_idle(router: Router, config: RouterConfig) -> None:
    now = router.coordinator.now
    deadline = router.next_deadline()
    if router.pass_scheduled or (deadline is not None and deadline <= now):
        return
    waiting = [
        client_request
        for client_request in router.coordinator.queue.routed_requests()
        if not (_avoids(client_request, now) or client_request.unfit or client_request.short)
    ]
    if not waiting:
        return
    usable = [
        member
        for member in router.membership.instances.values()
        if member.mode == "serving"
        and member.held_until <= now
        and not member.beat.fault
        and now < member.heard_at + config.suspect_seconds
    ]
    if any(member.inhibited_until > now or member.paths for member in usable):
        return  # this watch does not know which instances may get which requests
    idle = [member for member in usable if _is_idle(member)]
    for client_request in waiting:
        for member in idle:
            if member.capacity >= client_request.tokens_max and _serves(client_request, member, usable):
                raise InvariantBroken(f"{client_request!r} waits, and {member!r} has nothing to do", invariant=62)


def _avoids(client_request: RoutedRequest, now: Instant) -> bool:
    return any(until > now for until in client_request.avoided.values())


def _is_idle(member: ClusterInstance) -> bool:
    ready, beat = member.hello.ready, member.beat
    if member.short_for:  # it has just refused a request for lack of room, which waits for its next heartbeat
        return False
    return not member.assigned and beat.slots_free >= ready.slots and beat.blocks_available >= ready.blocks


def _serves(client_request: RoutedRequest, member: ClusterInstance, usable: list[ClusterInstance]) -> bool:
    """Could this idle instance serve the request, alone or with an idle prefill instance?"""
    one_token = client_request.tokens_left <= 1
    decoders = [m for m in usable if m.hello.role != "prefill" and m.capacity >= client_request.tokens_max]
    prefills = [m for m in usable if m.hello.role == "prefill" and m.hello.peers and m.capacity > client_request.tokens]
    alone = any(m.hello.role == "prefill" and m.capacity >= client_request.tokens_max for m in usable)
    match member.hello.role:
        case "mixed":
            return True
        case "prefill":
            return one_token or not decoders
        case "decode":
            return (one_token and alone) or not prefills or any(_is_idle(prefill) for prefill in prefills)
    return False
