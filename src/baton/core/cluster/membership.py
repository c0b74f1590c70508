"""Members of the cluster: which instances have joined, whether they are alive, and their capacity.

    InstanceJoined --fits--> ALIVE --1 s silent, or a fault--> SUSPECT (no new work) --2 s silent--> removed
                               ^------ any message --------------'
    InstanceLeft, or InstanceJoined of the same life: removed at once
    heartbeats report for 2 s that its worker is stalled: SUSPECT as ever, and its requests move to others (router.py)

A session is one life: messages of an ended one are ignored. cluster_instance.py holds the router's knowledge of one instance,
and roster.py sorts the instances that may get a request now.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Final, NamedTuple

from baton.config import RouterConfig
from baton.core.cluster.cluster_instance import ClusterInstance
from baton.core.cluster.events import Session
from baton.core.cluster.fit import disagreement
from baton.core.cluster.prefix_index import PrefixIndex
from baton.core.cluster.roster import Roster
from baton.errors import InvariantBroken
from baton.protocol.ids import Instant
from baton.protocol.instance import Heartbeat, InstanceHello
from baton.protocol.versions import CACHED_KEYS

HEALTHY_SECONDS: Final = 30.0
"""Seconds of life after which an instance's losses in a row are counted anew."""
FREE_LOSSES: Final = 2
INHIBIT_SECONDS: Final = (1.0, 2.0, 4.0, 8.0)
"""Seconds after its return for which an instance is the last choice, from the third loss in a row on."""


class InstanceLoss(NamedTuple):
    """The last loss of an instance."""

    in_a_row: int
    at: Instant
    hello: InstanceHello | None
    "The hello with which the instance may come back. None: it has come back with a different one."


