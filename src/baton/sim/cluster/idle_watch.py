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
        routed
        for routed in router.coordinator.queue.routed_requests()
        if not (_avoids(routed, now) or routed.unfit or routed.short)
    ]
    if not waiting:
        return
    usable = [
        instance
        for instance in router.membership.instances.values()
        if instance.mode == "serving"
        and instance.held_until <= now
        and not instance.beat.fault
        and now < instance.received_at + config.suspect_seconds
    ]
    if any(instance.inhibited_until > now or instance.paths for instance in usable):
        return  # unknown here: which instances may get which requests
    idle = [instance for instance in usable if _is_idle(instance)]
    for routed in waiting:
        for instance in idle:
            if instance.capacity >= routed.tokens_max and _serves(routed, instance, usable):
                raise InvariantBroken(f"{routed!r} waits, and {instance!r} has nothing to do", invariant=62)


def _avoids(routed: RoutedRequest, now: Instant) -> bool:
    return any(until > now for until in routed.avoided.values())


def _is_idle(instance: ClusterInstance) -> bool:
    ready, beat = instance.hello.ready, instance.beat
    if instance.short_for:  # the instance has just refused a request for lack of room, which waits for its next heartbeat
        return False
    return not instance.assigned and beat.slots_free >= ready.slots and beat.blocks_available >= ready.blocks


def _serves(routed: RoutedRequest, instance: ClusterInstance, usable: list[ClusterInstance]) -> bool:
    """Whether this idle instance could serve the request, alone or with an idle prefill instance."""
    one_token = routed.tokens_left <= 1
    decoders = [m for m in usable if m.hello.role != "prefill" and m.capacity >= routed.tokens_max]
    prefills = [m for m in usable if m.hello.role == "prefill" and m.hello.peers and m.capacity > routed.tokens]
    alone = any(m.hello.role == "prefill" and m.capacity >= routed.tokens_max for m in usable)
    match instance.hello.role:
        case "mixed":
            return True
        case "prefill":
            return one_token or not decoders
        case "decode":
            return (one_token and alone) or not prefills or any(_is_idle(prefill) for prefill in prefills)
    return False
