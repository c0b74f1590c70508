"""56: an instance that preempted a request is its last choice for a while. Checked on the messages of one router.

    Beat(preempted=r) from S  -->  r is marked: not S, while others could have it
    r is given to S again     -->  wrong, if some other instance O was as good as any: well, empty enough, and new to r

The policy orders the others, so the router is wrong only if no rule excludes O: O works, has reported so a moment ago, was
sent nothing since, has room for all of r, never had r (so it neither refused nor lost nor preempted it), and was itself lost
at most `LOSSES_MAX` times. An O that only decodes counts only where r has a prefill instance.
"""

from __future__ import annotations

from typing import Any, Final

from baton.config import RouterConfig
from baton.core.cluster.events import Session
from baton.errors import InvariantBroken
from baton.protocol.control import InstanceStats, RefusedRequest
from baton.protocol.handoff import Forget, Prefill, Reserve
from baton.protocol.instance import Heartbeat, InstanceHello
from baton.protocol.request import GenerateRequest
from baton.sim.cluster.watch import ClusterWatch

DRIFT: Final = 1.02
RECEIVED_SECONDS: Final = 0.5
REFUSED_SECONDS: Final = 0.75
"""Seconds after a refusal in which the router may avoid an instance."""
LOSSES_MAX: Final = 2
"""Number of losses above which an instance may be a last choice too."""


class Known:
    """Last reports of the instance behind a session, and whether it was sent work since."""

    __slots__ = ("at", "beat", "hello", "mode", "refused_at")

    def __init__(self, hello: InstanceHello) -> None:
        self.hello = hello
        self.at = 0.0
        self.mode = "serving"
        self.beat: Heartbeat | None = None
        "Last heartbeat since the instance was sent work. None: there is none."
        self.refused_at = float("-inf")


class PreemptWatch:
    def __init__(self, config: RouterConfig, watch: ClusterWatch) -> None:
        self._seconds = config.preempted_seconds / DRIFT
        self._watch = watch
        self._instances: dict[Session, Known] = {}
        self._lost: dict[str, int] = {}
        "Number of ended sessions, by name."
        self._decoders: dict[str, Session] = {}
        "Session of the instance that answers a request, by request."
        self._had: dict[str, dict[str, None]] = {}
        "Names of all instances that were sent any part of a request, by request."
        self._marks: dict[tuple[str, str], float] = {}
        "Time of the last report of a preemption, by request and name of the instance."

    def clear(self) -> None:
        """Forget everything: the router restarts without state."""
        for table in (self._instances, self._lost, self._decoders, self._had, self._marks):
            table.clear()

    def gone(self, session: Session) -> None:
        instance = self._instances.pop(session, None)
        if instance is not None:
            self._lost[instance.hello.name] = self._lost.get(instance.hello.name, 0) + 1

    # Messages that the router receives

    def received(self, session: Session, message: Any, now: float) -> None:
        if type(message) is InstanceHello:
            self._instances[session] = Known(message)
        if (instance := self._instances.get(session)) is None:
            return
        instance.at = now
        if type(message) is Heartbeat:
            instance.beat = message
            for request in message.preempted:
                if self._decoders.get(request) == session:
                    self._marks[request, instance.hello.name] = now
        elif type(message) is InstanceStats:
            instance.mode = message.mode
        elif type(message) is RefusedRequest:
            instance.refused_at = now
            if self._decoders.get(message.request) == session:
                del self._decoders[message.request]

    # Messages that the router sends

    def sent(self, session: Session, message: Any, now: float) -> None:
        match message:
            case GenerateRequest():
                self._chosen(session, message, now, paired=False)
            case Reserve(request=request):
                self._chosen(session, request, now, paired=True)
            case Prefill(request=request):
                self._sent(session, request.id)
            case Forget():
                if self._decoders.get(message.request) == session:
                    del self._decoders[message.request]

    def _chosen(self, session: Session, request: GenerateRequest, now: float, *, paired: bool) -> None:
        instance = self._instances.get(session)
        if instance is not None and self._decoders.get(request.id) != session:  # not only a lease renewal
            marked_at = self._marks.get((request.id, instance.hello.name))
            if marked_at is None and any(marked == request.id for marked, _ in self._marks):
                self._watch.saw("a request that was preempted goes on elsewhere")
            elif marked_at is not None and now - marked_at < self._seconds:
                self._check_no_other(instance, request, now, paired)
        self._decoders[request.id] = session
        self._sent(session, request.id)

    def _sent(self, session: Session, request: str) -> None:
        if (instance := self._instances.get(session)) is not None:
            instance.beat = None
            self._had.setdefault(request, {})[instance.hello.name] = None

    def _check_no_other(self, chosen: Known, request: GenerateRequest, now: float, paired: bool) -> None:
        for session, other in self._instances.items():
            fits = other.hello.role == "mixed" or (paired and other.hello.role == "decode")
            if fits and self._is_well(other, now) and self._has_room(session, other, request):
                raise InvariantBroken(
                    f"{request.id} goes back to {chosen.hello.name}, which preempted it, and not to {other.hello.name}",
                    invariant=56,
                )

    def _is_well(self, instance: Known, now: float) -> bool:
        return (
            instance.beat is not None
            and not instance.beat.fault
            and instance.mode == "serving"
            and now - instance.at < RECEIVED_SECONDS
            and now - instance.refused_at > REFUSED_SECONDS
            and self._lost.get(instance.hello.name, 0) <= LOSSES_MAX
        )

    def _has_room(self, session: Session, instance: Known, request: GenerateRequest) -> bool:
        """Whether the whole request fits, counting nothing as cached, beside the requests that the router has placed there."""
        ready, beat = instance.hello.ready, instance.beat
        if beat is None or instance.hello.name in self._had.get(request.id, {}):
            return False
        tokens = len(request.prompt) + request.sampling.max_tokens
        blocks = -(-(tokens + 1) // ready.block_size) + request.n
        ours = sum(self._sequences(other) for other, decoder in self._decoders.items() if decoder == session)
        fits = not 0 < ready.context_tokens < tokens and blocks <= ready.blocks
        return fits and beat.slots_free > 0 and ours < ready.slots and beat.blocks_available >= blocks

    def _sequences(self, request: str) -> int:
        return sum(end is None for end in self._watch.requests[request].ended)
