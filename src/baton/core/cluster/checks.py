"""Verifies a router's state from scratch. Invariant numbers are those of docs/internals/reliability.md."""

from __future__ import annotations

from baton.config import RouterConfig
from baton.core.cluster.coordinator import TO_COMPUTE, Coordinator
from baton.core.cluster.handoff_table import RequestState
from baton.core.cluster.roster import STEPS
from baton.core.cluster.routed_request import RoutedRequest
from baton.errors import InvariantBroken

ASSIGNED = {
    RequestState.QUEUED: (False, False),
    RequestState.RESERVING: (True, True),
    RequestState.PREFILLING: (True, True),
    RequestState.SERVING: (True, False),
}
"""Whether the request has a decode instance, and whether it has a prefill instance, by state. In HANDING the latter may be
released."""


def check_router(config: RouterConfig, coordinator: Coordinator) -> None:
    coordinator.membership.check()
    if wrong := coordinator.queue.check():
        raise InvariantBroken("; ".join(wrong), invariant=25)
    queued = 0
    for routed in coordinator.routed_requests.values():
        _check_routed(routed)
        queued += routed.state is RequestState.QUEUED
    if queued != len(coordinator.queue):
        raise InvariantBroken(f"{queued} requests are queued, {len(coordinator.queue)} are in the queue", invariant=25)
    if coordinator.clocks.alarms.armed != len(coordinator.routed_requests):
        raise InvariantBroken(
            f"{coordinator.clocks.alarms.armed} alarms for {len(coordinator.routed_requests)} requests", invariant=41
        )
    if len(coordinator.routed_requests) > config.requests_open_max:
        raise InvariantBroken(f"{len(coordinator.routed_requests)} requests are open", invariant=49)
    _check_members(config, coordinator)


def _check_routed(routed: RoutedRequest) -> None:
    if routed.state is RequestState.DONE or not routed.open:
        raise InvariantBroken(f"{routed!r} is over and not forgotten", invariant=22)
    if routed.alarm is None or routed.alarm > routed.deadline:
        raise InvariantBroken(f"{routed!r} has no deadline", invariant=41)
    assigned = (routed.decoder is not None, routed.prefill is not None)
    if routed.state is RequestState.HANDING:
        if routed.decoder is None:
            raise InvariantBroken(f"{routed!r} has no decoder", invariant=36)
    elif assigned != ASSIGNED[routed.state]:
        raise InvariantBroken(f"{routed!r} has the wrong instances", invariant=36)
    if routed.decoder is not None and routed.decoder is routed.prefill:
        raise InvariantBroken(f"{routed!r} is handed to the instance that has it", invariant=36)
    if any(index not in routed.open for index in routed.withdrawn):
        raise InvariantBroken(f"{routed!r} waits for the end of something that has ended", invariant=22)


def _check_members(config: RouterConfig, coordinator: Coordinator) -> None:
    """43: an assigned request is the present attempt, and no other instance answers it."""
    decoders: dict[int, int] = {}
    prompts: dict[int, int] = {}
    tokens: dict[int, int] = {}
    assigned: dict[int, int] = {}
    placed: dict[int, int] = {}
    for routed in coordinator.routed_requests.values():
        for instance in (routed.decoder, routed.prefill):
            if instance is None:
                continue
            if coordinator.membership.instances.get(instance.session) is not instance or routed.id not in instance.assigned:
                raise InvariantBroken(f"{routed!r} is at an instance that does not know of it", invariant=43)
            assigned[instance.number] = assigned.get(instance.number, 0) + 1
        if routed.decoder is not None:
            decoders[routed.decoder.number] = decoders.get(routed.decoder.number, 0) + len(routed.open)
            placed[routed.decoder.number] = placed.get(routed.decoder.number, 0) + routed.placed_blocks
        if routed.prefill is not None and routed.state in TO_COMPUTE:
            prompts[routed.prefill.number] = prompts.get(routed.prefill.number, 0) + 1
            tokens[routed.prefill.number] = tokens.get(routed.prefill.number, 0) + routed.prompt_tokens
    if coordinator.membership.roster.placed.total != sum(placed.values()):
        raise InvariantBroken("the blocks of all placed requests are not those of each instance", invariant=43)
    for instance in coordinator.membership.instances.values():
        counted = (len(instance.assigned), instance.sequences, instance.prompts, instance.prompt_tokens, instance.placed.total)
        found = tuple(each.get(instance.number, 0) for each in (assigned, decoders, prompts, tokens, placed))
        if counted != found:
            raise InvariantBroken(f"{instance!r} counts {counted}, its requests are {found}", invariant=43)
        if (
            any(routed not in instance.assigned for routed in instance.over_capacity)
            or len(instance.over_capacity) > config.overdrawn_max
        ):
            raise InvariantBroken(f"{instance!r}: {len(instance.over_capacity)} wait there", invariant=49)
        if instance.prompts > 1 + config.waiting_prompts_max and instance.prompt_tokens > STEPS * instance.hello.step_tokens:
            raise InvariantBroken(f"{instance!r} has {instance.prompts} prompts before it", invariant=49)
