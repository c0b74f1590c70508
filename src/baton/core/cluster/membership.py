"""Which instances there are, whether they live, and how much room they have.

    Join --fits--> ALIVE --1 s silent, or a fault--> SUSPECT (no new work) --2 s silent--> gone (given up)
                     ^------ says something ----------'
    Part, or another Join of the same life: gone at once
    says for 2 s that its worker stands still: SUSPECT as ever, and what it has is moved to others (router.py)

A session is one life: what comes from one that is gone is not heard. What a router knows of one instance is member.py, and
which instances may get a request now roster.py.
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
from baton.core.cluster.prefix_index import PrefixIndex
from baton.core.cluster.roster import Roster
from baton.errors import InvariantBroken
from baton.protocol.control import InstanceReady
from baton.protocol.ids import Instant
from baton.protocol.instance import Heartbeat, InstanceHello

HEALTHY_SECONDS: Final = 30.0
"""An instance that lived so long is not in a row of losses any more."""
FREE_LOSSES: Final = 2
INHIBIT_SECONDS: Final = (1.0, 2.0, 4.0, 8.0)
"""After the third loss in a row, and so on: it is the last choice for so long after it is back."""


class InstanceLoss(NamedTuple):
    """The last one of an instance."""

    in_a_row: int
    at: Instant
    hello: InstanceHello | None
    "As what it may come back. None: it has come back as something else."


class Membership:
    __slots__ = (
        "_capacities",
        "_config",
        "_gone",
        "_lapse_at",
        "_losses",
        "_modes",
        "_nobody_since",
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
        "Those that could not read from some others of late."
        self._capacities: list[int] = []
        "Of all instances, sorted."
        self._modes: Counter[str] = Counter()
        self._gone: dict[str, tuple[Instant, int]] = {}
        "Of a name that is not here: when it left, and its capacity. It may come back. At most instances_max."
        self._numbers = count(1)
        self._lapse_at: Instant | None = None
        "Nobody has been silent for too long before that. A lower bound: whoever speaks does not move it."
        self._losses: dict[str, InstanceLoss] = {}
        "Of a name: its last loss. At most instances_max."
        self._stalled: dict[Session, ClusterInstance] = {}
        "Those whose worker stands still."
        self._stalls_seen = False
        "They were looked at, and nobody has said anything about itself since."
        self._nobody_since: Instant | None = None
        "Since when nobody is here. None: somebody is, or nobody has knocked yet."

    # Who is there

    def knock(self, now: Instant) -> None:
        """Somebody wants to join. Where nobody was ever here, the others are waited for from now on."""
        if not self.instances and self._nobody_since is None:
            self._nobody_since = now

    def misfit(self, hello: InstanceHello, now: Instant) -> str:
        """Why it cannot work beside those that are here, or were a moment ago. Empty: it can. The first one says what fits."""
        if len(self.instances) >= self._config.instances_max and hello.name not in self.names:
            return f"there are {len(self.instances)} instances already"
        if hello.adopt_seconds_max >= self._config.handing_seconds_max:
            return (
                f"it may take {hello.adopt_seconds_max:g} s to go on with a prompt (pull_seconds_max + release_seconds_max), "
                f"and the router gives up after {self._config.handing_seconds_max:g} s (handing_seconds_max)"
            )
        for instance in self.instances.values():
            return _disagreement(hello, instance.hello)  # they agree with each other
        return self._too_early(hello, now)

    def _too_early(self, hello: InstanceHello, now: Instant) -> str:
        """Nobody is here. One that does not fit those that were, or did not before, lets them come back first: else the loss of
        all, or a router that is started again, would make a stray instance the cluster, and the cluster strays. Those that
        have come back with other weights themselves are not waited for."""
        seconds = self._config.no_instance_seconds
        for name, loss in self._losses.items():
            wait = loss.at + seconds - now
            if name != hello.name and wait > 0 and loss.hello is not None and (why := _disagreement(hello, loss.hello)):
                return f"{why}, and {name} may come back within {wait:.0f} s"
        mine = self._losses.get(hello.name)
        if mine is not None and mine.hello is not None and not _disagreement(hello, mine.hello):
            return ""  # those that are waited for are like this one
        wait = 0.0 if self._nobody_since is None else self._nobody_since + seconds - now
        if hello.refused and wait > 0:
            return f"it was refused before, and those that it did not fit may come back within {wait:.0f} s"
        return ""

    def name_taken(self, earlier: ClusterInstance, hello: InstanceHello, now: Instant) -> str:
        """Why an instance cannot have the name of this one. Empty: it is the same instance again, or that one is silent. Two
        that live would replace each other for ever, and each time the requests of one of them would be lost."""
        silent = now - earlier.heard_at
        if hello.incarnation == earlier.hello.incarnation or silent >= self._config.suspect_seconds:
            return ""
        return (
            f"another instance named {hello.name} is connected and alive (its last message came {silent:.1f} s ago): give "
            f"every instance a name of its own (--name), or stop the other one"
        )

    def refuse(self, hello: InstanceHello) -> None:
        """It does not fit. Where it did before it was lost, nobody waits for it as it was."""
        loss = self._losses.get(hello.name)
        if loss is not None and loss.hello is not None and _disagreement(hello, loss.hello):
            self._losses[hello.name] = loss._replace(hello=None)

    def join(self, session: Session, hello: InstanceHello, now: Instant) -> ClusterInstance:
        """It fits, and nobody of its name is here."""
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
        self.index.join(instance.number, hello.ready.blocks)
        self.roster.join(instance)
        self._nobody_since = None
        self._stalls_seen = False
        self._look_again()
        return instance

    def remove(self, instance: ClusterInstance, now: Instant, *, reloaded: bool = False) -> None:
        """`reloaded`: by order, to come back with other weights."""
        del self.instances[instance.session]
        del self.names[instance.name]
        self._nobody_since = None if self.instances else now
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
            self._losses.clear()  # whoever was lost before does not fit the new ones: nobody waits for that
        elif instance.mode == "serving":  # not one that was stopped with care
            in_a_row = before.in_a_row if before is not None and now - instance.joined_at < HEALTHY_SECONDS else 0
            self._losses[instance.name] = InstanceLoss(in_a_row + 1, now, instance.hello)
        while len(self._losses) > self._config.instances_max:
            del self._losses[next(iter(self._losses))]

    def _forget_gone(self, now: Instant, *, everything: bool) -> None:
        """Those that are not waited for any more. `everything`: with other weights they may be of any size."""
        seconds = self._config.no_instance_seconds
        while self._gone and (everything or len(self._gone) >= self._config.instances_max or self._oldest + seconds <= now):
            del self._gone[next(iter(self._gone))]

    @property
    def _oldest(self) -> Instant:
        return next(iter(self._gone.values()))[0]

    def hear(self, session: Session, now: Instant) -> ClusterInstance | None:
        """Whoever says something lives. None: nobody whom we know."""
        instance = self.instances.get(session)
        if instance is not None:
            instance.heard_at = now
        return instance

    def renew(self, now: Instant) -> None:
        """The router itself was stalled: the silence of all instances up to now does not count."""
        for instance in self.instances.values():
            instance.heard_at = now
            if instance.place is None:
                self.roster.touch(instance)

    def set_mode(self, instance: ClusterInstance, mode: str) -> None:
        self._modes[instance.mode] -= 1
        instance.mode = mode
        self._modes[mode] += 1
        self.roster.touch(instance)

    def note_paths(self, instance: ClusterInstance) -> None:
        """Whom it can read from has changed."""
        if instance.paths:
            self.with_paths[instance.session] = instance
        else:
            self.with_paths.pop(instance.session, None)

    def on_beat(self, instance: ClusterInstance, beat: Heartbeat, now: Instant) -> bool:
        """Is it more likely now that a request can be placed there? This costs the same with any number of instances."""
        instance.on_beat(beat)
        waited_for, instance.short_for = instance.short_for, False
        if not beat.stalled:
            instance.stalled_since = None
            self._stalled.pop(instance.session, None)
        elif instance.stalled_since is None:
            instance.stalled_since = now
            self._stalled[instance.session] = instance
        self._stalls_seen = False
        return self.roster.update(instance, now) or waited_for

    # Who may get work

    @property
    def all_paused(self) -> str:
        """The mode of all, if nobody serves on purpose. Empty: somebody does, or nobody is here."""
        if not self.instances or self._modes["serving"]:
            return ""
        return next(iter(self.instances.values())).mode

    def any_could(self, tokens: int, unfit: Iterable[str]) -> bool:
        """Could some instance, usable or not, ever hold so many tokens? `unfit`: names of those that said they cannot."""
        able = len(self._capacities) - bisect_left(self._capacities, tokens)
        refused = [self.names[name] for name in unfit if name in self.names]
        return not self.instances or able > sum(instance.can_hold(tokens) for instance in refused)

    def lost_could(self, tokens: int, unfit: Iterable[str], now: Instant) -> Instant | None:
        """An instance that could hold so many tokens left a moment ago: how long it may still come back."""
        times = [at for name, (at, capacity) in self._gone.items() if capacity >= tokens and name not in unfit]
        until = max(times) + self._config.no_instance_seconds if times else now
        return Instant(until) if until > now else None

    def named(self, names: Iterable[str]) -> list[ClusterInstance]:
        """Those of these names that are here."""
        return [self.names[name] for name in names if name in self.names]

    def of_sessions(self, sessions: Iterable[Session]) -> list[ClusterInstance]:
        return [self.instances[session] for session in sessions if session in self.instances]

    # Time

    def silent(self, now: Instant) -> list[ClusterInstance]:
        """Those to be given up."""
        if self._lapse_at is None or self._lapse_at > now:
            return []
        lapse = self._config.lapse_seconds
        found = [instance for instance in self.instances.values() if instance.heard_at + lapse <= now]
        self._look_again(found)
        return found

    def stalled(self, now: Instant) -> list[ClusterInstance]:
        """Those whose requests are to be moved to others. They are not told again before somebody has said something about
        itself: where nobody else works now, somebody may then."""
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

    def _look_again(self, gone: Sequence[ClusterInstance] = ()) -> None:
        heard = [instance.heard_at for instance in self.instances.values() if instance not in gone]
        self._lapse_at = Instant(min(heard) + self._config.lapse_seconds) if heard else None

    def check(self) -> None:
        if len(self.instances) != len(self.names) or len(self.instances) > self._config.instances_max:
            raise InvariantBroken("sessions and names of instances do not match", invariant=49)
        if self.instances and self._lapse_at is None:
            raise InvariantBroken("nobody looks whether instances live", invariant=41)
        if any(self.instances.get(session) is not instance for session, instance in self._stalled.items()):
            raise InvariantBroken("somebody who is gone stands still", invariant=49)
        if len(self._losses) > self._config.instances_max or len(self._gone) > self._config.instances_max:
            raise InvariantBroken("too many names of lost instances are remembered", invariant=49)
        self.index.check()
        self.roster.check()
        modes = Counter(instance.mode for instance in self.instances.values())
        if modes != +self._modes or self._capacities != sorted(instance.capacity for instance in self.instances.values()):
            raise InvariantBroken("instances are miscounted", invariant=49)
        for instance in self.instances.values():
            if bool(instance.paths) != (instance.session in self.with_paths):
                raise InvariantBroken(f"{instance!r} has paths that are not looked at", invariant=49)
            if len(instance.paths) >= len(self.instances):
                raise InvariantBroken(f"{instance!r} remembers {len(instance.paths)} that it cannot read from", invariant=49)


def _disagreement(hello: InstanceHello, other: InstanceHello) -> str:
    """Why these two cannot be in one cluster. Empty: they can."""
    ready, theirs = hello.ready, other.ready
    for what, mine, its in (
        _identity_part(ready, theirs),
        ("block size", ready.block_size, theirs.block_size),
        ("vocabulary", ready.vocab_size, theirs.vocab_size),
        ("context of the model", ready.model_context_tokens, theirs.model_context_tokens),
        ("layout of KV blocks", hello.layout.hex(), other.layout.hex()),
    ):
        if mine != its:
            return f"{what} is {mine}, that of {other.name} is {its}: all instances of a cluster must agree"
    return ""


def _identity_part(ready: InstanceReady, theirs: InstanceReady) -> tuple[str, str, str]:
    """The first part of the identity that differs, where both sides have sent the parts; else the digests."""
    if ready.identity != theirs.identity:
        for name, part in ready.identity_parts.items():
            other = theirs.identity_parts.get(name, part)
            if other != part:
                return f"{name} of the KV identity", part, other
    return "identity", ready.identity.hex(), theirs.identity.hex()
