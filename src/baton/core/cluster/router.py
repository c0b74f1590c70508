"""A router as a machine, which owns each request from its arrival to its last end, whatever happens to the instances.

    SubmitRequest -> queue -> placed on one instance, or on a pair -> InstanceMessage(Emit) ... -> Deliver ... last end
              (request_queue.py)  (placement.py)                       (delivery.py)

membership.py tracks instances; the table (handoff_table.py) has the states of a request, and coordinator.py performs its
actions. This file turns events into facts of that table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

from baton.config import RouterConfig
from baton.core.cluster.checks import check_router
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.delivery import Delivery
from baton.core.cluster.dispatch import Dispatch
from baton.core.cluster.events import (
    CloseSession,
    ClusterEffect,
    ClusterEvent,
    InstanceJoined,
    InstanceLeft,
    InstanceMessage,
    RejectRequest,
    Resumed,
    RouterTick,
    RunPass,
    SchedulePass,
    StopAdmission,
    SubmitRequest,
    WithdrawRequest,
)
from baton.core.cluster.handoff_table import RequestState
from baton.core.cluster.membership import Membership
from baton.core.cluster.placement import Placement
from baton.core.cluster.reports import Reports
from baton.core.cluster.routed_request import RoutedRequest
from baton.core.cluster.stats import RouterStats
from baton.core.cluster.withdrawal import Withdrawal
from baton.protocol.ids import Instant, RequestId
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateRequest, Refused

CHECK_KEYS: Final = 4096
"""Number of keys of the prefix index in one part of a check."""


class Router:
    __slots__ = (
        "_alarms",
        "_config",
        "_delivery",
        "_dispatch",
        "_handlers",
        "_message_handlers",
        "_numbers",
        "_placement",
        "_withdrawal",
        "closing",
        "coordinator",
        "membership",
        "pass_scheduled",
        "stats",
    )

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.stats = RouterStats()
        self.membership = Membership(config)
        routed_requests: dict[RequestId, RoutedRequest] = {}
        self._placement = Placement(config, self.membership)
        self.coordinator = Coordinator(config, self.membership, self._placement, routed_requests, self.stats)
        self._alarms = self.coordinator.clocks.alarms
        self._delivery = Delivery(self.coordinator, self._placement)
        self._dispatch = Dispatch(self.coordinator, self._placement)
        self._withdrawal = Withdrawal(config, self.coordinator)
        reports = Reports(config, self.coordinator, self._placement, self._withdrawal, self._lose)
        self._message_handlers = reports.handlers | {Emit: self._delivery.take}
        self._numbers = count()
        self.pass_scheduled = False
        self._placement.on_cached = self._on_cached
        self.closing = False
        self._handlers: dict[type[ClusterEvent], Callable[[Any], bool]] = {
            SubmitRequest: self._on_arrive,
            WithdrawRequest: self._on_withdraw,
            InstanceJoined: self._on_join,
            InstanceLeft: self._on_instance_left,
            InstanceMessage: self._on_instance_message,
            StopAdmission: self._on_stop_admission,
            RouterTick: self._on_tick,
            RunPass: self._on_run_pass,
            Resumed: self._on_resumed,
        }

    # The machine

    def handle(self, event: ClusterEvent, now: Instant) -> list[ClusterEffect]:
        coordinator = self.coordinator
        if now > coordinator.now:  # a clock may go backwards; the machine's time does not
            coordinator.now = now
        if self._handlers[type(event)](event):
            coordinator.dirty = True
        if coordinator.dirty and len(coordinator.queue) and not self.pass_scheduled:
            self.pass_scheduled = True
            coordinator.effects.append(SchedulePass())
        effects, coordinator.effects = coordinator.effects, []
        return effects

    def next_deadline(self) -> Instant | None:
        deadline = self._alarms.next_deadline()
        for other in (self.membership.next_deadline(), self._dispatch.next_pass):
            if other is not None and (deadline is None or other < deadline):
                deadline = other
        return deadline

    def check(self) -> None:
        self.check_part()
        self.membership.index.check()

    def check_part(self, keys: int = CHECK_KEYS) -> None:
        """Check the next keys of the prefix index, and everything that grows with instances and requests. A router calls this:
        the first request after it does not wait for the check of millions of keys."""
        check_router(self._config, self.coordinator)
        self.membership.index.check_part(keys)

    # The queue

    def _on_run_pass(self, event: RunPass) -> bool:
        """Run one pass for all events of a turn of the event loop."""
        self.pass_scheduled = False
        self._run_pass()
        return False

    def _run_pass(self) -> None:
        self.coordinator.dirty = False
        self._dispatch.run_pass()

    def _on_cached(self, keys: Sequence[int]) -> None:
        if self.coordinator.queue.on_cached(keys):
            self.coordinator.dirty = True

    # Queries

    @property
    def idle(self) -> bool:
        """Whether no client waits for an answer, and no instance has any part of a request."""
        return not self.coordinator.routed_requests

    @property
    def open_requests(self) -> int:
        return len(self.coordinator.routed_requests)

    @property
    def queued(self) -> int:
        """Number of sequences in the queue."""
        return self.coordinator.queue.sequences

    @property
    def handoff_seconds(self) -> float:
        """Expected seconds of a hand-off, besides the computing."""
        return self._placement.handoff_seconds

    # Clients

    def _on_arrive(self, event: SubmitRequest) -> bool:
        request = event.request
        self.stats.arrived += 1
        refused = self._refusal(request)
        if refused is not None:
            self.stats.turned_away[refused.reason] += 1
            self.coordinator.effects.append(RejectRequest(request.id, refused, self.coordinator.retry_seconds(refused)))
            return False
        now = self.coordinator.now
        priority = request.priority if self._config.order == "priority" else 0
        order = (priority, now - request.age_seconds, next(self._numbers))
        self.coordinator.begin(RoutedRequest(request, order, now))
        return True

    def _refusal(self, request: GenerateRequest) -> Refused | None:
        config, coordinator = self._config, self.coordinator
        if self.closing:
            return Refused("draining")
        if request.id in self.coordinator.routed_requests:
            return Refused("duplicate_id")
        if mode := self.membership.all_paused:
            return Refused("draining" if mode == "draining" else "paused")
        if len(self.coordinator.routed_requests) >= config.requests_open_max:
            return Refused("queue_full", len(self.coordinator.routed_requests) + 1, config.requests_open_max)
        tokens = len(request.prompt) + request.sampling.max_tokens
        if not self.membership.any_could(tokens, ()) and not self.membership.lost_could(tokens, (), coordinator.now):
            return self._dispatch.never_fits(tokens)
        refused = coordinator.queue.refusal(request)
        if refused is not None and coordinator.dirty:  # requests in the queue may only wait for the end of this turn
            self._run_pass()
            refused = coordinator.queue.refusal(request)
        return refused

    def _on_withdraw(self, event: WithdrawRequest) -> bool:
        routed = self.coordinator.routed_requests.get(event.request)
        if routed is not None:
            self._withdrawal.withdraw(routed, [index for index in routed.open if event.index in (None, index)], event.reason)
        return routed is not None

    def _on_stop_admission(self, event: StopAdmission) -> bool:
        self.closing = True
        return False

    # Instances

    def _on_join(self, event: InstanceJoined) -> bool:
        hello, now = event.hello, self.coordinator.now
        self.membership.record_dial(now)
        why = self.membership.misfit(hello, now)
        if why:  # also if it has the name of a present instance: a misfit replaces no instance
            self.stats.instances_refused += 1
            self.membership.refuse(hello)
            self.coordinator.effects.append(CloseSession(event.session, why))
            return True
        earlier = self.membership.names.get(hello.name)
        if earlier is not None:
            why, retry_seconds = self.membership.name_taken(earlier, hello, now)
            if why:
                self.stats.instances_refused += 1
                self.coordinator.effects.append(CloseSession(event.session, why, retry_seconds))
                return True
            self._lose(earlier, "joined_again", f"{hello.name} has joined again")
        self.membership.join(event.session, hello, now)
        return True

    def _on_instance_left(self, event: InstanceLeft) -> bool:
        instance = self.membership.instances.get(event.session)
        if instance is not None:
            how = "reloaded" if event.reloaded else "session_over" if instance.mode == "serving" else "left"
            self._lose(instance, how)
        return True

    def _lose(self, instance: ClusterInstance, how: str, hang_up: str = "") -> None:
        """Lose an instance. It is removed first, so that nothing that follows from the loss is placed there."""
        self.coordinator.dirty = True
        self.membership.remove(instance, self.coordinator.now, reloaded=how == "reloaded")
        self.stats.instances_lost += how != "reloaded"
        self.stats.losses[how] += how != "reloaded"
        if hang_up:
            self.coordinator.effects.append(CloseSession(instance.session, hang_up))
        self.coordinator.lose(instance)

    def _on_instance_message(self, event: InstanceMessage) -> bool:
        instance = self.membership.record_alive(event.session, self.coordinator.now)
        handler = self._message_handlers.get(type(event.message))
        if instance is None or handler is None:  # the session has ended, or instances do not send this message
            self.stats.late_facts += 1
            return False
        if instance.place is None and self.membership.roster.update(instance, self.coordinator.now):
            self.coordinator.dirty = True  # the instance was silent
        changed = handler(instance, event.message)
        if instance.over_capacity:
            self.coordinator.begun(instance)
        return changed

    # Time

    def _on_resumed(self, event: Resumed) -> bool:
        """Restart the times of silence: heartbeats that were due meanwhile are unread or arrive soon."""
        self.membership.renew(self.coordinator.now)
        return False

    def _on_tick(self, event: RouterTick) -> bool:
        """Check deadlines. This is the only place: after a pause of the whole process the awaited messages may be here, unread,
        behind others (runtime/driver.py)."""
        for instance in self.membership.silent(self.coordinator.now):
            self._lose(instance, "silent", f"nothing was received from it for {self._config.lapse_seconds:g} s")
        for instance in self.membership.stalled(self.coordinator.now):
            self._move_from(instance)
        for _ in RequestState:  # a request that returns to the queue may have waited there for too long already
            for routed in self._alarms.due(self.coordinator.now):
                self._on_alarm(routed)
        next_pass = self._dispatch.next_pass
        if next_pass is not None and next_pass <= self.coordinator.now:
            self._dispatch.next_pass = None
            return True
        return False

    def _move_from(self, instance: ClusterInstance) -> None:
        """Move requests off an instance that sends heartbeats with a stalled worker, as after a loss. Requests that no other
        instance could take wait. A computed prompt needs no worker to be released.

        A request that was moved before and has received no token since may be the cause of the stall, or was beside it: it
        stays, and the instance isolates the cause (core/engine/recovery.py). So no request stalls one instance after the other.
        A request that a move would end, because it has no losses left, stays too: its instance replaces the worker and answers.
        """
        self.membership.roster.refresh(self.coordinator.now)
        for routed in self.coordinator.requests_at(instance):
            computed = routed.state is RequestState.HANDING and routed.prefill is instance
            suspect = routed.moved_at == routed.progress
            ends = not self.coordinator.survives_break(routed)
            if not computed and not suspect and not ends and self._placement.roles(routed) is not None:
                routed.moved_at = routed.progress
                self.stats.moved += 1
                self.coordinator.break_attempt(routed, instance)

    def _on_alarm(self, routed: RoutedRequest) -> None:
        """Handle the request's earliest time, which has passed, and set the next alarm."""
        coordinator, now = self.coordinator, self.coordinator.now
        if routed.state is RequestState.DONE:
            return
        if routed.timeout_at is not None and routed.timeout_at <= now:
            routed.timeout_at = None
            self._withdrawal.withdraw(routed, list(routed.open), FinishReason.TIMEOUT)
        elif routed.withdraw_by is not None and routed.withdraw_by <= now:
            self._withdrawal.lapse(routed)
        elif routed.deadline <= now:
            self._on_lapse(routed)
        elif routed.renew_at is not None and routed.renew_at <= now:
            coordinator.renew(routed)
        coordinator.clocks.arm(routed)

    def _on_lapse(self, routed: RoutedRequest) -> None:
        """Handle the deadline of the request's state, which has passed."""
        coordinator, config = self.coordinator, self._config
        if routed.state is RequestState.QUEUED:
            if coordinator.clocks.no_instance_since is not None:
                coordinator.reject(routed, Refused("worker_gone"))
            else:
                waited = coordinator.now - routed.queued_at
                coordinator.reject(routed, Refused("queued_too_long", round(waited), round(config.queue_seconds_max)))
            return
        if routed.state is RequestState.SERVING and routed.progress != routed.mark:
            coordinator.clocks.progressed(routed, coordinator.now)
            return
        coordinator.break_attempt(routed, routed.prefill if routed.state is RequestState.PREFILLING else routed.decoder)
