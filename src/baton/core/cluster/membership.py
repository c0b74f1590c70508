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
from baton.core.cluster.events import Session
from baton.core.cluster.member import Member
from baton.core.cluster.prefix_index import PrefixIndex
from baton.core.cluster.roster import Roster
from baton.errors import InvariantBroken
from baton.protocol.control import InstanceReady
from baton.protocol.ids import Instant
from baton.protocol.node import Beat, NodeHello

HEALTHY_SECONDS: Final = 30.0
"""An instance that lived so long is not in a row of losses any more."""
FREE_LOSSES: Final = 2
INHIBIT_SECONDS: Final = (1.0, 2.0, 4.0, 8.0)
"""After the third loss in a row, and so on: it is the last choice for so long after it is back."""


class Loss(NamedTuple):
    """The last one of an instance."""

    in_a_row: int
    at: Instant
    hello: NodeHello | None
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
        "members",
        "names",
        "roster",
        "with_paths",
    )

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.members: dict[Session, Member] = {}
        self.names: dict[str, Member] = {}
        self.roster = Roster(config)
        self.index = PrefixIndex(config.prefix_keys_max)
        self.with_paths: dict[Session, Member] = {}
        "Those that could not read from some others of late."
        self._capacities: list[int] = []
        "Of all members, sorted."
        self._modes: Counter[str] = Counter()
        self._gone: dict[str, tuple[Instant, int]] = {}
        "Of a name that is not here: when it left, and its capacity. It may come back. At most instances_max."
        self._numbers = count(1)
        self._lapse_at: Instant | None = None
        "Nobody has been silent for too long before that. A lower bound: whoever speaks does not move it."
        self._losses: dict[str, Loss] = {}
        "Of a name: its last loss. At most instances_max."
        self._stalled: dict[Session, Member] = {}
        "Those whose worker stands still."
        self._stalls_seen = False
        "They were looked at, and nobody has said anything about itself since."
        self._nobody_since: Instant | None = None
        "Since when nobody is here. None: somebody is, or nobody has knocked yet."

    # Who is there

    def knock(self, now: Instant) -> None:
        """Somebody wants to join. Where nobody was ever here, the others are waited for from now on."""
        if not self.members and self._nobody_since is None:
            self._nobody_since = now

    def misfit(self, hello: NodeHello, now: Instant) -> str:
        """Why it cannot work beside those that are here, or were a moment ago. Empty: it can. The first one says what fits."""
        if len(self.members) >= self._config.instances_max and hello.name not in self.names:
            return f"there are {len(self.members)} instances already"
        if hello.adopt_seconds_max >= self._config.handing_seconds_max:
            return (
                f"it may take {hello.adopt_seconds_max:g} s to go on with a prompt (pull_seconds_max + release_seconds_max), "
                f"and the router gives up after {self._config.handing_seconds_max:g} s (handing_seconds_max)"
            )
        for member in self.members.values():
            return _disagreement(hello, member.hello)  # they agree with each other
        return self._too_early(hello, now)

    def _too_early(self, hello: NodeHello, now: Instant) -> str:
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

    def name_taken(self, earlier: Member, hello: NodeHello, now: Instant) -> str:
        """Why an instance cannot have the name of this one. Empty: it is the same instance again, or that one is silent. Two
        that live would replace each other for ever, and each time the requests of one of them would be lost."""
        silent = now - earlier.heard_at
        if hello.incarnation == earlier.hello.incarnation or silent >= self._config.suspect_seconds:
            return ""
        return (
            f"another instance named {hello.name} is connected and alive (its last message came {silent:.1f} s ago): give "
            f"every instance a name of its own (--name), or stop the other one"
        )

    def refuse(self, hello: NodeHello) -> None:
        """It does not fit. Where it did before it was lost, nobody waits for it as it was."""
        loss = self._losses.get(hello.name)
        if loss is not None and loss.hello is not None and _disagreement(hello, loss.hello):
            self._losses[hello.name] = loss._replace(hello=None)

    def join(self, session: Session, hello: NodeHello, now: Instant) -> Member:
        """It fits, and nobody of its name is here."""
        if session in self.members or hello.name in self.names:
            raise InvariantBroken(f"session {session} of {hello.name} has joined already", invariant=17)
        member = Member(session, hello, next(self._numbers), now)
        before = self._losses.get(hello.name)
        if before is not None and before.in_a_row > FREE_LOSSES:
            place = min(before.in_a_row - FREE_LOSSES, len(INHIBIT_SECONDS)) - 1
            member.inhibited_until = Instant(now + INHIBIT_SECONDS[place])
        self.members[session] = self.names[hello.name] = member
        self._gone.pop(hello.name, None)
        self._modes[member.mode] += 1
        insort(self._capacities, member.capacity)
        self.index.join(member.number, hello.ready.blocks)
        self.roster.join(member)
        self._nobody_since = None
        self._stalls_seen = False
        self._look_again()
        return member

    def remove(self, member: Member, now: Instant, *, reloaded: bool = False) -> None:
        """`reloaded`: by order, to come back with other weights."""
        del self.members[member.session]
        del self.names[member.name]
        self._nobody_since = None if self.members else now
        self._stalled.pop(member.session, None)
        self.with_paths.pop(member.session, None)
        for other in list(self.with_paths.values()):
            other.paths.forget(member.session)
            self.note_paths(other)
        self._modes[member.mode] -= 1
        del self._capacities[bisect_left(self._capacities, member.capacity)]
        self.index.forget(member.number)
        self.roster.leave(member)
        self._forget_gone(now, everything=reloaded)
        if not reloaded:
            self._gone[member.name] = now, member.capacity
        before = self._losses.pop(member.name, None)
        if reloaded:
            self._losses.clear()  # whoever was lost before does not fit the new ones: nobody waits for that
        elif member.mode == "serving":  # not one that was stopped with care
            in_a_row = before.in_a_row if before is not None and now - member.joined_at < HEALTHY_SECONDS else 0
            self._losses[member.name] = Loss(in_a_row + 1, now, member.hello)
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

    def hear(self, session: Session, now: Instant) -> Member | None:
        """Whoever says something lives. None: nobody whom we know."""
        member = self.members.get(session)
        if member is not None:
            member.heard_at = now
        return member

    def renew(self, now: Instant) -> None:
        """The router itself was stalled: the silence of all instances up to now does not count."""
        for member in self.members.values():
            member.heard_at = now
            if member.place is None:
                self.roster.touch(member)

    def set_mode(self, member: Member, mode: str) -> None:
        self._modes[member.mode] -= 1
        member.mode = mode
        self._modes[mode] += 1
        self.roster.touch(member)

    def note_paths(self, member: Member) -> None:
        """Whom it can read from has changed."""
        if member.paths:
            self.with_paths[member.session] = member
        else:
            self.with_paths.pop(member.session, None)

    def on_beat(self, member: Member, beat: Beat, now: Instant) -> bool:
        """Is it more likely now that a request can be placed there? This costs the same with any number of instances."""
        member.on_beat(beat)
        waited_for, member.short_for = member.short_for, False
        if not beat.stalled:
            member.stalled_since = None
            self._stalled.pop(member.session, None)
        elif member.stalled_since is None:
            member.stalled_since = now
            self._stalled[member.session] = member
        self._stalls_seen = False
        return self.roster.update(member, now) or waited_for

    # Who may get work

    @property
    def all_paused(self) -> str:
        """The mode of all, if nobody serves on purpose. Empty: somebody does, or nobody is here."""
        if not self.members or self._modes["serving"]:
            return ""
        return next(iter(self.members.values())).mode

    def any_could(self, tokens: int, unfit: Iterable[str]) -> bool:
        """Could some instance, usable or not, ever hold so many tokens? `unfit`: names of those that said they cannot."""
        able = len(self._capacities) - bisect_left(self._capacities, tokens)
        refused = [self.names[name] for name in unfit if name in self.names]
        return not self.members or able > sum(member.can_hold(tokens) for member in refused)

    def lost_could(self, tokens: int, unfit: Iterable[str], now: Instant) -> Instant | None:
        """An instance that could hold so many tokens left a moment ago: how long it may still come back."""
        times = [at for name, (at, capacity) in self._gone.items() if capacity >= tokens and name not in unfit]
        until = max(times) + self._config.no_instance_seconds if times else now
        return Instant(until) if until > now else None

    def named(self, names: Iterable[str]) -> list[Member]:
        """Those of these names that are here."""
        return [self.names[name] for name in names if name in self.names]

    def of_sessions(self, sessions: Iterable[Session]) -> list[Member]:
        return [self.members[session] for session in sessions if session in self.members]

    # Time

    def silent(self, now: Instant) -> list[Member]:
        """Those to be given up."""
        if self._lapse_at is None or self._lapse_at > now:
            return []
        lapse = self._config.lapse_seconds
        found = [member for member in self.members.values() if member.heard_at + lapse <= now]
        self._look_again(found)
        return found

    def stalled(self, now: Instant) -> list[Member]:
        """Those whose requests are to be moved to others. They are not told again before somebody has said something about
        itself: where nobody else works now, somebody may then."""
        due = [member for member in self._stalled.values() if self._move_at(member) <= now and member.legs]
        self._stalls_seen = bool(due)
        return due

    def _move_at(self, member: Member) -> Instant:
        since = member.stalled_since
        return Instant(float("inf") if since is None else since + self._config.lapse_seconds)

    def next_deadline(self) -> Instant | None:
        if not self._stalled or self._stalls_seen:
            return self._lapse_at
        times = [self._move_at(member) for member in self._stalled.values() if member.legs]
        return min(times if self._lapse_at is None else [*times, self._lapse_at])

    def _look_again(self, gone: Sequence[Member] = ()) -> None:
        heard = [member.heard_at for member in self.members.values() if member not in gone]
        self._lapse_at = Instant(min(heard) + self._config.lapse_seconds) if heard else None

    def check(self) -> None:
        if len(self.members) != len(self.names) or len(self.members) > self._config.instances_max:
            raise InvariantBroken("sessions and names of instances do not match", invariant=49)
        if self.members and self._lapse_at is None:
            raise InvariantBroken("nobody looks whether instances live", invariant=41)
        if any(self.members.get(session) is not member for session, member in self._stalled.items()):
            raise InvariantBroken("somebody who is gone stands still", invariant=49)
        if len(self._losses) > self._config.instances_max or len(self._gone) > self._config.instances_max:
            raise InvariantBroken("too many names of lost instances are remembered", invariant=49)
        self.index.check()
        self.roster.check()
        modes = Counter(member.mode for member in self.members.values())
        if modes != +self._modes or self._capacities != sorted(member.capacity for member in self.members.values()):
            raise InvariantBroken("instances are miscounted", invariant=49)
        for member in self.members.values():
            if bool(member.paths) != (member.session in self.with_paths):
                raise InvariantBroken(f"{member!r} has paths that are not looked at", invariant=49)
            if len(member.paths) >= len(self.members):
                raise InvariantBroken(f"{member!r} remembers {len(member.paths)} that it cannot read from", invariant=49)


def _disagreement(hello: NodeHello, other: NodeHello) -> str:
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
