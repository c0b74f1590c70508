"""46: requests on a stalled worker that another instance could continue are moved there once the stall has lasted
`lapse_seconds`; but perhaps not a second time without a token between, nor where one more loss ends the request. Checked on
the messages of one router.
"""

from __future__ import annotations

from typing import Any

from baton.config import RouterConfig
from baton.core.cluster.events import Session
from baton.errors import InvariantBroken
from baton.protocol.control import RefusedRequest
from baton.protocol.handoff import Forget, Reserve
from baton.protocol.instance import Heartbeat, InstanceHello
from baton.protocol.request import GenerateRequest
from baton.sim.cluster.watch import ClusterWatch

DRIFT = 1.02
MARGIN_SECONDS = 0.3
"""Seconds for a heartbeat, and for the router's own check."""
WELL_SECONDS = 0.75
"""Seconds without a reported fault after which an instance can be chosen: the router avoids it after a refusal."""
RECEIVED_SECONDS = 0.5


class LastReports:
    """Last reports of an instance."""

    __slots__ = ("at", "hello", "stalled_before", "stalled_since", "well_since")

    def __init__(self, hello: InstanceHello, now: float) -> None:
        self.hello = hello
        self.at = now
        self.stalled_since: float | None = None
        self.well_since: float | None = None
        self.stalled_before = False
        "Whether the worker was stalled when the router froze: how long the router counts for that is not known here."


class StallWatch:
    def __init__(self, config: RouterConfig, watch: ClusterWatch) -> None:
        self._lapse_seconds = config.lapse_seconds
        self._losses_max = config.migrations_max
        self._watch = watch
        self._instances: dict[Session, LastReports] = {}
        self._decoders: dict[str, Session] = {}
        "Session of the instance that answers a request, by request."
        self._moved: dict[str, int] = {}
        "Number of tokens that the client had at the last move, by request."
        self._due: dict[str, float] = {}
        "When a request was first seen that has to be moved. A token that it gets meanwhile makes it movable again."
        self._attempts: dict[str, int] = {}
        "Attempt that was sent last, by request."
        self._refused: dict[str, int] = {}
        "Attempt that an instance refused last, by request."
        self._losses: dict[str, int] = {}
        "Number of attempts that ended without a refusal, by request. Some of them may be no losses."
        self._unfit: dict[str, None] = {}
        "Requests that some instance can never hold. Which others can is not known here."

    def clear(self) -> None:
        """Forget everything: the router restarts without state."""
        self._instances.clear()
        self._decoders.clear()
        self._due.clear()
        self._attempts.clear()
        self._refused.clear()
        self._losses.clear()

    def was_frozen(self) -> None:
        """Forget since when instances are stalled or well: the router was frozen."""
        self._due.clear()
        for instance in self._instances.values():
            instance.stalled_before |= instance.stalled_since is not None
            instance.stalled_since = instance.well_since = None

    def gone(self, session: Session) -> None:
        self._instances.pop(session, None)

    # Messages that the router sends

    def sent(self, session: Session, message: Any, now: float) -> None:
        match message:
            case GenerateRequest():
                self._begins(message, session)
            case Reserve(request=request):
                self._begins(request, session)
            case Forget():
                self._due.pop(message.request, None)
                if self._decoders.get(message.request) == session:
                    del self._decoders[message.request]
                if self._may_be_moved(session, now) and not self._is_over(message.request):
                    self._moved[message.request] = self._tokens(message.request)
                    self._watch.saw("a worker was stalled for long, and its requests were moved")

    def _begins(self, request: GenerateRequest, session: Session) -> None:
        self._decoders[request.id] = session
        before = self._attempts.get(request.id, request.attempt)
        if before < request.attempt and self._refused.get(request.id) != before:
            self._losses[request.id] = self._losses.get(request.id, 0) + 1
        self._attempts[request.id] = request.attempt

    # Messages that the router receives

    def received(self, session: Session, message: Any, now: float) -> None:
        instance = self._instances.get(session)
        if type(message) is InstanceHello:
            self._instances[session] = LastReports(message, now)
        elif type(message) is RefusedRequest:
            self._decoders.pop(message.request, None)
            self._refused[message.request] = message.attempt
            if message.refused.reason.startswith("never"):
                self._unfit[message.request] = None
        elif instance is not None:
            instance.at = now
            if type(message) is Heartbeat:
                self._on_beat(instance, message, now)
                if self._lasts(session, now) > self._lapse_seconds * DRIFT + MARGIN_SECONDS:
                    self._check(session, now)

    def _on_beat(self, instance: LastReports, beat: Heartbeat, now: float) -> None:
        if not beat.stalled:
            instance.stalled_since, instance.stalled_before = None, False
        elif instance.stalled_since is None:
            instance.stalled_since = now
        if beat.fault:
            instance.well_since = None
        elif instance.well_since is None:
            instance.well_since = now

    def _lasts(self, session: Session, now: float) -> float:
        instance = self._instances.get(session)
        return 0.0 if instance is None or instance.stalled_since is None else now - instance.stalled_since

    def _may_be_moved(self, session: Session, now: float) -> bool:
        """Whether a `Forget` to this session may be a move off a stalled worker."""
        instance = self._instances.get(session)
        return instance is not None and (instance.stalled_before or self._lasts(session, now) > self._lapse_seconds / DRIFT)

    def _is_over(self, request: str) -> bool:
        return self._watch.requests[request].is_answered

    def _tokens(self, request: str) -> int:
        return sum(map(len, self._watch.requests[request].delivered))

    def _check(self, session: Session, now: float) -> None:
        for request, decoder in self._decoders.items():
            if decoder != session:
                continue
            stays = request in self._unfit or self._moved.get(request) == self._tokens(request) or self._is_last(request)
            if self._is_over(request) or stays or not self._has_choice(request, now):
                self._due.pop(request, None)
            elif now - self._due.setdefault(request, now) > MARGIN_SECONDS:
                raise InvariantBroken(f"{request} waits for a stalled worker, and others work", invariant=46)

    def _is_last(self, request: str) -> bool:
        """Whether one more loss may end the request with an error."""
        return self._losses.get(request, 0) >= self._losses_max

    def _has_choice(self, request: str, now: float) -> bool:
        client = self._watch.requests[request].client
        for instance in self._instances.values():
            ready = instance.hello.ready
            needed = -(-(len(client.prompt) + client.max_tokens - 1) // ready.block_size)
            well = instance.well_since is not None and now - instance.well_since > WELL_SECONDS
            if well and now - instance.at < RECEIVED_SECONDS and needed <= ready.blocks:
                return True
        return False