class Membership:
    __slots__ = (
        "_capacities",
        "_config",
        "_gone",
        "_lapse_at",
        "_losses",
        "_modes",
        "_no_instance_since",
        "_numbers",
        "_stalled",
        "_stalls_seen",
        "index",
        "instances",
        "names",
        "roster",
        "with_paths",
    )

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.instances: dict[Session, ClusterInstance] = {}
        self.names: dict[str, ClusterInstance] = {}
        self.roster = Roster(config)
        self.index = PrefixIndex(config.prefix_keys_max)
        self.with_paths: dict[Session, ClusterInstance] = {}
        "Instances that failed to read from some peers recently."
        self._capacities: list[int] = []
        "Capacities of all instances, sorted."
        self._modes: Counter[str] = Counter()
        self._gone: dict[str, tuple[Instant, int]] = {}
        "Time of leaving and capacity of instances that left, by name. They may come back. At most instances_max."
        self._numbers = count(1)
        self._lapse_at: Instant | None = None
        "Lower bound of the time when an instance has been silent for too long. Messages do not move it."
        self._losses: dict[str, InstanceLoss] = {}
        "The last loss, by name. At most instances_max."
        self._stalled: dict[Session, ClusterInstance] = {}
        "Instances with a stalled worker."
        self._stalls_seen = False
        "Whether the stalls were handled, and no heartbeat has arrived since."
        self._no_instance_since: Instant | None = None
        "Time since which the cluster is empty. None: an instance is present, or none has tried to join yet."

    # Joining and leaving

    def record_dial(self, now: Instant) -> None:
        """Record that an instance tries to join. If none was ever present, the wait for the others begins now."""
        if not self.instances and self._no_instance_since is None:
            self._no_instance_since = now

    def misfit(self, hello: InstanceHello, now: Instant) -> str:
        """The reason why the instance does not fit the present or recently lost ones. Empty: it fits. The first instance
        decides what fits."""
        if len(self.instances) >= self._config.instances_max and hello.name not in self.names:
            return f"there are {len(self.instances)} instances already"
        if hello.adopt_seconds_max >= self._config.handing_seconds_max:
            return (
                f"it may take {hello.adopt_seconds_max:g} s to go on with a prompt (pull_seconds_max + release_seconds_max), "
                f"and the router gives up after {self._config.handing_seconds_max:g} s (handing_seconds_max)"
            )
        for instance in self.instances.values():
            return disagreement(hello, instance.hello)  # the others agree with each other
        return self._too_early(hello, now)

    def _too_early(self, hello: InstanceHello, now: Instant) -> str:
        """The reason why a misfit must wait while the cluster is empty: lost instances that it does not fit may come back
        first. Otherwise the loss of all, or a restarted router, would make a stray instance the cluster, and the cluster
        strays. Instances that came back with other weights are not awaited."""
        seconds = self._config.no_instance_seconds
        for name, loss in self._losses.items():
            wait = loss.at + seconds - now
            if name != hello.name and wait > 0 and loss.hello is not None and (why := disagreement(hello, loss.hello)):
                return f"{why}, and {name} may come back within {wait:.0f} s"
        mine = self._losses.get(hello.name)
        if mine is not None and mine.hello is not None and not disagreement(hello, mine.hello):
            return ""  # the awaited instances have this identity too
        wait = 0.0 if self._no_instance_since is None else self._no_instance_since + seconds - now
        if hello.refused and wait > 0:
            return f"it was refused before, and those that it did not fit may come back within {wait:.0f} s"
        return ""

    def name_taken(self, earlier: ClusterInstance, hello: InstanceHello, now: Instant) -> tuple[str, float]:
        """The reason why the instance cannot use its name, which is taken, and the seconds until it can, should the holder be
        dead. Empty: it is the same instance again, or the holder is silent. Two live ones would replace each other for ever,
        and each time the requests of one of them would be lost."""
        silent = now - earlier.received_at
        if hello.incarnation == earlier.hello.incarnation or silent >= self._config.suspect_seconds:
            return "", 0.0
        why = (
            f"another instance named {hello.name} is connected and alive (its last message came {silent:.1f} s ago): give "
            f"every instance a name of its own (--name), or stop the other one"
        )
        return why, self._config.suspect_seconds - silent

    def refuse(self, hello: InstanceHello) -> None:
        """Record that the instance does not fit. If it did before it was lost, its return as it was is not awaited any more."""
        loss = self._losses.get(hello.name)
        if loss is not None and loss.hello is not None and disagreement(hello, loss.hello):
            self._losses[hello.name] = loss._replace(hello=None)

    def join(self, session: Session, hello: InstanceHello, now: Instant) -> ClusterInstance:
        """Add an instance that fits and whose name is not in use."""
        if session in self.instances or hello.name in self.names:
            raise InvariantBroken(f"session {session} of {hello.name} has joined already", invariant=17)
        instance = ClusterInstance(session, hello, next(self._numbers), now)
        before = self._losses.get(hello.name)
        if before is not None and before.in_a_row > FREE_LOSSES:
            place = min(before.in_a_row - FREE_LOSSES, len(INHIBIT_SECONDS)) - 1
            instance.inhibited_until = Instant(now + INHIBIT_SECONDS[place])
        self.instances[session] = self.names[hello.name] = instance
        self._gone.pop(hello.name, None)
        self._modes[instance.mode] += 1
        insort(self._capacities, instance.capacity)
        instance.bit = self.index.join(instance.number, hello.ready.blocks, publishes=CACHED_KEYS in hello.capabilities)
        self.roster.join(instance)
        self._no_instance_since = None
        self._stalls_seen = False
        self._rearm()
        return instance

    def remove(self, instance: ClusterInstance, now: Instant, *, reloaded: bool = False) -> None:
        """Remove an instance. `reloaded`: it restarts by order, and comes back with other weights."""
        del self.instances[instance.session]
        del self.names[instance.name]
        self._no_instance_since = None if self.instances else now
        self._stalled.pop(instance.session, None)
        self.with_paths.pop(instance.session, None)
        for other in list(self.with_paths.values()):
            other.paths.forget(instance.session)
            self.note_paths(other)
        self._modes[instance.mode] -= 1
        del self._capacities[bisect_left(self._capacities, instance.capacity)]
        self.index.forget(instance.number)
        self.roster.leave(instance)
        self._forget_gone(now, everything=reloaded)
        if not reloaded:
            self._gone[instance.name] = now, instance.capacity
        before = self._losses.pop(instance.name, None)
        if reloaded:
            self._losses.clear()  # instances lost before do not fit the new weights: their return is not awaited
        elif instance.mode == "serving":  # a drained instance is no loss
            in_a_row = before.in_a_row if before is not None and now - instance.joined_at < HEALTHY_SECONDS else 0
            self._losses[instance.name] = InstanceLoss(in_a_row + 1, now, instance.hello)
        while len(self._losses) > self._config.instances_max:
            del self._losses[next(iter(self._losses))]

    def _forget_gone(self, now: Instant, *, everything: bool) -> None:
        """Forget instances that are not awaited any more. `everything`: with other weights they may be of any size."""
        seconds = self._config.no_instance_seconds
        while self._gone and (everything or len(self._gone) >= self._config.instances_max or self._oldest + seconds <= now):
            del self._gone[next(iter(self._gone))]

    @property
    def _oldest(self) -> Instant:
        return next(iter(self._gone.values()))[0]

    def record_alive(self, session: Session, now: Instant) -> ClusterInstance | None:
        """Record that the instance is alive. None: the session is unknown."""
        instance = self.instances.get(session)
        if instance is not None:
            instance.received_at = now
        return instance

    def renew(self, now: Instant) -> None:
        """Forget the silence of all instances up to now: the router itself was stalled."""
        for instance in self.instances.values():
            instance.received_at = now
            if instance.place is None:
                self.roster.touch(instance)

    def set_mode(self, instance: ClusterInstance, mode: str) -> None:
        self._modes[instance.mode] -= 1
        instance.mode = mode
        self._modes[mode] += 1
        self.roster.touch(instance)

    def note_paths(self, instance: ClusterInstance) -> None:
        """Update `with_paths`: the instance's failed paths have changed."""
        if instance.paths:
            self.with_paths[instance.session] = instance
        else:
            self.with_paths.pop(instance.session, None)

    def on_beat(self, instance: ClusterInstance, beat: Heartbeat, now: Instant) -> bool:
        """Apply a heartbeat. True: it is more likely now that a request can be placed there. The cost does not depend on the
        number of instances."""
        instance.on_beat(beat)
        self.index.expire(instance.number, now)
        waited_for, instance.short_for = instance.short_for, False
        if not beat.stalled:
            instance.stalled_since = None
            self._stalled.pop(instance.session, None)
        elif instance.stalled_since is None:
            instance.stalled_since = now
            self._stalled[instance.session] = instance
        self._stalls_seen = False
        return self.roster.update(instance, now) or waited_for

    # Capacity

    @property
    def all_paused(self) -> str:
        """The mode of all instances if none is serving. Empty: one is serving, or the cluster is empty."""
        if not self.instances or self._modes["serving"]:
            return ""
        return next(iter(self.instances.values())).mode

    def any_could(self, tokens: int, unfit: Iterable[str]) -> bool:
        """Whether any instance, usable or not, could ever hold this many tokens. `unfit`: names of those that reported they
        cannot."""
        able = len(self._capacities) - bisect_left(self._capacities, tokens)
        refused = [self.names[name] for name in unfit if name in self.names]
        return not self.instances or able > sum(instance.can_hold(tokens) for instance in refused)

    def lost_could(self, tokens: int, unfit: Iterable[str], now: Instant) -> Instant | None:
        """Time until which an instance that left recently, and could hold this many tokens, may come back. None: there is no
        such instance."""
        times = [at for name, (at, capacity) in self._gone.items() if capacity >= tokens and name not in unfit]
        until = max(times) + self._config.no_instance_seconds if times else now
        return Instant(until) if until > now else None

    def named(self, names: Iterable[str]) -> list[ClusterInstance]:
        """Present instances with these names."""
        return [self.names[name] for name in names if name in self.names]

    def of_sessions(self, sessions: Iterable[Session]) -> list[ClusterInstance]:
        return [self.instances[session] for session in sessions if session in self.instances]

    # Time

    def silent(self, now: Instant) -> list[ClusterInstance]:
        """Instances to remove, because they have been silent for too long."""
        if self._lapse_at is None or self._lapse_at > now:
            return []
        lapse = self._config.lapse_seconds
        found = [instance for instance in self.instances.values() if instance.received_at + lapse <= now]
        self._rearm(found)
        return found

    def stalled(self, now: Instant) -> list[ClusterInstance]:
        """Instances whose requests are to move to others. Not reported again before the next heartbeat or join, which may make
        another instance usable."""
        due = [instance for instance in self._stalled.values() if self._move_at(instance) <= now and instance.assigned]
        self._stalls_seen = bool(due)
        return due

    def _move_at(self, instance: ClusterInstance) -> Instant:
        since = instance.stalled_since
        return Instant(float("inf") if since is None else since + self._config.lapse_seconds)

    def next_deadline(self) -> Instant | None:
        if not self._stalled or self._stalls_seen:
            return self._lapse_at
        times = [self._move_at(instance) for instance in self._stalled.values() if instance.assigned]
        return min(times if self._lapse_at is None else [*times, self._lapse_at])

    def _rearm(self, gone: Sequence[ClusterInstance] = ()) -> None:
        times = [instance.received_at for instance in self.instances.values() if instance not in gone]
        self._lapse_at = Instant(min(times) + self._config.lapse_seconds) if times else None

    def check(self) -> None:
        if len(self.instances) != len(self.names) or len(self.instances) > self._config.instances_max:
            raise InvariantBroken("sessions and names of instances do not match", invariant=49)
        if self.instances and self._lapse_at is None:
            raise InvariantBroken("no deadline is armed to check instances", invariant=41)
        if any(self.instances.get(session) is not instance for session, instance in self._stalled.items()):
            raise InvariantBroken("an instance that has left is listed as stalled", invariant=49)
        if len(self._losses) > self._config.instances_max or len(self._gone) > self._config.instances_max:
            raise InvariantBroken("too many names of lost instances are remembered", invariant=49)
        self.roster.check()
        modes = Counter(instance.mode for instance in self.instances.values())
        if modes != +self._modes or self._capacities != sorted(instance.capacity for instance in self.instances.values()):
            raise InvariantBroken("instances are miscounted", invariant=49)
        for instance in self.instances.values():
            if bool(instance.paths) != (instance.session in self.with_paths):
                raise InvariantBroken(f"{instance!r} has paths that are not looked at", invariant=49)
            if len(instance.paths) >= len(self.instances):
                raise InvariantBroken(f"{instance!r} remembers {len(instance.paths)} that it cannot read from", invariant=49)
