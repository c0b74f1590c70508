"""Sessions of an instance with its routers: dial, send heartbeats and effects, abort the requests of a lost session.

This models callers.py and router_links.py of runtime/engine: to the machine, a request's id is the router's id behind the tag
of the session ("3|r1"), and a session that ends takes its requests with it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec.structs import replace

from baton.core.effects import Effect, ModeChanged, Refuse, RestartWorker, SendToCache
from baton.core.events import Abort, Submit
from baton.core.heartbeat_times import REQUESTS, HeartbeatTimes
from baton.core.redial_times import STEADY_SECONDS, DialOutcome, RedialTimes
from baton.errors import InvariantBroken
from baton.protocol.control import AbortRequest, InstanceReady, InstanceStats, RefusedRequest
from baton.protocol.handoff import Forget, PeerOffer, Prefill, Release, Released, Reserve
from baton.protocol.ids import RequestId
from baton.protocol.instance import (
    HELD_CLASSES_MAX,
    PREEMPTED_NAMED_MAX,
    Heartbeat,
    InstanceHello,
    InstanceRefused,
    RouterHeartbeat,
    RouterHello,
)
from baton.protocol.moves import BlockMove
from baton.protocol.output import Emit
from baton.protocol.request import FinishReason, GenerateRequest
from baton.protocol.versions import CACHED_KEYS
from baton.sim.cluster.digests import SimulatedFeed
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.cluster.wires import HANGUP, Wire
from baton.sim.engine import Outward, SimulatedEngine
from baton.sim.instance import SimulatedInstance
from baton.sim.plans import MARK, untagged
from baton.sim.prompts import stream
from baton.sim.scenario import VOCAB, Scenario
from baton.sim.timeline import Timeline

REDIAL_SECONDS = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Waits after failed dials and lost sessions. Those after refusals are the core's (core/redial_times.py)."""


class RouterLink:
    """An instance's state of one router."""

    __slots__ = (
        "beats",
        "dial_at",
        "digest",
        "failures",
        "lapse_seconds",
        "opened",
        "received_at",
        "redial",
        "tag",
        "wire",
    )

    def __init__(self, rng: Random) -> None:
        self.wire: Wire | None = None
        self.redial = RedialTimes(rng)
        self.received_at = 0.0
        self.beats = HeartbeatTimes(0.0, 0.25)
        self.lapse_seconds = 2.0
        self.tag = ""
        "Prefix of the instance's request ids in this session."
        self.failures = 0
        "Failed dials in a row."
        self.opened = False
        "Whether the router has accepted the instance in this session."
        self.digest: SimulatedFeed | None = None
        "Feed of cached keys to the router. None: no digest, or the session is not open."
        self.dial_at = 0.0
        "Earliest time of the next dial."


