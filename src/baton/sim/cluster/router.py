"""A router process: the real machine, its sessions and its clock. The process freezes, dies, and restarts without state.

Checks the messages to instances: one attempt at a time, and no new work for an instance that has been silent for long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from baton.config import RouterConfig
from baton.core.cluster.events import (
    CloseSession,
    ClusterEvent,
    Deliver,
    FailRequest,
    InstanceJoined,
    InstanceLeft,
    InstanceMessage,
    RejectRequest,
    Resumed,
    RouterTick,
    RunPass,
    SchedulePass,
    SendToInstance,
    Session,
    SubmitRequest,
    WithdrawRequest,
)
from baton.core.cluster.router import Router
from baton.errors import InvariantBroken
from baton.protocol.control import RefusedRequest
from baton.protocol.handoff import Forget, Prefill, Released, request_of
from baton.protocol.ids import Instant
from baton.protocol.instance import Heartbeat, InstanceHello, InstanceRefused, RouterHeartbeat, RouterHello
from baton.protocol.output import Emit
from baton.protocol.versions import CAPABILITIES
from baton.sim.clock import Clock
from baton.sim.cluster.fit_watch import FitWatch
from baton.sim.cluster.given_watch import GivenWatch
from baton.sim.cluster.idle_watch import check_idle
from baton.sim.cluster.line_watch import LineWatch
from baton.sim.cluster.naive_placement import check_placement
from baton.sim.cluster.path_watch import PathWatch
from baton.sim.cluster.preempt_watch import PreemptWatch
from baton.sim.cluster.rest import check_router_rest
from baton.sim.cluster.stall_watch import StallWatch
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.cluster.wires import HANGUP, Wire
from baton.sim.timeline import Timeline

SILENT_MARGIN = 0.01


class RouterDelivery(Protocol):
    """Interface of the clients of routers."""

    def delivered(self, emit: Emit) -> None: ...
    def turned_away(self, effect: RejectRequest) -> None: ...
    def broken_off(self, effect: FailRequest) -> None: ...
    def router_died(self, router: int) -> None: ...


class SimulatedRouter:
    def __init__(
        self,
        number: int,
        config: RouterConfig,
        timeline: Timeline,
        clock: Clock,
        watch: ClusterWatch,
        *,
        pairs: bool,
    ) -> None:
        """`pairs`: whether some instances prefill for others."""
        self.number = number
        self.name = f"router{number}"
        self.config = config
        self.machine: Router | None = None
        self.frozen = False
        self.events = 0
        self.clients: RouterDelivery
        self._timeline = timeline
        self._clock = clock
        self._watch = watch
        self._lives = 0
        self._wires: dict[Session, Wire] = {}
        self._dialled: dict[Session, Wire] = {}
        "Sessions without a message so far."
        self._received_at: dict[Session, float] = {}
        self._assigned: dict[str, dict[Session, int]] = {}
        "Attempt of each session that was given the request and not sent a `Forget`, by request."
        self._attempts: dict[str, int] = {}
        self._stalls = StallWatch(config, watch)
        self._preemptions = PreemptWatch(config, watch)
        self._paths = PathWatch(watch)
        self.fit = FitWatch(config, watch)
        self._line = LineWatch(config, pairs=pairs)
        self._given = GivenWatch()
        self._inbox: list[Callable[[], None]] = []
        self._sizes: dict[Session, tuple[float, int]] = {}
        "Time of the session's end (before that, of its begin) and blocks of its instance, by session."
        self._armed: float | None = None

    # Lives

    def start(self, _: None = None) -> None:
        if self.machine is None:
            self._lives += 1
            self._note(f"starts, life {self._lives}")
            self.machine = Router(self.config)
            check_placement(self.machine, self.config, self._watch.saw)
            self._timeline.at(self._timeline.now, self._beat, self._lives)

    def kill(self, down_seconds: float) -> None:
        if self.machine is None:
            return
        self._note("is killed")
        self._watch.saw("a router was killed")
        self.machine = None
        self.frozen = False
        self._inbox.clear()
        self._assigned.clear()
        self._attempts.clear()
        self._stalls.clear()
        self._preemptions.clear()
        self._paths.clear()
        self.fit.clear()
        self._line.clear()
        self._given.clear()
        self._sizes.clear()
        self._armed = None
        for wire in (*self._wires.values(), *self._dialled.values()):
            wire.close("down", in_order=False)
        self._wires.clear()
        self._dialled.clear()
        self.clients.router_died(self.number)
        self._timeline.at(self._timeline.now + down_seconds, self.start)

    def freeze(self, seconds: float) -> None:
        if self.machine is not None and not self.frozen:
            self._note(f"freezes for {seconds:.2f} s")
            self._watch.saw("a router froze")
            self.frozen = True
            self._timeline.at(self._timeline.now + seconds, self._thaw, self._lives)

    def heal(self) -> None:
        self.start()
        self._thaw(self._lives)

    def _thaw(self, life: int) -> None:
        """Handle the messages that came while the router was frozen, then continue."""
        if life != self._lives or not self.frozen:
            return
        self._note("goes on")
        self.frozen = False
        inbox, self._inbox = self._inbox, []
        for action in inbox:
            action()
        self._stalls.was_frozen()
        self._received_at.update(dict.fromkeys(self._wires, self._timeline.now))
        self.fit.resumed(self._timeline.now)
        self._dispatch(Resumed())
        self._armed = None
        self._beat(life)
        self._timeline.at(self._timeline.now, self._rearm, life)

    def _rearm(self, life: int) -> None:
        if life == self._lives and self.machine is not None:
            self._arm()

    def accepts(self) -> bool:
        return self.machine is not None and not self.frozen

    def dialled(self, wire: Wire) -> None:
        self._dialled[wire.number] = wire

    # Clients

    def submit(self, event: SubmitRequest | WithdrawRequest) -> None:
        """Handle a client's event; a frozen router handles it later. The process must be alive."""
        if self.frozen:
            self._inbox.append(lambda: self.submit(event))
        else:
            self._dispatch(event)

    # Sessions

    def arrived(self, wire: Wire, message: Any) -> None:
        if self.machine is None or (wire.number not in self._wires and wire.number not in self._dialled):
            if self.machine is not None and message is not HANGUP and type(message) is not InstanceHello:
                if self.frozen:
                    self._inbox.append(lambda: self.arrived(wire, message))
                    return
                self._watch.saw("a message of an earlier session reached a router")
                self._dispatch(InstanceMessage(wire.number, message))
            return
        if self.frozen:
            self._inbox.append(lambda: self.arrived(wire, message))
            return
        if message is HANGUP:
            self._lose(wire.number)
            self._dispatch(InstanceLeft(wire.number, "the session is over"))
            return
        self._received_at[wire.number] = self._timeline.now
        self._stalls.received(wire.number, message, self._timeline.now)
        self._preemptions.received(wire.number, message, self._timeline.now)
        self._paths.received(wire.number, message, self._timeline.now)
        self.fit.received(wire.number, message, self._timeline.now)
        self._given.received(wire.number, message)
        if type(message) is InstanceHello:
            self._wires[wire.number] = self._dialled.pop(wire.number)
            self._sizes[wire.number] = self._timeline.now, message.ready.blocks
            self._dispatch(InstanceJoined(wire.number, message))
            if wire.number in self._wires:
                wire.send("down", RouterHello(self.name, self.config.beat_seconds, self.config.lapse_seconds, CAPABILITIES))
            return
        if type(message) in (RefusedRequest, Released):  # the router has nothing of the session any more
            self._assigned.get(message.request, {}).pop(wire.number, None)
        self._dispatch(InstanceMessage(wire.number, message))

    def _lose(self, session: Session) -> None:
        if session in self._sizes and session in self._wires:
            self._sizes[session] = self._timeline.now, self._sizes[session][1]
        self._wires.pop(session, None)
        self._dialled.pop(session, None)
        self._stalls.gone(session)
        self._preemptions.gone(session)
        self._paths.gone(session)
        self.fit.gone(session, self._timeline.now)
        self._given.gone(session)
        for assigned in self._assigned.values():
            assigned.pop(session, None)

    def _beat(self, life: int) -> None:
        if life == self._lives and self.machine is not None and not self.frozen:
            for wire in list(self._wires.values()):
                wire.send("down", RouterHeartbeat())
            self._timeline.at(self._timeline.now + self.config.beat_seconds * 0.9, self._beat, life)

    # The machine

    def _dispatch(self, event: ClusterEvent, at_least: float = 0.0) -> None:
        machine = self.machine
        if machine is None:
            return
        self.events += 1
        readable = not any(instance.paths for instance in machine.membership.instances.values())
        effects = machine.handle(event, Instant(max(self._clock.now(), at_least)))
        if type(event) is SubmitRequest:
            self._line.arrives(event.request)
            self._line.answered(event.request, machine.queued, effects)
        elif type(event) is InstanceJoined:
            self.fit.joins(event, effects, self._timeline.now)
        for effect in effects:
            self._timeline.record(effect)
            self._line.effect(effect)
            match effect:
                case SendToInstance(session, message):
                    self._check_sent(session, message)
                    self._line.sent(message, readable=readable)
                    self._stalls.sent(session, message, self._timeline.now)
                    self._preemptions.sent(session, message, self._timeline.now)
                    self._paths.sent(session, message, self._timeline.now)
                    self.fit.sent(session, message)
                    self._given.sent(session, message)
                    if (wire := self._wires.get(session)) is not None:
                        wire.send("down", message)
                case Deliver(emit):
                    self._check_rows(emit)
                    self.clients.delivered(emit)
                case SchedulePass():  # behind all other events of this moment
                    self._timeline.at(self._timeline.now, self._run_pass, self._lives)
                case RejectRequest():
                    self._assigned.pop(effect.request, None)
                    self.clients.turned_away(effect)
                case FailRequest():
                    self.clients.broken_off(effect)
                case CloseSession():
                    self._disconnect(effect, refused=type(event) is InstanceJoined and event.session == effect.session)
        self._given.after(effects)
        self._paths.given_up(machine.stats.paths_given_up)
        if type(event) is InstanceMessage and type(event.message) is Heartbeat:
            check_idle(machine, self.config)
        if machine.open_requests and machine.next_deadline() is None:
            raise InvariantBroken(f"{self.name}: requests are open, and no deadline is armed", invariant=41)
        self._arm()

    def _run_pass(self, life: int) -> None:
        if life != self._lives or self.machine is None:
            return
        if self.frozen:
            self._inbox.append(lambda: self._run_pass(life))
        else:
            self._dispatch(RunPass())
            if self.machine is not None:
                check_idle(self.machine, self.config)

    def seen_with(self, blocks: int) -> float:
        """Time at which an instance of at least `blocks` was last connected, in this life of the router. A request that needs
        it is rejected only after the instance had time to come back."""
        here = [self._timeline.now for session, (_, held) in self._sizes.items() if held >= blocks and session in self._wires]
        return max([*here, *(at for at, held in self._sizes.values() if held >= blocks)], default=float("-inf"))

    def _disconnect(self, effect: CloseSession, *, refused: bool) -> None:
        session, reason = effect.session, effect.reason
        self._note(f"disconnects session {session}: {reason}")
        if "nothing was received" in reason:
            self._watch.saw("an instance lapsed")
        if "joined again" in reason:
            self._watch.saw("an instance was back before its earlier session was over")
        if (wire := self._wires.get(session)) is not None:
            if refused:
                wire.send("down", InstanceRefused(reason, effect.retry_seconds))
                del self._sizes[session]  # the instance was never part of the cluster
            wire.close("down")
            self._lose(session)

    def _check_rows(self, emit: Emit) -> None:
        """44: no token of an attempt is delivered once the next has begun."""
        for request, attempt, *_ in emit.tokens:
            if attempt < self._attempts[request]:
                raise InvariantBroken(f"{request}: a token of attempt {attempt} is taken", invariant=44)

    def _check_sent(self, session: Session, message: Any) -> None:
        """43: an attempt has ended, or is sent a `Forget`, before the next begins. 46: silent instances get no new work."""
        if isinstance(message, Forget):
            self._assigned.get(message.request, {}).pop(session, None)
        request = request_of(message)
        if request is None:
            return
        assigned = self._assigned.setdefault(request.id, {})
        self._attempts[request.id] = request.attempt
        for index in request.wanted:
            if list(request.delivered(index)) != self._watch.requests[request.id].delivered[index]:
                raise InvariantBroken(f"{request.id}.{index} is sent with other tokens than its client has", invariant=32)
        for other, attempt in assigned.items():
            if attempt > request.attempt or (attempt < request.attempt and other != session):
                raise InvariantBroken(
                    f"{request.id}: attempt {request.attempt} begins, {attempt} is still with session {other}", invariant=43
                )
        silent = self._timeline.now - self._received_at[session]
        chosen_now = not isinstance(message, Prefill) and session not in assigned
        if chosen_now and silent > self.config.suspect_seconds * 1.02 + SILENT_MARGIN:
            raise InvariantBroken(f"{request.id} is given to one that was silent for {silent:.2f} s", invariant=46)
        assigned[session] = request.attempt

    def _arm(self) -> None:
        deadline = self.machine.next_deadline() if self.machine is not None else None
        if deadline is None:
            return
        due = max(self._timeline.now, self._clock.virtual(deadline))
        if self._armed is None or due < self._armed:
            self._armed = due
            self._timeline.at(due, self._tick, (due, self._lives))

    def _tick(self, entry: tuple[float, int]) -> None:
        due, life = entry
        if life != self._lives or self._armed != due or self.frozen or self.machine is None:
            return
        self._armed = None
        deadline = self.machine.next_deadline()
        if deadline is None:
            return
        if self._clock.virtual(deadline) <= self._timeline.now + 1e-9:
            self._dispatch(RouterTick(), at_least=deadline)
            self._check_queue_seconds()
            armed = self.machine.next_deadline()
            if armed is not None and armed <= deadline:
                raise InvariantBroken(f"{self.name}: a deadline that is over is still armed", invariant=35)
        else:
            self._arm()

    def _check_queue_seconds(self) -> None:
        """41: no request waits in the queue for longer than `queue_seconds_max`."""
        for routed in self.machine.coordinator.queue.routed_requests() if self.machine is not None else []:
            waited = self.machine.coordinator.now - routed.queued_at if self.machine is not None else 0.0
            if waited > self.config.queue_seconds_max:
                raise InvariantBroken(f"{routed!r} waits in the queue for {waited:.2f} s", invariant=41)

    # Queries

    @property
    def sessions(self) -> int:
        return len(self._wires)

    @property
    def is_whole(self) -> bool:
        """Whether the router works and knows of every ended session and every resumed instance."""
        if self.machine is None or not self.accepts() or not all(wire.open for wire in self._wires.values()):
            return False
        return all(instance.mode == "serving" for instance in self.machine.membership.instances.values())

    def at_rest(self) -> None:
        if self.machine is None:
            raise InvariantBroken(f"{self.name} was never started again", invariant=35)
        self.machine.check()
        if not self.machine.idle:
            raise InvariantBroken(f"{self.name} at rest: {self.machine.open_requests} requests", invariant=9)
        check_router_rest(self.machine, self.config)

    def _note(self, text: str) -> None:
        self._timeline.note(self.name, text)
