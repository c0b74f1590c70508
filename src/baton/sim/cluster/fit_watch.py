"""60: all instances of a router have one identity; an instance that joins is accepted if and only if it fits. 59, as far as a
router decides it: an answer that has begun is never given to an instance with other weights. Both are checked against the
messages that one router receives and sends.

    others are connected      the instance is accepted if it has their identity; else it is refused, and replaces no other. An
                              instance with the name of another incarnation that is alive is refused too
    none is connected         the instance is accepted, except in two cases, which wait no_instance_seconds:
      others left just before    its identity and its name differ from theirs; an instance that has itself dialled again with
                                 other weights does not count
      none was ever connected    it was refused before, by this router or an earlier incarnation of the router
"""

from __future__ import annotations

from typing import Any, Final

from baton.config import RouterConfig
from baton.core.cluster.events import CloseSession, InstanceJoined, Session
from baton.errors import InvariantBroken
from baton.protocol.control import InstanceStats
from baton.protocol.handoff import request_of
from baton.protocol.instance import InstanceHello
from baton.sim.cluster.watch import ClusterWatch
from baton.sim.tags import identity_of

DRIFT: Final = 1.02


class ConnectedInstance:
    """A connected instance."""

    __slots__ = ("hello", "mode")

    def __init__(self, hello: InstanceHello) -> None:
        self.hello = hello
        self.mode = "serving"


class FitWatch:
    def __init__(self, config: RouterConfig, watch: ClusterWatch) -> None:
        self._wait_seconds = config.no_instance_seconds
        self._watch = watch
        self._here: dict[Session, ConnectedInstance] = {}
        self._lost: dict[str, tuple[float, bytes]] = {}
        "Time of the loss, and identity, by name. Instances that drained or slept are left out."
        self._no_instance_since: float | None = None
        self._received_at: dict[Session, float] = {}
        self._suspect_seconds = config.suspect_seconds

    def resumed(self, now: float) -> None:
        """Reset the times of the last messages: the router was frozen, so silence up to now does not count."""
        self._received_at.update(dict.fromkeys(self._here, now))

    def clear(self) -> None:
        """Forget everything: the router restarts without state."""
        self._here.clear()
        self._lost.clear()
        self._no_instance_since = None

    def serves(self, weights: int) -> bool:
        """Whether a connected instance computes with these weights."""
        return any(here.hello.ready.identity == identity_of(weights) for here in self._here.values())

    @property
    def has_instances(self) -> bool:
        return bool(self._here)

    # Messages that the router receives

    def received(self, session: Session, message: Any, now: float) -> None:
        self._received_at[session] = now
        if type(message) is InstanceStats and session in self._here:
            self._here[session].mode = message.mode

    def gone(self, session: Session, now: float) -> None:
        here = self._here.pop(session, None)
        if here is None:
            return
        name = here.hello.name
        self._lost.pop(name, None)
        if here.mode == "serving":
            self._lost[name] = now, here.hello.ready.identity
        if not self._here:
            self._no_instance_since = now

    def joins(self, event: InstanceJoined, effects: list[Any], now: float) -> None:
        """Check the router's decision: `effects` are its answer to `event`."""
        hello, hung_up = event.hello, [effect.session for effect in effects if type(effect) is CloseSession]
        refused = event.session in hung_up
        if not self._here and self._no_instance_since is None:
            self._no_instance_since = now
        if refused and self._is_name_taken(hello, now, DRIFT):
            self._watch.saw("one with the name of another that lives was refused")
            return
        if not refused and self._is_name_taken(hello, now, 1 / DRIFT):
            raise InvariantBroken(f"{hello.name} drives out another one of its name, which lives", invariant=60)
        if self._here:
            self._beside_others(hello, refused=refused, drives_out=len(hung_up) > 1)
        else:
            self._alone(hello, refused=refused, now=now)
        if refused:
            if self._lost.get(hello.name, (0.0, hello.ready.identity))[1] != hello.ready.identity:
                del self._lost[hello.name]  # the instance has come back as another
            return
        for other in [other for other, here in self._here.items() if here.hello.name == hello.name]:
            self.gone(other, now)
        self._here[event.session] = ConnectedInstance(hello)
        self._no_instance_since = None

    def _is_name_taken(self, hello: InstanceHello, now: float, drift: float) -> bool:
        """Whether another incarnation has this name, and has sent something within `suspect_seconds`."""
        found = [session for session, here in self._here.items() if here.hello.name == hello.name]
        others = [session for session in found if self._here[session].hello.incarnation != hello.incarnation]
        return any(now - self._received_at[session] < self._suspect_seconds * drift for session in others)

    def _beside_others(self, hello: InstanceHello, *, refused: bool, drives_out: bool) -> None:
        fits = all(here.hello.ready.identity == hello.ready.identity for here in self._here.values())
        if fits == refused:
            raise InvariantBroken(f"{hello.name} is {'refused, and fits' if fits else 'taken, and does not fit'}", invariant=60)
        if refused and drives_out:
            raise InvariantBroken(f"{hello.name} does not fit, and drives others out", invariant=60)
        if refused:
            known = any(here.hello.name == hello.name for here in self._here.values())
            self._watch.saw("one that does not fit was refused" + (", though it has the name of another" if known else ""))

    def _alone(self, hello: InstanceHello, *, refused: bool, now: float) -> None:
        waits = [self._left(at, now) for name, (at, identity) in self._lost.items()
                 if name != hello.name and identity != hello.ready.identity]  # fmt: skip
        if hello.refused and self._no_instance_since is not None and not self._was_connected(hello):
            waits.append(self._left(self._no_instance_since, now))
        must_wait, may_wait = any(low > 0 for low, _ in waits), any(high > 0 for _, high in waits)
        if must_wait and not refused:
            raise InvariantBroken(f"{hello.name} is taken, and others that it does not fit may come back", invariant=60)
        if refused and not may_wait:
            raise InvariantBroken(f"{hello.name} is refused, and no other instance is here or comes back", invariant=60)
        if refused:
            self._watch.saw("one that may not fit waited for others to come back")
        elif any(identity != hello.ready.identity for _, identity in self._lost.values()):
            self._watch.saw("a router has other weights than before")

    def _was_connected(self, hello: InstanceHello) -> bool:
        """Whether the instance was connected with this identity: then it may come back itself."""
        return hello.name in self._lost and self._lost[hello.name][1] == hello.ready.identity

    def _left(self, since: float, now: float) -> tuple[float, float]:
        """Seconds left to wait, at least and at most: clocks may differ by `DRIFT`."""
        return self._wait_seconds / DRIFT - (now - since), self._wait_seconds * DRIFT - (now - since)

    # Messages that the router sends

    def sent(self, session: Session, message: Any) -> None:
        request = request_of(message)
        if request is None:
            return
        weights, here = self._watch.requests[request.id].weights, self._here.get(session)
        if weights is not None and here is not None and here.hello.ready.identity != identity_of(weights):
            raise InvariantBroken(f"{request.id} is begun, and is given to one with other weights", invariant=59)
