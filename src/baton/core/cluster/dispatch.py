"""A placement pass over the queue: places the requests that have room now. At most one pass per turn of the event loop
(router.py).

No request overtakes another for room that it waits for: instances that it could use are closed for those behind it (closed.py),
and others are not. A request that waits for something else lets all others pass: for a less busy prefill instance, for an
instance that it may try again, for a lost one that may come back.
"""

from __future__ import annotations

from baton.core.cluster.choice import Census, Choice, ClusterShortage
from baton.core.cluster.closed import Closed
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.coordinator import Coordinator
from baton.core.cluster.placement import Placement
from baton.core.cluster.request_queue import QueueLane
from baton.core.cluster.routed_request import RoutedRequest
from baton.protocol.ids import Instant
from baton.protocol.output import OTHER_WEIGHTS
from baton.protocol.request import Refused

ROLES = ("prefill", "decode", "mixed")


class Dispatch:
    __slots__ = ("_coordinator", "_placement", "_retry_at", "next_pass")

    def __init__(self, coordinator: Coordinator, placement: Placement) -> None:
        self._coordinator = coordinator
        self._placement = placement
        self._retry_at: list[Instant] = []
        "Times at which requests that wait for room in this pass may try an avoided instance again."
        self.next_pass: Instant | None = None
        "Time of the next pass, because an instance may be tried again then."

    def run_pass(self) -> None:
        """Run one pass."""
        self.next_pass = None
        queue, roster, now = self._coordinator.queue, self._placement.roster, self._coordinator.now
        if not len(queue):
            return
        roster.refresh(now)
        if roster.usable_changed:
            roster.usable_changed = False
            queue.reopen(roster.sizes())
        queue.unpark(now)
        self._note_no_instance()
        if self._coordinator.clocks.no_instance_since is None:
            self._place_all()
        if len(queue):
            times = [at for at in (roster.next_change(), queue.next_unpark()) if at is not None]
            self.next_pass = min([*times, *self._retry_at], default=None)
        self._retry_at.clear()

    def _place_all(self) -> None:
        queue, roster, closed = self._coordinator.queue, self._placement.roster, Closed()
        if roster.has_open("decode"):
            queue.wake(lambda key: self._decode_has(key, with_room=True))
        lanes = dict.fromkeys(queue.lanes(prefill=roster.prefill_has_room or roster.has_open("mixed")))
        aside: list[tuple[QueueLane, RoutedRequest]] = []
        while lanes:
            heads = [(routed.order, lane, routed) for lane in lanes if (routed := queue.head(lane)) is not None]
            if not heads:
                break
            _, lane, routed = min(heads)
            if not self._place_one(routed, lane, closed):
                if self._exceptions(routed):  # other requests in this lane may use what it cannot
                    queue.set_aside(lane, routed)
                    aside.append((lane, routed))
                else:
                    del lanes[lane]
                if all(closed.closes_all(role, roster.smallest(role)) for role in ROLES):
                    break
            roster.refresh(self._coordinator.now)
        for lane, routed in aside:
            queue.put_back(lane, [routed])

    def _place_one(self, routed: RoutedRequest, lane: QueueLane, closed: Closed) -> bool:
        """Place one request. False: it waits in its lane for room."""
        queue, now = self._coordinator.queue, self._coordinator.now
        match found := self._placement.place(routed, now, closed):
            case Choice():
                self._place(routed, found)
            case ClusterShortage.ROOM:
                self._retry(routed)
                census = self._placement.census(routed, now)
                if census is not None:
                    self._note_no_room(routed, census)
                    closed.close(census.roles.all, routed.tokens_max, self._exceptions(routed))
                return False
            case ClusterShortage.PREFILL:
                self._retry(routed)
                closed.close_prefills(routed.tokens + 1, self._exceptions(routed))
                if lane.kind == "prefill":
                    return False
                needed = self._placement.depth_to_stay(routed.tokens, self._placement.block_size)
                queue.wait_for_prefill(routed, needed, lambda key: self._decode_has(key, with_room=False))
            case ClusterShortage.NEVER:
                lost = Refused("worker_gone") if routed.waited_for_lost else None
                self._coordinator.reject(routed, routed.refused or lost or self.never_fits(routed.tokens_max))
            case ClusterShortage.LOST:
                routed.waited_for_lost = True
                queue.park(routed, self._coordinator.membership.lost_could(routed.tokens_max, routed.unfit, now))
            case ClusterShortage.AVOIDED:
                queue.park(routed, min((until for until in routed.avoided.values() if until > now), default=None))
            case ClusterShortage.NOBODY:
                queue.park(routed, None)
        return True

    def _decode_has(self, key: int, *, with_room: bool) -> bool:
        """Whether a decode instance has this block. `with_room`: and perhaps room for one more request."""
        instances, index = self._placement.roster.instances, self._placement.index
        holders = index.numbers(index.holders([key]))
        places = [instances[number].place for number in holders if _decodes(instances.get(number))]
        if not with_room:
            return bool(places)
        return any(place is not None and (place.waits or place.blocks > 0) for place in places)

    def _retry(self, routed: RoutedRequest) -> None:
        """Schedule a pass for when the avoided instances may be tried again: they may have room all the time, so no other event
        would cause one."""
        now = self._coordinator.now
        self._retry_at += [until for until in routed.avoided.values() if until > now]

    def _note_no_room(self, routed: RoutedRequest, census: Census) -> None:
        """Record since when the request is the first without room: a hand-off waits only for a limited time (placement.py)."""
        if routed.no_room_since is None:
            routed.no_room_since = self._coordinator.now
        if census.roles.pairs and not self._placement.may_wait_whole(routed, self._coordinator.now):
            self._retry_at.append(self._placement.whole_at(routed))

    def _exceptions(self, routed: RoutedRequest) -> tuple[str, ...]:
        """Present instances that the request cannot use now."""
        names = routed.exceptions(self._coordinator.now)
        return tuple(instance.name for instance in self._coordinator.membership.named(names)) if names else ()

    def never_fits(self, tokens: int) -> Refused:
        """The refusal of a request that never fits, with the numbers of the largest instance."""
        ready = [instance.hello.ready for instance in self._coordinator.membership.instances.values()]
        size = ready[0].block_size
        limit = min(max(each.blocks for each in ready), max(each.context_tokens for each in ready) // size or 2**31)
        return Refused("never_fits", -(-(tokens - 1) // size), limit)

    def _place(self, routed: RoutedRequest, choice: Choice) -> None:
        if routed.identity not in (None, choice.decoder.hello.ready.identity) and routed.has_tokens:
            self._coordinator.break_off(routed, "worker_gone", OTHER_WEIGHTS)
        else:
            self._coordinator.place(routed, choice)

    def _note_no_instance(self) -> None:
        """Record since when no instance is usable: this limits how long requests wait in the queue. A paused instance comes
        back."""
        coordinator = self._coordinator
        none_works = not self._placement.roster.any_usable and not coordinator.membership.all_paused
        if none_works != (coordinator.clocks.no_instance_since is not None):
            coordinator.clocks.no_instance_since = coordinator.now if none_works else None
            for routed in coordinator.queue.routed_requests():
                coordinator.clocks.arm(routed)


def _decodes(instance: ClusterInstance | None) -> bool:
    return instance is not None and instance.hello.role == "decode"