class SimulatedLinks:
    def __init__(
        self,
        instance: SimulatedInstance,
        scenario: Scenario,
        timeline: Timeline,
        watch: ClusterWatch,
        dial: Callable[[SimulatedLinks, int], Wire | None],
        routers: int,
    ) -> None:
        self.instance = instance
        self._scenario = scenario
        self.links = [RouterLink(self._rng(router)) for router in range(routers)]
        tiers = scenario.of_instance(instance.kind).config().tiers
        self._adopt_seconds_max = tiers.adopt_seconds_max if instance.role != "mixed" else 0.0
        self._measured = scenario.cluster is not None and scenario.cluster.measured
        self._timeline = timeline
        self._watch = watch
        self._dial = dial
        self._inbox: list[tuple[Wire, Any]] = []
        self._beats = 0

    def _rng(self, router: int) -> Random:
        return stream(self._scenario.seed, f"refused dials {self.instance.number} {router} {self.instance.lives}")

    # The engine's life

    def begin(self, engine: SimulatedEngine) -> None:
        self._timeline.at(self._timeline.now, self._beat, engine)

    def close(self) -> bool:
        opened = any(link.opened for link in self.links)
        self._inbox.clear()
        for router, link in enumerate(self.links):
            if link.wire is not None:
                link.wire.close("up", in_order=False)
                link.wire = None
            link.failures, link.opened, link.dial_at = 0, False, 0.0
            link.redial = RedialTimes(self._rng(router))
        return opened

    def thaw(self, engine: SimulatedEngine) -> None:
        inbox, self._inbox = self._inbox, []
        for wire, message in inbox:
            self.arrived(wire, message)
        self._beat(engine)

    # Sessions

    def connect(self, router: int) -> None:
        """Dial the router until it accepts a session."""
        engine, link = self.instance.engine, self.links[router]
        if engine is None or link.wire is not None or self._timeline.now < link.dial_at:
            return
        wire = None if engine.frozen else self._dial(self, router)
        if wire is None:
            wait = REDIAL_SECONDS[min(link.failures, len(REDIAL_SECONDS) - 1)]
            link.failures += 1
            self._timeline.at(self._timeline.now + wait, self._redial, (engine, router))
            return
        link.wire, link.received_at, link.failures = wire, self._timeline.now, 0
        link.tag, link.opened, link.digest = f"{wire.number}{MARK}", False, None
        wire.send("up", self._hello(engine, refused=link.redial.refused))

    def _redial(self, entry: tuple[SimulatedEngine, int]) -> None:
        if entry[0] is self.instance.engine:
            self.connect(entry[1])

    def _hello(self, engine: SimulatedEngine, *, refused: bool) -> InstanceHello:
        spec, size = self.instance.spec, self._scenario.block_size
        ready = InstanceReady(spec.blocks, size, spec.slots, VOCAB, spec.blocks * size + 1, identity=engine.identity)
        peers = (self.instance.address,) if self.instance.role != "mixed" else ()
        seconds = self._adopt_seconds_max
        return InstanceHello(
            self.instance.name, self.instance.lives, self.instance.role, ready, b"layout", peers,
            adopt_seconds_max=seconds, refused=refused, step_tokens=spec.tokens_per_step,
            capabilities=(CACHED_KEYS,) if engine.instance.board.digest is not None else (),
        )  # fmt: skip

    def arrived(self, wire: Wire, message: Any) -> None:
        engine = self.instance.engine
        router = next((place for place, link in enumerate(self.links) if link.wire is wire), None)
        if engine is None:
            return
        if router is None:
            self._watch.saw("a message of an earlier session reached an instance")
            return
        if engine.frozen:
            self._inbox.append((wire, message))
            return
        link = self.links[router]
        link.received_at = self._timeline.now
        if message is HANGUP or type(message) is InstanceRefused:
            if type(message) is InstanceRefused and not link.opened:
                self._refused(link, message)
            self._session_over(router, "the router hung up")
        elif type(message) is RouterHello:
            link.opened = True
            if self.instance.is_stray:
                self._watch.saw("a stray was taken")
                self._watch.happened("stray")
            link.beats = HeartbeatTimes(self._timeline.now, message.beat_seconds)
            link.lapse_seconds = message.lapse_seconds
            digest = engine.instance.board.digest
            if digest is not None and CACHED_KEYS in message.capabilities:
                link.digest = SimulatedFeed(digest, self._scenario, engine.identity)
            self._send_stats(wire)
        elif type(message) is not RouterHeartbeat:
            self._take(engine, link.tag, message)
            if type(message) in REQUESTS:
                self._on_request_of(engine, link.tag)

    def _refused(self, link: RouterLink, message: InstanceRefused) -> None:
        end = DialOutcome(message.reason, refused=True, retry_seconds=message.retry_seconds)
        link.dial_at = self._timeline.now + link.redial.after(end)
        if not self.instance.is_stray:  # the other instances take over its requests
            self._watch.happened("not taken")

    def _take(self, engine: SimulatedEngine, tag: str, message: Any) -> None:
        self._watch.sent_to_instance(self.instance.number, engine, message)
        match message:
            case GenerateRequest():
                engine.ask(Submit(replace(message, id=RequestId(tag + message.id))))
            case AbortRequest():
                stop = message.reason is FinishReason.STOP
                ours = RequestId(tag + message.request)
                engine.dispatch(Abort(ours, message.index, FinishReason.STOP if stop else FinishReason.ABORT))
            case Reserve(request=request) | Prefill(request=request):
                engine.ask(replace(message, request=replace(request, id=RequestId(tag + request.id))))
            case PeerOffer(offer=offer):
                engine.dispatch(replace(message, offer=replace(offer, request=RequestId(tag + offer.request))))
            case Forget():
                ours = RequestId(tag + message.request)
                engine.dispatch(Forget(ours, message.attempt))
                if ours in engine.instance.view.request_ids():
                    raise InvariantBroken(
                        f"{self.instance.name}: {message.request} is to be forgotten, and is not", invariant=43
                    )
            case Release() | Released():
                engine.dispatch(replace(message, request=RequestId(tag + message.request)))

    def _session_over(self, router: int, why: str) -> None:
        """End the session: abort its requests, and dial again later."""
        self.instance.note(f"has lost router {router}: {why}")
        link = self.links[router]
        tag, link.wire, link.tag = link.tag, None, ""
        if link.opened:
            link.redial.after(DialOutcome(why, open_seconds=STEADY_SECONDS))
        if self.instance.engine is not None:
            for request in self.instance.engine.instance.view.request_ids():
                if request.startswith(tag):
                    self.instance.engine.dispatch(Abort(request))
            again = max(self._timeline.now + REDIAL_SECONDS[0], link.dial_at)
            self._timeline.at(again, self._redial, (self.instance.engine, router))

    def has_other_weights(self) -> None:
        """End all sessions: routers have promised blocks of the old weights to others (runtime/engine/router_links.py)."""
        self._watch.saw("a worker came back with other weights")
        if self._scenario.cluster is not None and self._scenario.cluster.front and self.instance.engine is not None:
            if (wire := self.links[0].wire) is not None:
                wire.send("up", self._hello(self.instance.engine, refused=False).ready)
            return
        for router, link in enumerate(self.links):
            if link.wire is not None:
                link.wire.close("up")
                self._session_over(router, "it computes with other weights now")

    # Messages that the instance sends

    def performs(self, effect: Effect) -> None:
        match effect:
            case RestartWorker():
                self.instance.note(f"restarts its worker: {effect.reason}")
            case SendToCache(BlockMove(kind="pull")):
                self._watch.pulls(self.instance.number)

    def gets(self, effects: list[Outward]) -> None:
        for effect in effects:
            match effect:
                case Emit():
                    self._watch.emitted(effect, self.instance.loaded)
                    self._send_emit(effect)
                case Refuse():
                    self._watch.saw(f"an instance refused: {effect.refused.reason}")
                    request = untagged(effect.request)
                    self._send(effect.request, RefusedRequest(request, effect.refused, effect.attempt))
                case ModeChanged():
                    for link in self.links:
                        if link.wire is not None and self.instance.engine is not None:
                            link.wire.send("up", self._state(self.instance.engine, link))
                            self._send_stats(link.wire)
                case _:
                    bare = replace(effect, request=untagged(effect.request))
                    self._watch.sent_by_instance(self.instance.engine, bare)
                    self._send(effect.request, bare)

    def _send(self, request: RequestId, message: Any) -> None:
        for link in self.links:
            if link.wire is not None and request.startswith(link.tag):
                link.wire.send("up", message)

    def _send_emit(self, emit: Emit) -> None:
        """Send each router the rows of its own requests."""
        for link in self.links:
            if link.wire is None:
                continue
            tag, cut = link.tag, len(link.tag)
            part = Emit(
                [(RequestId(row[0][cut:]), *row[1:]) for row in emit.tokens if row[0].startswith(tag)],
                [replace(end, request=RequestId(end.request[cut:])) for end in emit.ended if end.request.startswith(tag)],
                [(RequestId(entry[0][cut:]), *entry[1:]) for entry in emit.logprobs if entry[0].startswith(tag)],
                [replace(one, request=RequestId(one.request[cut:])) for one in emit.begun if one.request.startswith(tag)],
            )
            if part.tokens or part.ended or part.logprobs:
                link.wire.send("up", part)

    # Heartbeats

    def _beat(self, engine: SimulatedEngine) -> None:
        """Send a heartbeat to each router several times per second; end sessions whose router is silent for too long."""
        if engine is not self.instance.engine or engine.frozen:
            return
        self._beats += 1
        if engine.was_ready:
            engine.probe_worker()
            for router, link in enumerate(self.links):
                if link.wire is None:
                    if not link.failures:
                        self.connect(router)
                elif self._timeline.now - link.received_at > link.lapse_seconds:
                    self._watch.saw("a router lapsed")
                    link.wire.close("up")
                    self._session_over(router, "nothing was received")
                else:
                    link.wire.send("up", self._state(engine, link))
                    link.beats.on_sent(self._timeline.now)
                    self._send_digest(link)
        self._timeline.at(self._timeline.now + self.links[0].beats.seconds * 0.9, self._beat_again, (engine, self._beats))

    def _beat_again(self, entry: tuple[SimulatedEngine, int]) -> None:
        if entry[1] == self._beats:
            self._beat(entry[0])

    def _on_request_of(self, engine: SimulatedEngine, tag: str) -> None:
        """The other routers learn of the request from an early heartbeat."""
        for link in self.links:
            if link.opened and link.wire is not None and link.tag != tag:
                before = link.beats.early_due
                link.beats.on_request_of_another(self._timeline.now)
                if before is None and link.beats.early_due is not None:
                    self._timeline.at(link.beats.early_due, self._beat_early, (engine, link, link.wire))

    def _beat_early(self, entry: tuple[SimulatedEngine, RouterLink, Wire]) -> None:
        engine, link, wire = entry
        due = link.beats.early_due
        if engine is not self.instance.engine or engine.frozen or link.wire is not wire or due is None:
            return
        if due <= self._timeline.now:
            self._watch.saw("a heartbeat was sent early")
            wire.send("up", self._state(engine, link))
            link.beats.on_sent(self._timeline.now, early=True)

    def _state(self, engine: SimulatedEngine, link: RouterLink) -> Heartbeat:
        view = engine.instance.view
        load = view.load()
        state, mode = engine.instance.worker.state.value, engine.instance.mode.value
        stalled = engine.is_stalled_now()
        if state != "ready":
            fault = f"the worker is {state}"
        else:
            fault = "the worker is stalled" if stalled else f"it is {mode}" if mode != "serving" else engine.worker_fault
        return Heartbeat(
            fault,
            engine.instance.prompt_token_seconds if self._measured else 0.0,
            view.blocks_available,
            self.instance.spec.slots - load.slots_taken,
            view.queued_tokens,
            load.running,
            stalled,
            tuple(untagged(each) for each in view.preempted_requests(PREEMPTED_NAMED_MAX) if each.startswith(link.tag)),
            view.held_blocks(HELD_CLASSES_MAX),
        )

    def _send_digest(self, link: RouterLink) -> None:
        """Send what has changed in the cache along with a heartbeat."""
        if link.wire is not None and link.digest is not None and (message := link.digest.next()) is not None:
            self._watch.saw("a digest was sent" if not message.whole else "a digest began anew")
            link.wire.send_along("up", message)

    def _send_stats(self, wire: Wire) -> None:
        if self.instance.engine is not None:
            wire.send("up", InstanceStats(mode=self.instance.engine.instance.mode.value))
